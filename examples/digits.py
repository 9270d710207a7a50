"""Handwritten digits on K devices, checked against the same training on one device.

    make demo       # sets up an environment, and runs the next line in it
    .venv/bin/python examples/digits.py --devices 8

A small convnet learns scikit-learn's digits: 1797 images of 8×8 pixels. K towers train with a
``TowerOptimizer``. Then one device trains with the K-fold batch. The losses of each step and the
weights at the end must be equal to rounding, and the towers' weights to the bit. The copies that
TensorFlow executed in one step must be those that were planned. TensorFlow 1.15 and 2.
"""

import argparse
import os
import sys

# before TensorFlow is imported, because it reads this once: no lines of its start
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# TF32 rounds to 1e-3, which is more than is allowed below
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tqdm import tqdm

import hier_allreduce
from hier_allreduce.formatting import table

tf1 = tf.compat.v1
TESTED = 360  # images kept for the test
BATCH = 128  # images in a step, over all towers
RATE, MOMENTUM = 0.1, 0.9
EPOCHS = 60  # fewer may be too few for the accuracy
ACCURACY = 0.98
DIFFERENCE = 1e-5  # allowed, of a loss or a weight


def convnet(images):
    """Return the logits of one tower; its variables go to the current device and variable scope.

    The net is smooth, because a ReLU turns a rounding error of 1e-8 into another gradient once in a
    while. The comparison with one device would show that instead of the all-reduce.
    """

    def layer(number, x, shape, op, activation):
        with tf1.variable_scope(f"layer{number}"):
            # with its own seed, so that every tower of every graph begins with the same weights
            initializer = tf1.variance_scaling_initializer(2.0, seed=number)
            weights = tf1.get_variable("W", shape, initializer=initializer)
            bias = tf1.get_variable("b", shape[-1:], initializer=tf1.zeros_initializer())
            return activation(op(x, weights) + bias)

    def convolution(x, weights):
        return tf.nn.conv2d(x, weights, strides=[1, 1, 1, 1], padding="SAME")

    x = layer(0, images, [3, 3, 1, 32], convolution, tf.nn.swish)
    x = layer(1, x, [3, 3, 32, 64], convolution, tf.nn.swish)
    x = tf.reshape(tf.nn.avg_pool2d(x, 2, 2, "VALID"), [-1, 4 * 4 * 64])
    x = layer(2, x, [4 * 4 * 64, 64], tf.matmul, tf.nn.swish)
    return layer(3, x, [64, 10], tf.matmul, tf.identity)


