"""copy_check: which copy it names, which steps it is part of, and that others do not know it."""

import re
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import (
    config,
    consumed_in_place,
    gpus_or_cpus,
    held,
    on_towers,
    session,
    sparse,
    tf1,
    traced,
)

from hier_allreduce import (
    HierAllreduceError,
    Strategy,
    TowerOptimizer,
    all_reduces,
    allreduce_grads,
    audit,
    copy_check,
)
from hier_allreduce.planning.plan import copies

TOWERS = 4
SCOPE = "hier_allreduce_copy_check"


def consumed_step(wire=None):
    """Return a step that reduces packed, cut and sparse gradients, one of them NaN."""
    devices = gpus_or_cpus(TOWERS)

    def row(tower):
        large, small = np.full([3000], tower, "float32"), np.full([1, 3], np.nan, "float32")
        return [held(large), held(small), held(small[0]), sparse(tower, 4)]

    strategy = Strategy("tree", chunk_bytes=4096, wire_dtype=wire)
    rows = allreduce_grads(on_towers(devices, row), devices, True, strategy)
    return [consumed_in_place([[*row[:3], row[3].values, row[3].indices]]) for row in rows]


@pytest.mark.parametrize("wire", [None, "float16"])
def test_each_other_bit_names_its_copy(graph, wire):
    step = consumed_step(wire)
    check = copy_check(step)
    with session() as running:
        bits = running.run([step, check.fingerprints])[1]
    check.compare(bits, step=1)
    (built,) = all_reduces()
    assert len(built.tensors) == len(bits) >= 5
    for number, tensor in enumerate(built.tensors):
        for move in copies(tensor.schedule):
            changed = np.array(bits)
            changed[number, move.dst] += 1
            with pytest.raises(HierAllreduceError) as raised:
                check.compare(changed, step=9)
            text = str(raised.value)
            link = rf"step 9: the copy from tower {move.src} \(.*\) to tower {move.dst} \(.*\) has"
            assert re.match(link, text)
            assert f"hier_allreduce/{tensor}" in text and "; 1 checked step before had" in text


def test_hosts_with_other_sums_are_named(graph):
    """A session of several hosts gives the table of all; here it stands in for these."""

    class Session:
        def table(self, integers):
            return np.array([integers, np.add(integers, other)])

    step = consumed_step()
    check = copy_check(step)
    (built,) = all_reduces()
    check._sent = [(built._replace(hosts=2), tensor) for tensor in built.tensors]
    with session() as running:
        bits = running.run(check.fingerprints)
    other = np.zeros([np.size(bits)], "int64")
    check.compare(bits, 1, Session())
    other[:TOWERS] += 1
    with pytest.raises(HierAllreduceError, match="step 2: hosts 0 and 1 have other bits of one"):
        check.compare(bits, 2, Session())
    other[:TOWERS] = 0
    other[copies(built.tensors[0].schedule)[-1].dst] += 1
    with pytest.raises(HierAllreduceError, match=r"to tower .* on host 1 has other bits"):
        check.compare(bits, 2, Session())


def test_a_checked_step_is_audited(graph):
    """People audit the first step, which is one."""
    step = consumed_step()
    audited = audit(traced([step, copy_check(step).fingerprints]), graph)
    assert not audited.skipped and sum(audited.copies.values()) > 0


def nodes_of(running, step, feeds=None):
    """Return the nodes that a step executes."""
    options, seen = tf1.RunOptions(output_partition_graphs=True), tf1.RunMetadata()
    running.run(step, feeds, options=options, run_metadata=seen)
    return [node for partition in seen.partition_graphs for node in partition.node]


def executed_nodes(step):
    """Return what a step executes, without the numbers of what TensorFlow adds to it."""
    edge = re.compile(r"edge_\d+_|_\d+__cf__\d+|__cf__\d+|/_\d+")
    # A higher level merges equal constants, and keeps one of them by chance.
    level = tf1.OptimizerOptions(opt_level=tf1.OptimizerOptions.L0)
    options, seen = tf1.RunOptions(output_partition_graphs=True), tf1.RunMetadata()
    with session(graph_options=tf1.GraphOptions(optimizer_options=level)) as running:
        running.run(step, options=options, run_metadata=seen)
    texts = []
    for partition in seen.partition_graphs:
        partition.versions.Clear()
        texts.append(sorted(edge.sub("", str(node)) for node in partition.node))
    return sorted(texts)


