"""Towers as in TensorFlow 1: a graph, a session, a copy of the model on each device.

    pip install . scikit-learn    # in a checkout, beside your TensorFlow
    python examples/towers.py --devices 4 --steps 100 --update sharded

``--update sharded`` is ZeRO stage 1: each variable is updated on one device, where its slots are,
and its new value is copied to the others. TensorFlow 1.15 and 2.
"""

import argparse
import os

# before TensorFlow is imported, because it reads this once: no lines of its start
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import hier_allreduce

tf1 = tf.compat.v1


def tower_loss(images, labels):
    """Return the loss of one tower; its variables go to the current device and variable scope."""
    weights = tf1.get_variable(
        "hidden", [64, 32], initializer=tf1.glorot_uniform_initializer(seed=1)
    )
    bias = tf1.get_variable("bias", [32], initializer=tf1.zeros_initializer())
    output = tf1.get_variable(
        "output", [32, 10], initializer=tf1.glorot_uniform_initializer(seed=2)
    )
    logits = tf.matmul(tf.tanh(tf.matmul(images, weights) + bias), output)
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=labels)
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=4, help="how many towers")
    parser.add_argument(
        "--gpus", action="store_true", help="towers on /gpu:0 … instead of logical CPU devices"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--update", choices=["replicated", "once", "sharded"], default="replicated")
    args = parser.parse_args()

    tf1.disable_eager_execution()
    tf1.enable_resource_variables()
    devices = [f"/{'gpu' if args.gpus else 'cpu'}:{k}" for k in range(args.devices)]
    images = tf1.placeholder(tf.float32, [None, 64])
    labels = tf1.placeholder(tf.int64, [None])

    optimizer = hier_allreduce.TowerOptimizer(
        tf1.train.AdamOptimizer(0.01), devices, update=args.update
    )
    rows, losses = [], []
    for k, (device, x, y) in enumerate(
        zip(devices, tf.split(images, args.devices), tf.split(labels, args.devices))
    ):
        with tf.device(device), tf1.variable_scope(f"tower{k}") as scope:
            losses.append(tower_loss(x, y))
            variables = tf1.trainable_variables(f"{scope.name}/")
            rows.append(optimizer.compute_gradients(losses[-1], var_list=variables))
    train_op = optimizer.apply_gradients(rows)  # with the mean of all towers' gradients

    inputs, classes = load_digits(return_X_y=True)
    batch = 40 * args.devices
    order = np.random.RandomState(0)
    with tf1.Session(
        config=tf1.ConfigProto(device_count={"CPU": args.devices}, allow_soft_placement=True)
    ) as session:
        session.run(tf1.global_variables_initializer())
        session.run(optimizer.init_op)  # towers start equal
        history = []
        for _ in range(args.steps):
            chosen = order.choice(len(inputs), batch)
            feed = {images: inputs[chosen] / 16.0, labels: classes[chosen]}
            history.append(np.mean(session.run([*losses, train_op], feed)[:-1]))
        first, last = history[0], history[-1]
        print(f"{args.devices} towers, loss of the first and the last step: {first:.3f} {last:.3f}")
        optimizer.check_replicas(session)  # an error if they differ
        print("all towers are equal")


if __name__ == "__main__":
    main()
