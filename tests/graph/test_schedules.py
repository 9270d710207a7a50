"""Graphs of the all-reduces that this package began from, and their schedules by hand.

Sources: ``graph_builder/utils.py`` of tensorpack, ``muji.py`` of caffe2, and for the packing
Chainer and MegEngine.
"""

import functools
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import evaluate, gpus_or_cpus, gradients_on, session, tf1
from helpers.rows import powers_of_two

from hier_allreduce import Copy, Reduce, Strategy, allreduce_grads, allreduce_grads_hierarchical
from hier_allreduce.graph.record import all_reduces
from hier_allreduce.planning.algorithms import flat_hierarchical, hierarchical, schedules_of
from hier_allreduce.planning.plan import root_of

VALUES = powers_of_two(towers=8, variables=9)
MB = 1_000_000 // 4  # elements of float32


def in_two_quads(all_grads, devices, average=False):
    """tensorpack's ``allreduce_grads_hierarchical`` in plain TensorFlow, for eight towers."""
    columns = []
    for variable, grads in enumerate(zip(*all_grads)):
        root = (variable + 4) % 8  # the main whose sum is complete first
        other = (root + 4) % 8  # the main of the other quad
        partial = {}
        for main in (root, other):
            with tf1.device(devices[main]):
                partial[main] = tf.add_n(
                    [grads[tower] for tower in range(8) if tower // 4 == main // 4]
                )
        with tf1.device(devices[root]):
            total = tf.add(partial[root], partial[other])
            if average:
                total = tf.multiply(total, 1 / 8)
        with tf1.device(devices[other]):
            result = {root: total, other: tf.identity(total)}
        for tower in range(8):
            if tower not in result:
                with tf1.device(devices[tower]):
                    result[tower] = tf.identity(result[root if tower // 4 == root // 4 else other])
        columns.append([result[tower] for tower in range(8)])
    return list(zip(*columns))


def up_a_tree(all_grads, devices, average=False):
    """caffe2's ``Allreduce8`` in plain TensorFlow: pairs, quads, all, and back the same way."""
    columns = []
    for grads in zip(*all_grads):
        held = list(grads)
        hops = [(0, 1), (2, 3), (4, 5), (6, 7), (0, 2), (4, 6), (0, 4)]  # dst, src
        for dst, src in hops:
            with tf1.device(devices[dst]):
                held[dst] = tf.add(held[dst], held[src])
        if average:
            with tf1.device(devices[0]):
                held[0] = tf.multiply(held[0], 1 / 8)
        for src, dst in reversed(hops):
            with tf1.device(devices[dst]):
                held[dst] = tf.identity(held[src])
        columns.append(held)
    return list(zip(*columns))


def edges_of(ops):
    """Return how often each type of op is on a device with inputs from such devices."""
    edges: Counter = Counter()
    for op in ops:
        sources = sorted(tensor.device for tensor in op.inputs if tensor.op.type != "Const")
        edges[(op.type, op.device, *sources)] += 1
    return edges


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize(
    "ours, by_hand", [(None, in_two_quads), ("tensorpack", in_two_quads), ("muji", up_a_tree)]
)
def test_the_ops_are_those_written_by_hand(ours, by_hand, average):
    """Device functions keep the columns away, which sums on CPU devices have beside these ops."""
    functions = [lambda op, device=device: device for device in gpus_or_cpus(8)]
    reduce_by_name = functools.partial(allreduce_grads, strategy=ours)
    edges, values = [], []
    for reduce in (by_hand, reduce_by_name if ours else allreduce_grads_hierarchical):
        with tf.Graph().as_default() as graph:
            rows = gradients_on(gpus_or_cpus(8), VALUES)
            before = set(graph.get_operations())
            values.append(evaluate(reduce(rows, functions, average)))
            ops = [op for op in graph.get_operations() if op not in before and op.type != "Const"]
            edges.append(edges_of(ops))
    assert edges[0] == edges[1]
    np.testing.assert_array_equal(*values)


@pytest.mark.parametrize("towers", [2, 3, 4, 5, 8])
def test_muji_takes_a_tree_to_gpu_0_and_its_fallback_is_flat(graph, towers):
    rows = gradients_on(gpus_or_cpus(towers), [row[:2] for row in VALUES[:towers]])
    allreduce_grads(rows, gpus_or_cpus(towers), strategy="muji")
    allreduce_grads(rows, gpus_or_cpus(towers), strategy=Strategy("flat", main=0))
    tree, flat = all_reduces(graph)
    others = tuple(range(1, towers))
    assert {tensor.schedule for tensor in flat.tensors} == {
        (Reduce(others, 0), *(Copy(0, dst) for dst in others))
    }
    (schedule,) = {tensor.schedule for tensor in tree.tensors}
    strides = [1, 2, 4][: int(np.ceil(np.log2(towers)))]
    hops = [
        (dst + stride, dst) for stride in strides for dst in range(0, towers - stride, 2 * stride)
    ]
    assert schedule == (
        *(Reduce((src,), dst) for src, dst in hops),
        *(Copy(dst, src) for src, dst in reversed(hops)),
    )


@pytest.mark.parametrize("towers", [1, 2, 3, 5, 7, 8, 16])
def test_the_drop_in_rotates_mains_for_any_number_of_towers(graph, towers):
    grads = gradients_on(gpus_or_cpus(towers), powers_of_two(towers, variables=10))
    result = allreduce_grads_hierarchical(grads, gpus_or_cpus(towers))
    (call,) = all_reduces(graph)
    half = (towers + 1) // 2
    for variable, tensor in enumerate(call.tensors):
        sums = [step for step in tensor.schedule if isinstance(step, Reduce)]
        copies = [step for step in tensor.schedule if isinstance(step, Copy)]
        assert len(copies) == towers - 1 == sum(len(step.srcs) for step in sums)
        assert not sums or sums[-1].dst == (variable + half) % towers
        for step in sums[:-1]:
            assert len({tower < half for tower in (*step.srcs, step.dst)}) == 1  # inside a group
    for variable, value in enumerate(evaluate(result)[-1]):
        total = 2.0**towers - 1 + towers * variable
        assert value.tolist() == [total, total]


@pytest.mark.parametrize("name", ["chainer", "megengine"])
def test_presets_that_pack_share_chunks(graph, name):
    values = [np.ones([size], "float32") for size in (9, 300, 1000)]
    rows = gradients_on(gpus_or_cpus(4), [values] * 4)
    allreduce_grads(rows, gpus_or_cpus(4), strategy=name)
    (call,) = all_reduces(graph)
    assert [len(tensor.variables) for tensor in call.tensors] == [3]
    if name == "chainer":  # one main, and None counts as zeros
        assert call.tensors[0].schedule[0] == Reduce((1, 2, 3), 0)
        allreduce_grads([[tf1.placeholder("float32", [3])], [None]], gpus_or_cpus(2), strategy=name)


@pytest.mark.parametrize(
    "megabytes, towers, strategy, cut_last",
    [
        ([100, 100], 8, None, 0),
        ([100, 100], 5, None, 0),
        ([1, 100, 100], 8, None, 1),
        ([5, 200], 8, None, 0),
        ([3, 3, 200], 8, None, None),  # the cut one is not the last
        ([3, 3], 8, None, None),  # none is cut
        ([100, 100], 4, None, None),
        ([100, 100], 8, "flat_hierarchical", None),
        ([100, 100], 8, Strategy(main=4), None),
        ([100, 100], 8, Strategy(chunk_bytes=0), None),
        ([100, 100], 8, Strategy(chunk_bytes=1 << 20), 0),
    ],
)
def test_on_gpus_the_last_gradient_goes_through_two_groups(
    graph, megabytes, towers, strategy, cut_last
):
    devices = [f"/gpu:{tower}" for tower in range(towers)]
    rows = []
    for device in devices:
        with tf.device(device):
            rows.append([tf1.placeholder("float32", [size * MB]) for size in megabytes])
    allreduce_grads(rows, devices, strategy=strategy)
    (call,) = all_reduces(graph)
    by_groups = schedules_of(hierarchical, towers)
    through_groups: set = set()
    roots: Counter = Counter()
    for tensor in call.tensors:
        if tensor.schedule in by_groups:
            through_groups.update(tensor.variables)
            roots[root_of(tensor.schedule)] += 1
    expected = set() if cut_last is None else {rows[0][cut_last].op.name}
    assert through_groups == expected
    assert len(roots) == min(towers, sum(roots.values()))  # every tower has its share


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("towers", [5, 6, 8])
def test_the_last_gradient_has_the_same_sums(graph, monkeypatch, towers, average):
    monkeypatch.setattr("hier_allreduce.planning.schedules.CHUNK_BYTES", 256)
    devices = [f"/gpu:{tower}" for tower in range(towers)]
    sizes = (3, 1000, 5, 200)
    values = []
    for tower in range(towers):
        values.append([np.arange(size, dtype="float32") + 2.0**tower for size in sizes])
    reduced = allreduce_grads(gradients_on(gpus_or_cpus(towers), values), devices, average)
    schedules = {tensor.schedule for tensor in all_reduces(graph)[0].tensors}
    assert schedules & set(schedules_of(hierarchical, towers))
    assert schedules & set(schedules_of(flat_hierarchical, towers))
    expected = [sum(row[n] for row in values) / (towers if average else 1) for n in range(4)]
    with session(allow_soft_placement=True) as sess:  # there may be CPU devices only
        results = sess.run(reduced)
    for row in results:
        for value, wanted, on_tower_0 in zip(row, expected, results[0]):
            np.testing.assert_allclose(value, wanted, rtol=1e-6)
            np.testing.assert_array_equal(value, on_tower_0)
