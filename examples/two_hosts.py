"""Two hosts, each with its own towers: TensorFlow's collectives between them. TensorFlow 1.15 and 2.

    pip install "hier_allreduce[tf]" scikit-learn
    hier-allreduce launch -n 2 -- python examples/two_hosts.py --devices 2 --steps 50    # both on this machine

On two machines, start the program on each, with TF_CONFIG in its environment (docs/cluster.md has the text).
TensorFlow's gRPC has no authentication: private networks only.
"""

import argparse

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from hier_allreduce import Cluster, TowerOptimizer

tf1 = tf.compat.v1


def tower_loss(images, labels):
    """Return the loss of one tower; its variables go to the current device and variable scope."""
    weights = tf1.get_variable("weights", [64, 10], initializer=tf1.zeros_initializer())
    bias = tf1.get_variable("bias", [10], initializer=tf1.zeros_initializer())
    logits = tf.matmul(images, weights) + bias
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=labels))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2, help="towers of each host")
    parser.add_argument("--gpus", action="store_true", help="towers on GPUs instead of logical CPU devices")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()

    tf1.disable_eager_execution()
    tf1.enable_resource_variables()
    cluster = Cluster.from_environment(devices_per_host=args.devices)
    devices = [f"/{'gpu' if args.gpus else 'cpu'}:{k}" for k in range(args.devices)]
    images = tf1.placeholder(tf.float32, [None, 64])
    labels = tf1.placeholder(tf.int64, [None])

    optimizer = TowerOptimizer(tf1.train.GradientDescentOptimizer(0.5), devices, cluster=cluster)
    rows, losses = [], []
    for k, (device, x, y) in enumerate(zip(devices, tf.split(images, args.devices), tf.split(labels, args.devices))):
        with tf.device(device), tf1.variable_scope(f"tower{k}") as scope:
            losses.append(tower_loss(x, y))
            variables = tf1.trainable_variables(f"{scope.name}/")
            rows.append(optimizer.compute_gradients(losses[-1], var_list=variables))
    train_op = optimizer.apply_gradients(rows)  # with the mean over all towers of all hosts
    everywhere = cluster.broadcast(tf1.global_variables())

    inputs, classes = load_digits(return_X_y=True)
    inputs, classes = inputs[cluster.task :: 2], classes[cluster.task :: 2]  # each host has its own half
    batch, order = 40 * args.devices, np.random.RandomState(cluster.task)
    with cluster.session() as session:  # waits for both hosts, and compares their graphs
        session.run(tf1.global_variables_initializer())
        session.run(everywhere)  # host 0's values on all hosts
        session.run(optimizer.init_op)  # and tower 0's on all towers
        history = []
        for _ in range(args.steps):  # the same number of steps on every host
            chosen = order.choice(len(inputs), batch)
            feed = {images: inputs[chosen] / 16.0, labels: classes[chosen]}
            history.append(np.mean(session.run([*losses, train_op], feed)[:-1]))
        weights = session.run(rows[0][0][1])
        print(f"loss of the first and the last step: {history[0]:.3f} {history[-1]:.3f}")
        print(f"sum of the weights' squares: {np.sum(weights**2):.4f}")  # the same on both hosts


if __name__ == "__main__":
    main()
