"""Graphs of the all-reduces that this package began from, and their schedules by hand.

Sources: ``graph_builder/utils.py`` of tensorpack, ``muji.py`` of caffe2, and for the packing
Chainer and MegEngine.
"""

import functools
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import evaluate, gpus_or_cpus, gradients_on, tf1
from helpers.models import gradients
from helpers.rows import powers_of_two

from hier_allreduce import (
    Copy,
    Reduce,
    Strategy,
    TowerOptimizer,
    allreduce_grads,
    allreduce_grads_hierarchical,
)
from hier_allreduce.graph.record import all_reduces
from hier_allreduce.planning.algorithms import hierarchical, tree

VALUES = powers_of_two(towers=8, variables=9)


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


# ---- presets, at the size of models --------------------------------------------------------------


def sent_by(preset, model, towers=8):
    """Return the tensors that a preset sends for a model's gradients, and their bytes, in a row."""
    with tf.Graph().as_default() as graph:
        devices = [f"/gpu:{tower}" for tower in range(towers)]
        rows = []
        for device in devices:
            with tf.device(device):
                vectors = [[gradient.elements] for gradient in gradients(model)]
                rows.append([tf1.placeholder("float32", shape, name="g") for shape in vectors])
        allreduce_grads(rows, devices, strategy=preset)
        bytes_by_name = {grad.op.name: 4 * grad.shape.num_elements() for grad in rows[0]}
        return all_reduces(graph)[0].tensors, bytes_by_name


@pytest.mark.parametrize("model", ["resnet50", "bert_base"])
def test_chainer_reduces_one_buffer_to_the_main(model):
    (buffer,), bytes_by_name = sent_by("chainer", model)
    others = tuple(range(1, 8))
    assert sorted(buffer.variables) == sorted(bytes_by_name)
    assert buffer.bytes == sum(bytes_by_name.values())
    assert buffer.schedule == (Reduce(others, 0), *(Copy(0, dst) for dst in others))


def test_chainer_updates_on_the_main_and_broadcasts_one_buffer(graph):
    devices = [f"/gpu:{tower}" for tower in range(4)]
    optimizer = TowerOptimizer(
        tf1.train.MomentumOptimizer(0.1, 0.9), devices, update="once", strategy="chainer"
    )
    rows = []
    for tower, device in enumerate(devices):
        with tf.device(device), tf1.variable_scope(f"tower{tower}"):
            row = []
            for n in range(20):
                start = np.zeros([300, 100], "float32")
                var = tf1.get_variable(f"w{n}", initializer=start, use_resource=True)
                row.append((tf1.placeholder("float32", [300, 100]), var))
            rows.append(row)
    optimizer.apply_gradients(rows)
    reduced, copied = all_reduces(graph)
    (gradients_sent,), (values_sent,) = reduced.tensors, copied.tensors
    assert gradients_sent.schedule == (Reduce((1, 2, 3), 0),)
    assert all(isinstance(move, Copy) for move in values_sent.schedule)
    assert gradients_sent.bytes == values_sent.bytes == 20 * 300 * 100 * 4
    slots = [var for var in tf1.global_variables() if "Momentum" in var.op.name]
    assert len(slots) == 20  # once, on the main


def test_a_missing_gradient_counts_as_zeros_for_chainer(graph):
    rows = [[tf1.placeholder("float32", [3])], [None]]
    assert len(allreduce_grads(rows, gpus_or_cpus(2), strategy="chainer")) == 2


@pytest.mark.parametrize("model", ["resnet50", "bert_base"])
def test_megengine_packs_up_to_10_mib_in_the_order_of_readiness(model):
    most = 10 << 20
    sent, bytes_by_name = sent_by("megengine", model)
    expected: list = [[]]
    size = 0
    for name, length in reversed(list(bytes_by_name.items())):
        if length < most:  # larger ones are alone, and cut
            if size + length > most:
                expected.append([])
                size = 0
            expected[-1].append(name)
            size += length
    packs = [list(tensor.variables) for tensor in sent if bytes_by_name[tensor.variables[0]] < most]
    assert packs == expected
    assert all(tensor.bytes <= most for tensor in sent)
    assert len({tensor.root for tensor in sent}) == 8


@pytest.mark.parametrize("model", ["resnet50", "bert_base"])
@pytest.mark.parametrize("preset", ["muji", "tensorpack"])
def test_each_variable_travels_alone(preset, model):
    sent, bytes_by_name = sent_by(preset, model)
    assert [tensor.variables for tensor in sent] == [(name,) for name in bytes_by_name]
    algorithm = {"muji": lambda n: tree(8, 0), "tensorpack": lambda n: hierarchical(8, n)}[preset]
    assert [list(tensor.schedule) for tensor in sent] == [algorithm(n) for n in range(len(sent))]


@pytest.mark.parametrize("model", ["resnet50", "bert_base"])
def test_tensorpacks_packed_mode_has_8_equal_parts(model):
    sent, bytes_by_name = sent_by("tensorpack_packed", model)
    assert [list(tensor.schedule) for tensor in sent] == [hierarchical(8, n) for n in range(8)]
    sizes = [tensor.bytes for tensor in sent]
    assert sum(sizes) == sum(bytes_by_name.values())
    assert max(sizes) - min(sizes) < 8 * 64
    # one after another: a gradient that is cut ends one part and begins the next
    in_order = [name for tensor in sent for name in tensor.variables]
    assert list(dict.fromkeys(in_order)) == list(bytes_by_name)[::-1]