def load():
    """Return the images and labels to train on, and those to test on, split at random."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    order = np.random.RandomState(0).permutation(len(images))
    test, training = order[:TESTED], order[TESTED:]
    return (images[training], labels[training]), (images[test], labels[test])


def batches(training, size, epochs):
    """Yield the images and labels of each step, in a new order each epoch.

    Every image is shifted by up to one pixel.
    """
    (images, labels), random = training, np.random.RandomState(0)
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), "constant")
    for _ in range(epochs):
        order, shifts = random.permutation(len(labels)), random.randint(3, size=(len(labels), 2))
        for start in range(0, len(labels) - size + 1, size):
            chosen = order[start : start + size]
            yield (
                np.array(
                    [padded[i, y : y + 8, x : x + 8] for i, (y, x) in zip(chosen, shifts[chosen])]
                ),
                labels[chosen],
            )


def train(devices, training, test, size, epochs, strategy, title):
    """Train in a graph with one tower on each device.

    Returns: the loss of each step, tower 0's weights, the accuracy on the test, the audit of one
    step, the largest difference between towers.
    """
    with tf.Graph().as_default():
        images, labels = (
            tf1.placeholder(tf.float32, [None, 8, 8, 1]),
            tf1.placeholder(tf.int64, [None]),
        )
        rate = tf1.placeholder(tf.float32, [])
        optimizer = hier_allreduce.TowerOptimizer(
            tf1.train.MomentumOptimizer(rate, MOMENTUM), devices, strategy=strategy
        )
        rows, losses, weights, logits = [], [], [], []
        halves = zip(devices, tf.split(images, len(devices)), tf.split(labels, len(devices)))
        for k, (device, x, y) in enumerate(halves):
            with tf.device(device), tf1.variable_scope(f"tower{k}") as scope:
                logits.append(convnet(x))
                cost = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits[k])
                losses.append(tf.reduce_mean(cost))
                weights.append(tf1.trainable_variables(f"{scope.name}/"))
                rows.append(optimizer.compute_gradients(losses[k], var_list=weights[k]))
        train_op, loss = optimizer.apply_gradients(rows), tf.add_n(losses) / len(losses)
        with tf.device(devices[0]), tf1.variable_scope("tower0", reuse=True):
            right = tf.reduce_mean(
                tf.cast(tf.equal(tf.argmax(convnet(images), 1), labels), tf.float32)
            )

        config = tf1.ConfigProto(device_count={"CPU": len(devices)}, allow_soft_placement=True)
        with tf1.Session(config=config) as session:
            session.run(tf1.global_variables_initializer())
            session.run(optimizer.init_op)
            history, audited = [], None
            steps = len(training[1]) // size * epochs
            bar = tqdm(
                batches(training, size, epochs),
                title,
                steps,
                mininterval=0.3 if sys.stderr.isatty() else 10,
            )
            for number, (x, y) in enumerate(bar):
                # the rate falls half way and near the end
                slow = 0.3 if number > steps / 2 else 1.0
                feed = {
                    images: x,
                    labels: y,
                    rate: RATE * (0.05 if number > steps * 5 / 6 else slow),
                }
                options, metadata = tf1.RunOptions(output_partition_graphs=True), tf1.RunMetadata()
                if number == 0 and len(devices) > 1:
                    value, _ = session.run([loss, train_op], feed, options, metadata)
                    audited = hier_allreduce.audit(metadata, session.graph)
                else:
                    value, _ = session.run([loss, train_op], feed)
                history.append(value)
                bar.set_postfix_str(f"loss {value:.4f}", refresh=False)
            accuracy = session.run(right, {images: test[0], labels: test[1]})
            towers = session.run(weights)
    drift = max(np.max(np.abs(a - b)) for tower in towers for a, b in zip(tower, towers[0]))
    return history, towers[0], accuracy, audited, drift


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--devices", type=int, default=8, help="how many towers (default 8)")
    parser.add_argument(
        "--gpus", action="store_true", help="towers on /gpu:0 … instead of logical CPU devices"
    )
    parser.add_argument(
        "--strategy", help="how to reduce: an algorithm, or the name or path of a YAML file"
    )
    parser.add_argument(
        "--epochs", type=int, default=EPOCHS, help=f"passes over the images (default {EPOCHS})"
    )
    args = parser.parse_args()

    tf1.disable_eager_execution()
    tf1.enable_resource_variables()
    devices = [f"/{'gpu' if args.gpus else 'cpu'}:{k}" for k in range(args.devices)]
    training, test = load()
    size = BATCH // args.devices * args.devices
    many = train(
        devices, training, test, size, args.epochs, args.strategy, f"{args.devices} devices"
    )
    one = train(devices[:1], training, test, size, args.epochs, None, "one device, the whole batch")

    losses, weights, accuracy, audited, drift = many
    loss = np.max(np.abs(np.subtract(losses, one[0])))
    weight = max(np.max(np.abs(a - b)) for a, b in zip(weights, one[1]))
    must = f"at least {ACCURACY:.0%}" if args.epochs >= EPOCHS else "not judged: few epochs"
    checks = [
        (
            f"test accuracy on {TESTED} images",
            f"{accuracy:.1%}",
            must,
            accuracy >= ACCURACY or args.epochs < EPOCHS,
        ),
        (
            f"{args.devices} devices and one: any of {len(losses)} losses",
            f"{loss:.1e}",
            "at most 1e-05",
            loss <= DIFFERENCE,
        ),
        (
            f"{args.devices} devices and one: any weight",
            f"{weight:.1e}",
            "at most 1e-05",
            weight <= DIFFERENCE,
        ),
        (f"any weight between the {args.devices} devices", f"{drift:g}", "exactly 0", drift == 0),
    ]
    print(
        table(
            [
                ("check", "found", "must be", ""),
                *((*row, "ok" if good else "FAILED") for *row, good in checks),
            ]
        )
    )
    print(f"\n{audited or 'one device: no copies'}")
    return 0 if all(good for *_, good in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
