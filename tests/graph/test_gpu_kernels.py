"""Every op that this package adds has a GPU kernel, and reads no operand from the wrong memory.

Graphs are built on ``/gpu:k`` and not run: TensorFlow refuses an op without a kernel only when it places the graph. The
kernels are those of the installed TensorFlow if it is one for GPUs, else recorded ones: see ``helpers/gpu_kernels.py``.
"""

import pytest
import tensorflow as tf
from helpers.gpu_kernels import HAS_GPU_KERNELS, Kernels, live, memory_changes, not_placed, recorded
from helpers.graphs import on_towers, tf1

from hier_allreduce import Strategy, TowerOptimizer, allreduce_grads

DEVICES = [f"/gpu:{k}" for k in range(3)]
FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
STRATEGIES = [Strategy("flat"), Strategy("ring", chunk_bytes=0), Strategy(topology="dgx-1v")]
MORE = {"float32": [Strategy(wire_dtype="float16")]}
DTYPES = (*FLOATS, "int32", "int64")  # for smaller and unsigned integers GPUs have no AddN


@pytest.fixture(scope="module")
def kernels():
    return Kernels()


def gradients(dtype, tower):
    """Small ones that share a chunk, large ones that do not, a scalar, and one of which only the rank is known."""
    return [tf1.placeholder(dtype, shape) for shape in ([3, 4], [5], [], [300, 80], [20000], [None, 2])]


def built(dtype, strategy, average, row=gradients):
    rows = on_towers(DEVICES, lambda tower: row(dtype, tower))
    return allreduce_grads(rows, DEVICES, average, strategy=strategy)


def sparse(index):
    def row(dtype, tower):
        shape = tf.constant([50, 2], index)
        first, last = (
            tf.IndexedSlices(tf1.placeholder(dtype, [6, 2]), tf1.placeholder(index, [6]), shape) for _ in "ab"
        )
        missing = [last, tf1.placeholder(dtype, [9, 9]), tf1.placeholder(dtype, [90, 90])]
        return [first, *([None] * 3 if tower == 1 else missing)]

    return row


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_op_of_a_dense_all_reduce_has_a_kernel(kernels, graph, dtype):
    for strategy in [*STRATEGIES, *MORE.get(dtype, ())]:
        built(dtype, strategy, dtype in FLOATS)
    assert not_placed(graph, kernels) == set()
    changes = memory_changes(graph, kernels)
    if dtype == "int32":  # its kernels work in host memory: what comes from elsewhere crosses once
        changes = {change for change in changes if not change.startswith("Placeholder ")}
    assert changes == set()


@pytest.mark.parametrize("dtype", [*FLOATS, "int32"])  # for rows of int64 GPUs have no UnsortedSegmentSum
def test_every_op_for_sparse_and_missing_gradients_can_be_placed(kernels, graph, dtype):
    for index in ("int32", "int64"):
        for how in ("gather", "dense"):
            built(dtype, Strategy(sparse=how, missing="zeros"), False, sparse(index))
    assert not_placed(graph, kernels) == set()
    if dtype in FLOATS:
        changes = memory_changes(graph, kernels)
        assert {change for change in changes if not change.startswith("Placeholder ")} == set()


@pytest.mark.parametrize("update", ["replicated", "main"])
def test_every_op_of_an_optimizer_can_be_placed(kernels, graph, update):
    optimizer = TowerOptimizer(tf1.train.MomentumOptimizer(0.1, 0.9), DEVICES, update=update)
    rows = []
    for tower, device in enumerate(DEVICES):
        with tf.device(device), tf1.variable_scope(f"tower{tower}"):
            w, b = (tf1.get_variable(name, [3], use_resource=True) for name in "wb")
            rows.append(optimizer.compute_gradients(tf.reduce_sum(w * w + b), var_list=[w, b]))
    optimizer.apply_gradients(rows)
    assert not_placed(graph, kernels) == set()


def test_missing_kernels_and_misplaced_operands_are_found(kernels, graph):
    with tf.device("/gpu:0"):
        tf.reshape(tf1.placeholder("float32", [4]), tf.cast(tf1.placeholder("float32", [1]), tf.int32))
        assert memory_changes(graph, kernels) == {"Cast → Reshape shape (int32)"}
        tf.add_n([tf1.placeholder("uint8", [4])] * 2), tf.split(tf1.placeholder("int64", [4]), 2)
    assert not_placed(graph, kernels) == {"AddN T=uint8", "Split T=int64"}


@pytest.mark.skipif(not HAS_GPU_KERNELS, reason="this TensorFlow has no GPU kernels to compare with")
def test_the_recorded_kernels_are_those_of_this_tensorflow():
    for op, kernels in recorded().items():
        for kernel in kernels:
            assert any(
                kernel.host == other.host and all(types & kernel.dtypes[name] for name, types in other.dtypes.items())
                for other in live(op)
            ), op
