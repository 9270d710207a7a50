"""Word embeddings, whose gradients stay sparse from the towers to the optimizer.

    pip install .    # in a checkout, beside your TensorFlow
    python examples/sparse_embeddings.py --devices 4 --steps 200

A batch uses few rows of the table, and the gradient of ``embedding_lookup`` has only these
(``tf.IndexedSlices``). Each tower gets their sum, with one slice for each index. The text is
Python's own help; the model guesses a word from the four before it. TensorFlow 1.15 and 2.
"""

import argparse
import collections
import os
import re
import zlib
from pydoc_data.topics import topics

# before TensorFlow is imported, because it reads this once: no lines of its start
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import hier_allreduce

tf1 = tf.compat.v1
ROWS, WIDTH, WORDS, BEFORE, BATCH = 1 << 15, 32, 500, 4, 64


def load():
    """Return four hashed words (N×4), and the number of the next word (N).

    The number is among the most frequent words; 0 stands for all others.
    """
    words = re.findall(r"\w+|[^\w\s]", " ".join(topics[name] for name in sorted(topics)).lower())
    numbers = {word: n for n, (word, _) in enumerate(collections.Counter(words).most_common(WORDS))}
    hashed = np.array([zlib.crc32(word.encode()) % ROWS for word in words])
    before = np.stack([hashed[n : len(words) - BEFORE + n] for n in range(BEFORE)], axis=1)
    return before, np.array([numbers.get(word, 0) for word in words[BEFORE:]])


def tower_loss(before, word):
    """Return the loss of one tower; its variables go to the current device and variable scope."""
    table = tf1.get_variable(
        "table", [ROWS, WIDTH], initializer=tf1.random_normal_initializer(0, 0.1, seed=1)
    )
    output = tf1.get_variable(
        "output", [BEFORE * WIDTH, WORDS], initializer=tf1.glorot_uniform_initializer(seed=2)
    )
    logits = tf.matmul(
        tf.reshape(tf.nn.embedding_lookup(table, before), [-1, BEFORE * WIDTH]), output
    )
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=word)
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=4, help="how many towers")
    parser.add_argument(
        "--gpus", action="store_true", help="towers on /gpu:0 … instead of logical CPU devices"
    )
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    tf1.disable_eager_execution()
    tf1.enable_resource_variables()
    devices = [f"/{'gpu' if args.gpus else 'cpu'}:{k}" for k in range(args.devices)]
    optimizer = hier_allreduce.TowerOptimizer(tf1.train.AdagradOptimizer(0.5), devices)
    rows, losses, (words, labels) = [], [], load()
    for k, device in enumerate(devices):
        with tf.device(device), tf1.variable_scope(f"tower{k}") as scope:
            chosen = tf1.random_uniform([BATCH], maxval=len(labels), dtype=tf.int64, seed=k)
            losses.append(tower_loss(tf.gather(words, chosen), tf.gather(labels, chosen)))
            rows.append(
                optimizer.compute_gradients(losses[-1], tf1.trainable_variables(f"{scope.name}/"))
            )
    train_op = optimizer.apply_gradients(rows)
    used = [
        tf.size(tf.unique(row[0][0].indices)[0]) for row in rows
    ]  # of each tower's gradient of the table
    with tf1.Session(
        config=tf1.ConfigProto(device_count={"CPU": args.devices}, allow_soft_placement=True)
    ) as session:
        session.run(tf1.global_variables_initializer())
        session.run(optimizer.init_op)  # towers start equal
        history = [np.mean(session.run([*losses, train_op])[:-1]) for _ in range(args.steps)]
        first, last = history[0], history[-1]
        print(f"{args.devices} towers, loss of the first and the last step: {first:.3f} {last:.3f}")
        print("different rows in the towers' gradients:", *session.run(used), "of", ROWS)
        optimizer.check_replicas(session)  # an error if they differ
        print("all towers are equal")


if __name__ == "__main__":
    main()
