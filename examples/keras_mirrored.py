"""Keras under MirroredStrategy: handwritten digits on GPUs, or else on logical CPU devices.

    pip install . scikit-learn    # in a checkout, beside your TensorFlow
    python examples/keras_mirrored.py --devices 4 --epochs 5

The line that matters is the one with ``cross_device_ops``. TensorFlow 2.13 or later.
"""

import argparse
import os

# before TensorFlow is imported, because it reads this once: no lines of its start
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from hier_allreduce.integrations.distribute import HierarchicalAllReduce


def device_names(count):
    """Return ``count`` GPUs, or as many logical CPU devices where there are fewer GPUs."""
    if len(tf.config.list_physical_devices("GPU")) >= count:
        return [f"GPU:{k}" for k in range(count)]
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * count
    )
    return [f"CPU:{k}" for k in range(count)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--examples", type=int, default=1680)
    args = parser.parse_args()

    strategy = tf.distribute.MirroredStrategy(
        device_names(args.devices), cross_device_ops=HierarchicalAllReduce()
    )
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32)[: args.examples]
    data = tf.data.Dataset.from_tensor_slices((images, labels[: args.examples]))
    data = data.shuffle(len(images), seed=0).batch(30 * args.devices, drop_remainder=True)

    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(64, "tanh"), tf.keras.layers.Dense(10)])
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.Adam(0.01), loss)
    history = model.fit(data, epochs=args.epochs, shuffle=False, verbose=0)
    print(
        f"{args.devices} replicas, loss of each epoch:",
        *(f"{value:.3f}" for value in history.history["loss"]),
    )


if __name__ == "__main__":
    main()
