"""Copies leave in the plan's order, as far as they can without waiting for later gradients."""

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import cpus, evaluate, executed, gradients_on, held, on_towers, sparse, started, tf1
from hypothesis import given, settings
from hypothesis import strategies as st

import hier_allreduce
from hier_allreduce import AuditError, Strategy, allreduce_grads, audit
from hier_allreduce.graph import copy_order
from hier_allreduce.graph.emit import emitted_in
from hier_allreduce.planning import Copy, Plan, Reduce, best_plan, issued_before
from hier_allreduce.planning.algorithms import BY_NAME, plan_of
from hier_allreduce.topology import load

MB = 10**6


def copies_of(plan):
    """The copies of a plan in its order: (sender, chunk)."""
    return [(src, step.chunk) for step in plan.steps for src in (step.srcs if isinstance(step, Reduce) else [step.src])]


def taking_turns(plan):
    """The number of copies whose sender has others in the same bucket."""
    senders = [(src, plan.buckets[chunk]) for src, chunk in copies_of(plan)]
    return sum(senders.count(sender) > 1 for sender in senders)


def all_before(before):
    """What each copy follows, directly or through others."""
    reached = []
    for own in before:
        reached.append(set(own).union(*(reached[other] for other in own)))
    return reached


@given(
    st.integers(2, 6),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.sampled_from(sorted(BY_NAME)),
)
@settings(max_examples=60)
def test_a_copy_follows_those_of_its_sender_and_bucket_only(devices, buckets, algorithm):
    plan = plan_of(BY_NAME[algorithm], devices, range(len(buckets)))
    plan = dataclasses.replace(plan, buckets=tuple(buckets))
    copies = copies_of(plan)
    reached = all_before(issued_before(plan))
    for number, (src, chunk) in enumerate(copies):
        earlier = {other for other in range(number) if copies[other][0] == src}
        assert reached[number] == {other for other in earlier if buckets[copies[other][1]] == buckets[chunk]}


def test_without_buckets_all_chunks_are_in_one():
    plan = Plan(4, 2, (Copy(1, 0, 1), Copy(0, 0, 2), Copy(1, 0, 3)))
    assert issued_before(plan) == [(), (0,), (1,)]
    assert issued_before(dataclasses.replace(plan, buckets=(0, 1))) == [(), (), (0,)]


def reduced(strategy, devices, variables=6, elements=40_000):
    """The all-reduce of ``variables`` gradients on each device: values of variables, which nothing folds."""
    rows = []
    for tower, device in enumerate(devices):
        with tf.device(device), tf1.variable_scope(f"tower{tower}"):
            made = [tf1.get_variable(f"v{n}", [elements], use_resource=True) for n in range(variables)]
            rows.append([tf.identity(variable.read_value()) for variable in made])
    return allreduce_grads(rows, devices, strategy=strategy)


def traced(rows):
    """The metadata of one step, partition graphs included."""
    metadata = tf1.RunMetadata()
    with started() as sess:
        fetched = [tensor.op for row in rows for tensor in row]
        sess.run(fetched, options=tf1.RunOptions(output_partition_graphs=True), run_metadata=metadata)
    return metadata


PLANNED = Strategy(topology="dgx-a100")


def test_the_audit_says_that_copies_left_in_the_plans_order(graph):
    devices = cpus(8)
    rows = reduced(PLANNED, devices)
    report = audit(traced(rows), graph)
    several = taking_turns(best_plan(load("dgx-a100"), 6 * 160_000).plan)
    assert report.calls[0].in_order == several > 8
    assert f"{several} of them in the plan's order" in str(report)


def test_the_audit_finds_a_copy_that_did_not_wait(graph):
    """As if Grappler had dropped the control edges between turns."""
    rows = reduced(PLANNED, cpus(8))
    metadata = traced(rows)
    for part in metadata.partition_graphs:
        for node in part.node:
            kept = [name for name in node.input if not (name.startswith("^") and "/turn" in name)]
            del node.input[:]
            node.input.extend(kept)
    with pytest.raises(AuditError, match=r"copies left out of the plan's order .*/turn.* did not wait for"):
        audit(metadata, graph)


@pytest.mark.parametrize(
    "strategy",
    [Strategy(), Strategy(algorithm="hierarchical"), Strategy(algorithm="ring")],
    ids=["default", "hierarchical", "ring"],
)
def test_only_plans_cut_for_links_have_turns(graph, strategy):
    reduced(strategy, cpus(8))
    assert not [op for op in graph.get_operations() if "/turn" in op.name]


