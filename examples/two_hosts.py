"""Two hosts, each with its own towers: TensorFlow's collectives between them. TensorFlow 1.15 and 2.

    pip install . scikit-learn    # in a checkout, beside your TensorFlow
    hier-allreduce launch -n 2 -- python examples/two_hosts.py --devices 2 --steps 50    # both on this machine
    hier-allreduce launch -n 2 --restarts 2 -- python examples/two_hosts.py --checkpoints /tmp/digits

The second command goes on from the last checkpoint after a host has failed (try: kill -9 one of them).
On two machines, start the program on each, with TF_CONFIG in its environment (docs/cluster.md has the text).
TensorFlow's gRPC has no authentication: private networks only.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow: without the lines of its start

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
    parser.add_argument("--checkpoints", metavar="FOLDER", help="save there every 10 steps; go on from the last one")
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
    step = tf1.train.get_or_create_global_step()
    train_op = optimizer.apply_gradients(rows, step)  # with the mean over all towers of all hosts
    everywhere, saver = cluster.broadcast(tf1.global_variables()), tf1.train.Saver()

    inputs, classes = load_digits(return_X_y=True)
    inputs, classes = inputs[cluster.task :: 2], classes[cluster.task :: 2]  # each host has its own half
    with cluster.session() as session:  # waits for both hosts, and compares their graphs
        session.run(tf1.global_variables_initializer())
        last = tf.train.latest_checkpoint(args.checkpoints) if args.checkpoints and cluster.is_chief else None
        if last:
            saver.restore(session, last)
        session.run(everywhere)  # host 0's values on all hosts, and its step
        session.run(optimizer.init_op)  # and tower 0's on all towers
        for number in range(session.run(step), args.steps):  # the same number of steps on every host
            # the number of the step decides on its data, so that a restart goes on where the last try was
            chosen = np.random.RandomState([cluster.task, number]).choice(len(inputs), 40 * args.devices)
            feed = {images: inputs[chosen] / 16.0, labels: classes[chosen]}
            loss = np.mean(session.run([*losses, train_op], feed)[:-1])
            if (number + 1) % 10 == 0 or number == 0:
                print(f"step {number + 1}: loss {loss:.3f}", flush=True)
            if args.checkpoints and cluster.is_chief and (number + 1) % 10 == 0:
                saver.save(session, os.path.join(args.checkpoints, "model"), step)
        weights = session.run(rows[0][0][1])
        print(f"sum of the weights' squares: {np.sum(weights**2):.4f}")  # the same on both hosts


if __name__ == "__main__":
    main()
