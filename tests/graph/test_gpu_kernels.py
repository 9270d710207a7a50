"""Every op that an all-reduce adds has a GPU kernel.

Without a GPU TensorFlow would not tell, because it looks for kernels when it places a graph.
"""

import pytest
import tensorflow as tf
from helpers.graphs import ALGORITHMS, chain, on_towers, tf1

from hier_allreduce import Strategy, allreduce_grads

DEVICES = [f"/gpu:{k}" for k in range(3)]
FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
STRATEGIES = [*map(Strategy, ALGORITHMS), Strategy(chain, chunk_bytes=0)]
MOVED = frozenset([*FLOATS, "int32", "int64"])
ADDED = MOVED - {"bfloat16", "int64"}
# The dtypes of kernels for GPUs in both TensorFlow 1.15.0 and 2.21.0. To add an op, call
# `get_registered_kernels_for_op` of tensorflow.python.framework.kernels in both wheels for GPUs.
KERNELS = {
    **dict.fromkeys(["Add", "AddN", "AddV2", "Mul"], ADDED | {"int64"}),
    **dict.fromkeys(["Cast", "ConcatV2", "Const", "Fill", "Identity", "Reshape"], MOVED),
    **dict.fromkeys(["Placeholder", "PlaceholderWithDefault"], MOVED),
    **dict.fromkeys(["Size", "Unique"], frozenset(["int64"])),  # 1.15 has Unique on the host
    "SplitV": MOVED - {"int64"},
    "UnsortedSegmentSum": ADDED,
}


def without_kernel(graph):
    """The ops on GPUs that have no kernel there for one of their dtypes: ``{"SplitV int64"}``."""
    found = set()
    for op in graph.get_operations():
        names = {attr.name for attr in op.op_def.attr} & {"T", "dtype", "SrcT", "DstT"}
        dtypes = {tf.as_dtype(op.get_attr(name)).base_dtype.name for name in names}
        if "GPU" in op.device and not (dtypes and dtypes <= KERNELS.get(op.type, frozenset())):
            found.add(" ".join([op.type, *sorted(dtypes)]))
    return found


@pytest.mark.parametrize("dtype", [*FLOATS, "int32", "int64"])
def test_every_op_for_dense_gradients_has_a_kernel(graph, dtype):
    small: list = [[3, 4], [5], []]  # they share a chunk
    large: list = [[300, 80], [20000]]  # they do not
    shapes = [*small, *large, [None, 2]]
    rows = on_towers(DEVICES, lambda tower: [tf1.placeholder(dtype, shape) for shape in shapes])
    for strategy in [*STRATEGIES, Strategy(wire_dtype="float16", chunk_bytes=4096)]:
        allreduce_grads(rows, DEVICES, dtype in FLOATS, strategy)
    assert without_kernel(graph) == set()


@pytest.mark.parametrize(
    "dtype", [*FLOATS, "int32"]
)  # for slices of int64 GPUs have no UnsortedSegmentSum
def test_every_op_for_sparse_and_missing_gradients_has_a_kernel(graph, dtype):
    def row(tower):
        values, indices = tf1.placeholder(dtype, [6, 2]), tf1.placeholder("int32", [6])
        grads = [
            tf.IndexedSlices(values, tf.cast(indices, tf.int64), tf.constant([50, 2], tf.int64)),
            tf.IndexedSlices(values, indices, tf.constant([50, 2])),
            tf1.placeholder(dtype, [9, 9]),
        ]
        return [*grads[:2], *(grads if tower else [None] * 3)]

    for algorithm in ALGORITHMS:
        for sparse, wire_dtype in (("rows", None), ("rows", "float16"), ("dense", None)):
            strategy = Strategy(algorithm, sparse=sparse, missing="zeros", wire_dtype=wire_dtype)
            allreduce_grads(on_towers(DEVICES, row), DEVICES, dtype in FLOATS, strategy)
    assert without_kernel(graph) == set()


def test_ops_without_a_kernel_are_found(graph):
    with tf.device("/gpu:0"):
        tf.add_n([tf1.placeholder("uint8", [4])] * 2), tf.split(tf1.placeholder("int64", [4]), 2)
    assert without_kernel(graph) == {"AddN uint8", "Placeholder uint8", "Split int64"}
