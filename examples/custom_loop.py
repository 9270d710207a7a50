"""A training loop in tf.function, under MirroredStrategy.

    pip install . scikit-learn    # in a checkout, beside your TensorFlow
    python examples/custom_loop.py --devices 3 --steps 100

The all-reduce happens in ``optimizer.apply_gradients`` inside ``strategy.run``, as with any
``cross_device_ops``. TensorFlow 2.13 or later.
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
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    strategy = tf.distribute.MirroredStrategy(
        device_names(args.devices), cross_device_ops=HierarchicalAllReduce()
    )
    batch = 40 * args.devices
    images, labels = load_digits(return_X_y=True)
    data = tf.data.Dataset.from_tensor_slices(
        ((images / 16.0).astype(np.float32), labels.astype(np.int64))
    )
    data = data.repeat().shuffle(1000, seed=0).batch(batch)
    batches = iter(strategy.experimental_distribute_dataset(data))

    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(64, "tanh"), tf.keras.layers.Dense(10)])
        model.build([None, 64])
        optimizer = tf.keras.optimizers.SGD(0.5, momentum=0.9)
        optimizer.build(model.trainable_variables)

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(logits=model(x), labels=y)
            # the all-reduce adds up, so each replica divides by the examples of all replicas
            loss = tf.reduce_sum(losses) / batch
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    @tf.function  # without jit_compile=True: XLA ignores cross_device_ops
    def step(x, y):
        return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)

    losses = [float(step(*next(batches))) for _ in range(args.steps)]
    first, last = losses[0], losses[-1]
    print(f"{args.devices} replicas, loss of the first and the last step: {first:.3f} {last:.3f}")
    copies = [strategy.experimental_local_results(weight) for weight in model.trainable_variables]
    equal = all(np.array_equal(copy.numpy(), same[0].numpy()) for same in copies for copy in same)
    print("all replicas are equal" if equal else "the replicas differ")


if __name__ == "__main__":
    main()
