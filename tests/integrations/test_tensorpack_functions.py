"""Our all-reduce beside tensorpack's own functions: equal results, and no more bytes sent.

One case is left out. If all towers' rows are more bytes than the table, and each tower's are fewer,
tensorpack's rows are made dense where they are added, and ours before they are sent.
"""

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import (
    consumed_in_place,
    dense,
    evaluate,
    gpus_or_cpus,
    on_towers,
    traced,
)
from helpers.rows import for_each
from test_tensorpack import in_child

from hier_allreduce import Strategy, allreduce_grads, allreduce_grads_hierarchical

tf1 = tf.compat.v1
DEVICES = gpus_or_cpus(8)


def whole(shape, dtype="float32"):
    """Return random whole numbers, whose sums are exact in any order."""
    return tf.cast(tf1.random_uniform(shape, -9, 9, tf.int32), dtype)


def rows(count, height, width, dtype="float32"):
    """Return a sparse gradient with ``count`` rows, of which many have equal indices."""
    indices = tf1.random_uniform([count], maxval=min(height, 5), dtype=tf.int64)
    return tf.IndexedSlices(
        whole([count, width], dtype), indices, tf.constant([height, width], tf.int64)
    )


# the gradients of a tower
CASES = {
    "dense": lambda tower: [whole([64, 3]), whole([]), whole([500]), whole([2, 0, 3])],
    "large": lambda tower: [whole([300, 300]), whole([7])],
    "mixed dtypes": lambda tower: [whole([9, 3], d) for d in ("float64", "float16", "complex64")],
    "few rows": lambda tower: [rows(6, 1000, 8), rows(6, 1000, 3, "float64")],
    "as many rows as in the table": lambda tower: [rows(20, 20, 8)],
    "many rows": lambda tower: [rows(4096, 2, 96)],
    "towers without rows": lambda tower: [rows(0 if tower in (2, 4) else 5, 1000, 8)],
    "no rows": lambda tower: [rows(0, 1000, 8)],
    "rows and dense": lambda tower: [rows(6, 1000, 8), whole([300]), rows(4096, 2, 96)],
    "rows of 16 bits": lambda tower: [rows(6, 1000, 8, "float16")],
}


def sent_bytes(result):
    """Return the bytes that a step sends between devices for results that are used there."""
    seen = traced(consumed_in_place(result), trace_level=tf1.RunOptions.FULL_TRACE)
    bytes_of = {}  # of each node's outputs
    for node in [node for device in seen.step_stats.dev_stats for node in device.node_stats]:
        for output in node.output:
            tensor = output.tensor_description
            elements = int(np.prod([dim.size for dim in tensor.shape.dim]))
            size = elements * tf.as_dtype(tensor.dtype).size
            bytes_of[node.node_name, output.slot] = size
    sends = [n for part in seen.partition_graphs for n in part.node if n.op == "_Send"]
    total = 0
    for node in sends:
        name, _, slot = node.input[0].partition(":")
        if not node.attr["client_terminated"].b:
            total += bytes_of[name, int(slot or 0)]
    return total


def compare(rows_of, ours, theirs):
    """Check our results and bytes against theirs for one step."""
    with tf.Graph().as_default():
        given = on_towers(DEVICES, rows_of)
        results = [reduce(given) for reduce in (ours, theirs)]
        for mine, original in zip(*evaluate([for_each(tf.convert_to_tensor, r) for r in results])):
            for grad, expected in zip(mine, original):
                assert grad.dtype == expected.dtype and grad.shape == expected.shape
                np.testing.assert_array_equal(dense(grad), dense(expected))
        sent = list(map(sent_bytes, results))
    assert sent[0] <= sent[1]


@pytest.mark.parametrize("average", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize("case", CASES)
@in_child
def test_the_drop_in_does_what_the_original_does(case, average):
    from tensorpack.graph_builder import utils

    compare(
        CASES[case],
        lambda grads: allreduce_grads_hierarchical(grads, DEVICES, average),
        lambda grads: utils.allreduce_grads_hierarchical(grads, DEVICES, average),
    )


@in_child
def test_the_drop_in_adds_up_integers_as_the_original_does():
    from tensorpack.graph_builder import utils

    compare(
        lambda tower: [whole([9], "int32"), whole([4, 2], "int64"), whole([], "int32")],
        lambda grads: allreduce_grads_hierarchical(grads, DEVICES),
        lambda grads: utils.allreduce_grads_hierarchical(grads, DEVICES),
    )


@pytest.mark.parametrize("average", [False, True], ids=["sum", "mean"])
@in_child
def test_packed_gradients_are_those_of_tensorpacks_packer(average):
    from tensorpack.graph_builder import utils

    def packed(grads):
        packer = utils.GradientPacker(8)
        assert packer.compute_strategy(grads[0])
        chunks = packer.pack_all(grads, DEVICES)
        chunks = utils.allreduce_grads_hierarchical(chunks, DEVICES, average)
        return packer.unpack_all(chunks, DEVICES)

    compare(
        lambda tower: [whole([300, 300]), whole([7]), whole([]), whole([50, 3])],
        lambda grads: allreduce_grads(grads, DEVICES, average, Strategy("hierarchical")),
        packed,
    )


@pytest.mark.cpu_only("TensorFlow's collectives need NCCL there")
@pytest.mark.parametrize("average", [False, True], ids=["sum", "mean"])
@in_child
def test_results_are_those_of_tensorpacks_collectives(average):
    from tensorpack.graph_builder import utils

    with tf.Graph().as_default():
        given = on_towers(DEVICES, lambda tower: [whole([30, 3]), whole([])])
        theirs = utils.allreduce_grads(given, average, mode="collective")
        ours, theirs = evaluate([allreduce_grads(given, DEVICES, average), theirs])
    for mine, original in zip(ours, theirs):
        for grad, expected in zip(mine, original):
            np.testing.assert_array_equal(grad, expected)