def test_a_step_without_a_check_executes_the_same(graph):
    step = consumed_step()
    before = executed_nodes(step)
    check = copy_check(step)
    assert executed_nodes(step) == before != executed_nodes([step, check.fingerprints])


def test_each_tower_reads_what_it_got(graph):
    """TensorFlow may prune a copy, and a reader elsewhere would then get the source."""
    step = consumed_step()
    check = copy_check(step)
    (built,) = all_reduces()
    with session() as running:
        nodes = nodes_of(running, [step, check.fingerprints])
    reads = [node for node in nodes if node.op == "Reshape" and node.name.startswith(SCOPE)]
    towers = Counter(built.tower_at(node.device) for node in reads)
    assert towers == dict.fromkeys(range(TOWERS), len(built.tensors))


def test_a_check_adds_few_ops_for_each_copy(graph):
    """Two for each tower, two for each chunk, and constants, which chunks share."""
    devices = gpus_or_cpus(2)
    chunks = 20
    rows = on_towers(devices, lambda tower: [tf.ones([9]) * float(n) for n in range(chunks)])
    allreduce_grads(rows, devices, strategy=Strategy(chunk_bytes=0))
    before = len(graph.get_operations())
    assert len(copy_check().fingerprints) == chunks
    assert len(graph.get_operations()) - before <= chunks * 7 + 10


# ---- hooks ---------------------------------------------------------------------------------------


def train_op(scope, **options):
    """Return a train op of two towers that need to be fed, the feeds, and the hook."""
    devices = gpus_or_cpus(2)
    optimizer = TowerOptimizer(tf1.train.GradientDescentOptimizer(0.1), devices, **options)
    fed = []

    def row(tower):
        with tf1.variable_scope(f"{scope}{tower}", use_resource=True):
            w = tf1.get_variable("w", [5], initializer=tf1.zeros_initializer())
        fed.append(tf1.placeholder(tf.float32, [5]))
        return optimizer.compute_gradients(tf.reduce_sum(w * fed[-1]), [w])

    step = optimizer.apply_gradients(on_towers(devices, row), name=f"train_{scope}")
    return step, {x: np.ones([5], "float32") for x in fed}, optimizer.hook()


def checked_in(running, step, feeds):
    """Run a step and return whether copies were compared in it."""
    nodes = nodes_of(running, step, feeds)
    return any(node.op == "Fingerprint" and node.name.startswith(SCOPE) for node in nodes)


def monitored(*hooks):
    creator = tf1.train.ChiefSessionCreator(config=config())
    return tf1.train.MonitoredSession(creator, hooks=hooks)


@pytest.mark.parametrize("every, checked", [(None, [1, 2, 4, 8]), (3, [3, 6, 9]), (0, [])])
def test_the_hook_checks_some_steps(graph, every, checked):
    step, feeds, hook = train_op("tower", check_replicas_every=every)
    other = held(np.float32(1))
    with monitored(hook) as running:
        for number in range(1, 10):
            assert not checked_in(running, other, {})  # it would need to be fed
            assert checked_in(running, step, feeds) == (number in checked), number
    assert bool(checked) == any(op.name.startswith(SCOPE) for op in graph.get_operations())


def test_train_ops_that_take_turns_are_counted_each(graph):
    ours = train_op("critic")
    theirs = train_op("painter")
    with monitored(ours[2], theirs[2]) as running:
        for number in range(1, 6):
            for step, feeds, _ in (ours, theirs):
                assert checked_in(running, step, feeds) == (number in (1, 2, 4))


def test_a_second_session_of_a_finalized_graph_checks_too(graph):
    step, feeds, hook = train_op("tower")
    for _ in range(2):
        with monitored(hook) as running:
            running.run(step, feeds)


def test_nothing_to_check_is_an_error(graph):
    with pytest.raises(HierAllreduceError, match="no all-reduce that these fetches need"):
        copy_check(tf.constant(1.0))


@pytest.mark.tf2
def test_a_function_returns_its_fingerprints():
    devices = gpus_or_cpus(3)
    checks = []

    @tf.function
    def step(x):
        rows = on_towers(devices, lambda tower: [x * float(tower)])
        total = allreduce_grads(rows, devices)[0][0]
        checks.append(copy_check())
        return total, checks[0].fingerprints

    total, bits = step(tf.ones([4]))
    assert total.numpy().tolist() == [3] * 4
    checks[0].compare(bits, step=1)
    assert np.shape(bits) == (1, 3)