def test_a_device_that_sends_once_takes_no_turns(graph):
    reduced(Strategy(topology="p3.8xlarge", algorithm="flat"), cpus(2), variables=1, elements=10)
    assert not [op for op in graph.get_operations() if "/turn" in op.name]


@pytest.mark.parametrize("wire", [None, "float16"])
@pytest.mark.parametrize("average", [False, True])
def test_results_are_those_without_turns(wire, average):
    values = [[np.arange(12.0, dtype=np.float32) * (k + 1) for _ in range(5)] for k in range(8)]
    how = {"average": average}
    planned = executed(values, cpus(8), strategy=Strategy(topology="dgx-a100", wire_dtype=wire), **how)
    plain = executed(values, cpus(8), **how)
    for row in planned:
        np.testing.assert_allclose(row, plain[0], rtol=1e-3 if wire else 1e-6)


def test_sparse_rows_take_turns_too(graph):
    devices = cpus(4)
    rows = on_towers(devices, lambda tower: [sparse(tower, 3), held(np.ones([40], np.float32))])
    result = allreduce_grads(rows, devices, strategy=Strategy(topology="p3.8xlarge", sparse="gather"))
    assert all(len(row[0].indices) == 12 and (row[1] == 4).all() for row in evaluate(result))


def test_gradients_flow_through_turns(graph):
    devices = cpus(4)
    x = held(np.ones([64], np.float32))
    rows = [[x * (k + 1.0)] for k in range(4)]
    result = allreduce_grads(rows, devices, strategy=Strategy(topology="p3.8xlarge"))
    (slope,) = tf.gradients(result[3][0], [x])
    assert (evaluate(slope) == 10).all()


@pytest.mark.tf2
def test_in_a_function_copies_take_turns_and_the_sums_are_right():
    devices = cpus(8)

    @tf.function
    def step(x):
        rows = on_towers(devices, lambda k: [x * float(k + 1), x + float(k)])
        return hier_allreduce.allreduce_grads(rows, devices, strategy=Strategy(algorithm="ring", topology="dgx-a100"))

    with tf.init_scope():
        concrete = step.get_concrete_function(tf.TensorSpec([50_000], tf.float32))
        turns = [op for op in concrete.graph.get_operations() if op.type == copy_order.TURN and "/turn" in op.name]
        result = step(tf.ones([50_000]))
    assert len(turns) > 8
    assert all((row[0].numpy() == 36).all() and (row[1].numpy() == 36).all() for row in result)


def test_no_copy_waits_for_a_gradient_that_comes_later(graph):
    """Of eight gradients of 5 MB, buckets without a part of the one that is ready last do not wait for it."""
    rows = on_towers(
        cpus(4), lambda _: [tf1.placeholder(tf.float32, [5 << 18], name=f"grad{number}") for number in range(8)]
    )
    allreduce_grads(rows, cpus(4), strategy=Strategy(topology="p3.8xlarge"), name="all")
    (call,) = emitted_in(graph)
    bucket_of = dict(zip(call.names, call.plan.buckets))
    late = {op for op in graph.get_operations() if op.type == "Placeholder" and op.name.startswith("grad0")}
    turns = [(op, bucket_of[op.name.split("/")[1]]) for op in graph.get_operations() if "/turn" in op.name]
    with_late = {bucket for op, bucket in turns if needs(op, controls=False) & late}
    without = [op for op, bucket in turns if bucket not in with_late]
    assert without and not [op.name for op in without if needs(op) & late]


def needs(op, controls=True):
    """All ops that must run before ``op``."""
    seen, waiting = set(), [op]
    while waiting:
        one = waiting.pop()
        before = {tensor.op for tensor in one.inputs} | (set(one.control_inputs) if controls else set())
        waiting += before - seen
        seen |= before
    return seen


def test_every_reduction_has_its_turn():
    """Each copy that can be out of order has one, for each kind of chunk and algorithm."""
    for algorithm, kinds in itertools.product(("ring", "flat"), ("float32", "float16")):
        with tf.Graph().as_default() as graph:
            values = [[np.ones([4096], kinds)] * 3 for _ in range(4)]
            strategy = Strategy(topology="p3.8xlarge", algorithm=algorithm)
            allreduce_grads(gradients_on(cpus(4), values), cpus(4), strategy=strategy)
            turns = [op for op in graph.get_operations() if "/turn" in op.name]
            size = 3 * 4096 * np.dtype(kinds).itemsize
            assert len(turns) == taking_turns(best_plan(load("p3.8xlarge"), size, None, algorithm).plan) > 0
