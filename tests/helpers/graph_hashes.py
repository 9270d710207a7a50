"""Compare the graphs that two checkouts build, by hash and without the names of scopes.

::

    PYTHONPATH=tests:. python -m helpers.graph_hashes                prints each case and its hash
    PYTHONPATH=tests:. python -m helpers.graph_hashes ../other       lists cases that differ

A graph's hash has the types, devices, attributes and inputs of its ops, in building order, and the
last level of their names. So a change that only moves code leaves all hashes as they are.
"""

import contextlib
import hashlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import List, Tuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from hier_allreduce import Cluster, Strategy, TowerOptimizer, allreduce_grads

tf1 = tf.compat.v1
ALGORITHMS = ("auto", "flat", "tree", "hierarchical", "flat_hierarchical")
SHAPES: Tuple[List[int], ...] = ([3, 5], [700, 300], [7], [400, 900], [], [64])
HOSTS = ["127.0.0.1:2222", "127.0.0.1:2223"]


def held(dtype, shape):
    """Return a tensor of which the shape is known."""
    return tf1.placeholder(dtype, shape)


def rows_of(height, dtype="float32", count=4):
    """Return rows of a table."""
    shape = tf.constant([height, 3], tf.int64)
    return tf.IndexedSlices(held(dtype, [count, 3]), held("int64", [count]), shape)


def dense(tower):
    return [held("float32", shape) for shape in SHAPES]


def sparse(tower):
    return [rows_of(1000), held("float32", [8]), rows_of(2), rows_of(1000, count=None)]


def sixteen_bit(tower):
    return [held("float16", shape) for shape in SHAPES] + [rows_of(1000, "float16")]


def mixed(tower):
    """Return gradients of several dtypes, some of them missing or of unknown shape."""
    missing = None if tower == 1 else held("float32", [9])
    rows = rows_of(50) if tower else held("float32", [50, 3])
    tensors = [held("float64", [4]), held("float32", None), held("int32", [4]), missing, rows]
    return [*tensors, *dense(tower), held("float32", [None, 4]), None, held("complex64", [2])]


KINDS = {"dense": dense, "sparse": sparse, "sixteen bit": sixteen_bit, "mixed": mixed}


def all_reduce(kind, device, towers, hosts=1, **how):
    """Build an all-reduce of one kind of gradients."""
    devices = [f"/{device}:{tower}" for tower in range(towers)]
    grads = []
    for tower, name in enumerate(devices):
        with tf1.device(name):
            grads.append(KINDS[kind](tower))
    cluster = Cluster(HOSTS, 0) if hosts == 2 else None
    strategy = Strategy(missing="zeros", **how)
    average = kind in ("dense", "sixteen bit")
    allreduce_grads(grads, devices, average, strategy, cluster=cluster)


def training(update, towers):
    """Build a train op and its ``init_op``."""
    devices = [f"/gpu:{tower}" for tower in range(towers)]
    optimizer = TowerOptimizer(tf1.train.AdamOptimizer(0.1), devices, update=update)
    rows = []
    for tower, device in enumerate(devices):
        with tf1.device(device), tf1.variable_scope(f"tower{tower}"):
            out = tf.ones([2, 40])
            for layer in range(3):
                kernel = tf1.get_variable(f"w{layer}", [40, 40], use_resource=True)
                out = tf.matmul(out, kernel) + tf1.get_variable(
                    f"b{layer}", [40], use_resource=True
                )
            rows.append(optimizer.compute_gradients(tf.reduce_sum(out)))
            tf1.get_variable_scope().reuse_variables()
    own = [[pair for pair in row if f"tower{k}/" in pair[1].name] for k, row in enumerate(rows)]
    optimizer.apply_gradients(own, tf1.train.get_or_create_global_step())
    optimizer.init_op  # noqa: B018  it builds the op


def cases():
    """Yield the name and the builder of each case."""
    for kind, algorithm, towers in itertools.product(KINDS, ALGORITHMS, range(1, 9)):
        for device in ("cpu", "gpu"):
            name = f"{kind}, {algorithm}, {towers} {device}"
            yield name, all_reduce, (kind, device, towers), {"algorithm": algorithm}
    for kind, towers in itertools.product(KINDS, (1, 3, 8)):
        how = {"chunk_bytes": 4096, "wire_dtype": "bfloat16", "edges": False}
        yield f"{kind}, small chunks, {towers}", all_reduce, (kind, "gpu", towers), how
        yield f"{kind}, whole, {towers}", all_reduce, (kind, "cpu", towers), {"chunk_bytes": 0}
        if kind != "mixed":
            yield f"{kind}, 2 hosts, {towers}", all_reduce, (kind, "gpu", towers, 2), {}
    for update, towers in itertools.product(("replicated", "once", "sharded"), (1, 2, 5, 8)):
        yield f"update {update}, {towers}", training, (update, towers), {}


def digest(graph):
    """Return the hash of a graph without the scopes of its ops' names."""
    definition = graph.as_graph_def()
    number_by_name = {node.name: number for number, node in enumerate(definition.node)}
    lines = []
    for node in definition.node:
        inputs = []
        for source in node.input:
            name, _, output = source.lstrip("^").partition(":")
            inputs.append(f"{source[0] == '^'} {number_by_name[name]}:{output}")
        data = [edge for edge in inputs if edge.startswith("False")]
        attributes = {key: str(node.attr[key]) for key in node.attr if key != "_class"}
        last_level = node.name.rpartition("/")[2]
        shown = (last_level, node.op, node.device, data, sorted(inputs), sorted(attributes.items()))
        lines.append(repr(shown))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def hashes():
    """Return the hash of each case's graph; of a case that is an error, its first words."""
    found = {}
    for name, build, arguments, options in cases():
        with tf.Graph().as_default() as graph, contextlib.redirect_stdout(sys.stderr):
            try:
                build(*arguments, **options)
                found[name] = digest(graph)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {str(error)[:60]}"
    return found


def main(other=""):
    """Print the hashes, or compare them with those of another checkout."""
    here = hashes()
    if not other:
        print(json.dumps(here, indent=0))
        return 0
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(other).resolve())])
    command = [sys.executable, "-m", "helpers.graph_hashes"]
    child = {**os.environ, "PYTHONPATH": path}
    output = subprocess.run(command, env=child, stdout=subprocess.PIPE, check=True, cwd="/").stdout
    there = json.loads(output)
    differing = [name for name in here if here[name] != there.get(name)]
    for name in differing:
        print(f"{name}: {here[name]} here, {there.get(name)} there")
    errors = sum(":" in found for found in here.values())
    print(f"{len(here) - len(differing)} of {len(here)} graphs are the same; {errors} are errors")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
