"""Two hosts, each with its towers: TensorFlow's collectives between them. TensorFlow 1.15 and 2.

    pip install . scikit-learn               # in a checkout, beside your TensorFlow
    python examples/two_hosts.py             # two hosts on this machine, two CPU devices each
    python examples/two_hosts.py --kill      # and what host 0 prints when host 1 is killed

The program starts itself once for each host, with TF_CONFIG in the environment. On two machines,
start it on each of them with its TF_CONFIG: docs/how-to/several-hosts.md has the text for Slurm and
Kubernetes.
TensorFlow's gRPC has no authentication: private networks only.
"""

import argparse
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # without the lines of TensorFlow's start

TOWERS = 2  # of each host


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill", action="store_true", help="kill host 1 after 20 steps")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--checkpoints", metavar="FOLDER", help="save there every 20 steps; go on from the last one"
    )
    args = parser.parse_args()
    if importlib.util.find_spec("sklearn") is None:
        sys.exit("the digits are in scikit-learn: python -m pip install scikit-learn")
    if "TF_CONFIG" in os.environ:
        train(args)
    else:
        sys.exit(start_hosts(args))


def start_hosts(args: argparse.Namespace) -> int:
    """Start this program for each of two hosts on this machine; return the larger exit status."""
    with socket.socket() as first, socket.socket() as second:  # two ports that are free
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        worker = [f"127.0.0.1:{each.getsockname()[1]}" for each in (first, second)]
    hosts = []
    for index in (0, 1):
        config = {"cluster": {"worker": worker}, "task": {"type": "worker", "index": index}}
        environment = {**os.environ, "TF_CONFIG": json.dumps(config)}
        hosts.append(subprocess.Popen([sys.executable, __file__, *sys.argv[1:]], env=environment))
    try:
        return max(abs(host.wait()) for host in hosts)  # when one fails, the other ends by itself
    finally:  # also on Ctrl-C
        for host in hosts:
            host.kill()


def train(args: argparse.Namespace) -> None:
    """Train a linear classifier of digits on this host's share of the data."""
    import numpy as np
    import tensorflow as tf
    from sklearn.datasets import load_digits

    from hier_allreduce import Cluster, ClusterError, TowerOptimizer

    tf1 = tf.compat.v1
    tf1.disable_eager_execution()
    tf1.enable_resource_variables()
    cluster = Cluster.from_environment(timeout=12.0)
    devices = [f"/cpu:{k}" for k in range(TOWERS)]  # or /gpu:0 …
    images = tf1.placeholder(tf.float32, [None, 64])
    labels = tf1.placeholder(tf.int64, [None])

    optimizer = TowerOptimizer(tf1.train.GradientDescentOptimizer(0.5), devices, cluster=cluster)
    rows = []
    losses = []
    shares = zip(tf.split(images, TOWERS), tf.split(labels, TOWERS))
    for k, (x, y) in enumerate(shares):
        with tf.device(devices[k]), tf1.variable_scope(f"tower{k}"):
            weights = tf1.get_variable("weights", [64, 10], initializer=tf1.zeros_initializer())
            bias = tf1.get_variable("bias", [10], initializer=tf1.zeros_initializer())
            logits = tf.matmul(x, weights) + bias
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=y)
            losses.append(tf.reduce_mean(loss))
            rows.append(optimizer.compute_gradients(losses[-1], var_list=[weights, bias]))
    step = tf1.train.get_or_create_global_step()
    train_op = optimizer.apply_gradients(rows, step)  # with the mean over all towers of all hosts
    everywhere = cluster.broadcast(tf1.global_variables())
    saver = tf1.train.Saver()

    inputs, classes = load_digits(return_X_y=True)
    inputs = inputs[cluster.task :: cluster.size] / 16.0  # this host's share
    classes = classes[cluster.task :: cluster.size]

    def batch(number: int) -> dict:
        """Return the data of a step. They depend on its number only, also after a restart."""
        numbers = np.random.RandomState([cluster.task, number])
        chosen = numbers.choice(len(inputs), 40 * TOWERS)
        return {images: inputs[chosen], labels: classes[chosen]}

    def end_of_interval(session: Any, number: int, loss: float) -> None:
        print(f"host {cluster.task}, step {number}: loss {loss:.3f}", flush=True)
        if args.checkpoints and cluster.is_chief:
            saver.save(session, os.path.join(args.checkpoints, "model"), step)
        if args.kill and cluster.task == 1 and number == 20:
            print("host 1 is killed", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    config = tf1.ConfigProto(device_count={"CPU": TOWERS})  # on GPUs: None
    try:
        # waits for both hosts, and compares their graphs
        with cluster.session(config=config) as session:
            session.run(tf1.global_variables_initializer())
            if args.checkpoints and cluster.is_chief:
                last = tf.train.latest_checkpoint(args.checkpoints)
                if last:
                    saver.restore(session, last)
            session.run(everywhere)  # host 0's values on all hosts, and its step
            session.run(optimizer.init_op)  # and tower 0's on all towers
            # The number of steps is the same on every host.
            for number in range(session.run(step), args.steps):
                values = session.run([*losses, train_op], batch(number))
                if (number + 1) % 20 == 0:
                    end_of_interval(session, number + 1, np.mean(values[:-1]))
            weights = session.run(rows[0][0][1])
            squares = np.sum(weights**2)  # the same on both hosts
            print(f"host {cluster.task}, sum of the weights' squares: {squares:.4f}")
    except ClusterError as error:
        # This process ends. Then all hosts start again, from the last checkpoint.
        sys.exit(f"host {cluster.task} ends: {error}")


if __name__ == "__main__":
    main()
