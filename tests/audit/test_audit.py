"""The audit: the copies TensorFlow executed are those of the plan, and anything else is told."""

import dataclasses
import inspect
import textwrap
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import checked, consumed_in_place, cpus, gradients_on, on_towers, session, tf1, traced

from hier_allreduce import AuditError, Strategy, allreduce_grads, allreduce_grads_hierarchical, audit
from hier_allreduce.graph import allreduce, emit
from hier_allreduce.graph.allreduce import copy_from_mains, reduce_to_mains
from hier_allreduce.inspect import auditing, built_sums
from hier_allreduce.inspect.executed import chunk_finder
from hier_allreduce.planning import Copy, Reduce
from hier_allreduce.planning.algorithms import BY_NAME, plan_of, tree, two_group

TO_ONE_MAIN = Strategy(algorithm="tree", mains=0, pack_below=0)
ONE_BY_ONE = {name: Strategy(algorithm=name, mains="rotate", pack_below=0) for name in BY_NAME}


def ones(devices, variables=1):
    return [[np.ones([2], np.float32)] * variables] * devices


def segment_sums(grads):
    """What training does with sparse gradients."""
    return [tf.math.unsorted_segment_sum(grad.values, grad.indices, 10).op for grad in grads]


# ---- what is planned is what happens ---------------------------------------------------------------


@pytest.mark.parametrize("how", [{"algorithm": "hierarchical"}, {"algorithm": "tree"}, {"topology": "dgx-1v"}])
def test_rows_gathered_on_levels_stay_on_planned_ways(graph, how):
    """Grappler would merge the concats of all levels into one, to which everybody sends."""

    def row(tower):
        values, ids = tf1.random_uniform([2, 3]), tf.cast(9 * tf1.random_uniform([2]), tf.int64)
        return [tf.IndexedSlices(values, ids)]

    result = allreduce_grads(on_towers(cpus(8), row), cpus(8), strategy=Strategy(sparse="gather", **how))
    used = on_towers(cpus(8), lambda tower: segment_sums(result[tower]))
    (call,) = audit(traced(used), graph).calls
    assert sum(call.copies.values()) == 2 * 14


def test_eight_devices_make_twelve_copies_inside_and_two_across(graph):
    result = allreduce_grads_hierarchical(gradients_on(cpus(8), ones(8, 16)), cpus(8), average=True)
    copies = audit(traced(consumed_in_place(result))).copies
    inside = {pair: count for pair, count in copies.items() if (pair[0] < 4) == (pair[1] < 4)}
    across = {pair: count for pair, count in copies.items() if pair not in inside}
    assert sum(inside.values()) == 16 * 12
    assert across == {(tower, (tower + 4) % 8): 4 for tower in range(8)}, "partners only, 16 times 2 in all"


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("algorithm", BY_NAME)
@pytest.mark.parametrize("devices", [1, 2, 3, 5, 8])
def test_every_algorithm_is_executed_as_planned(graph, devices, algorithm, average):
    grads = gradients_on(cpus(devices), ones(devices, 5))
    result = allreduce_grads(grads, cpus(devices), average, strategy=ONE_BY_ONE[algorithm])
    planned = plan_of(BY_NAME[algorithm], devices, range(5)).transfers()
    for fetched in (result, consumed_in_place(result)):
        assert audit(traced(fetched)).copies == planned


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(algorithm="hierarchical"),
        Strategy(algorithm="hierarchical", splits=3),
        Strategy(algorithm="tree", wire_dtype="float16"),
        Strategy(algorithm="flat", mains=1, pack_below=0),
        Strategy(algorithm="flat", mains=0, splits=1),
        Strategy(algorithm="hierarchical", groups=((3, 1), (0,), (4, 2)), pack_below=0),
        Strategy(algorithm="hierarchical", mains=2, groups=((3, 1, 2), (0,), (4,)), pack_below=0),
    ],
    ids=["bucket", "splits", "narrow", "fixed_main", "one_buffer", "groups", "fixed_main_in_groups"],
)
def test_every_strategy_is_executed_as_planned(graph, strategy):
    values = [[np.ones([60], np.float32), np.ones([7, 9], np.float32)]] * 5
    result = allreduce_grads(gradients_on(cpus(5), values), cpus(5), True, strategy=strategy)
    copies = audit(traced(consumed_in_place(result))).copies
    (emitted,) = emit.emitted_in(graph)
    assert copies == emitted.plan.transfers()
    assert sum(copies.values()) == 8 * emitted.plan.chunks


def test_values_and_indices_take_the_planned_way(graph):
    towers = gradients_on(cpus(3), [[np.ones([2, 4], np.float32), np.int64([0, 3])]] * 3)
    result = allreduce_grads([[tf.IndexedSlices(*parts)] for parts in towers], cpus(3), strategy="tree")
    copies = audit(traced([[row[0].values, row[0].indices] for row in result])).copies
    assert copies == plan_of(tree, 3, [0, 0]).transfers()


def test_the_table_in_the_documentation_is_what_prints(graph):
    result = allreduce_grads_hierarchical(gradients_on(cpus(4), ones(4)), cpus(4))
    text = str(audit(traced(result), graph))
    assert text.splitlines()[-1] == "hier_allreduce/: hierarchical, 1 chunk, 6 copies, planned = executed"
    assert textwrap.indent(text, "    ") in inspect.getdoc(auditing)


def test_each_set_of_devices_in_a_step_has_a_table(graph):
    def reduced(name, devices, variables):
        grads = gradients_on(cpus(devices), ones(devices, variables))
        return allreduce_grads(grads, cpus(devices), name=name, strategy=ONE_BY_ONE["flat"])

    fetched = [reduced("a", 3, 2), reduced("b", 3, 2), reduced("c", 2, 1)]
    reduced("d", 3, 2)
    found = audit(traced(fetched))
    assert [call.scope for call in found.calls] == ["a/", "b/", "c/"]
    assert found.copies == Counter({(0, 1): 5, (1, 0): 5, (0, 2): 2, (2, 0): 2, (1, 2): 2, (2, 1): 2})
    assert str(found).splitlines() == [
        "copies between the devices, from row to column",
        "           0  1  2",
        "0  /cpu:0  .  4  2",
        "1  /cpu:1  4  .  2",
        "2  /cpu:2  2  2  .",
        "total 16",
        "           0  1",
        "0  /cpu:0  .  1",
        "1  /cpu:1  1  .",
        "total 2",
        "a/: flat, 2 chunks, 8 copies, planned = executed",
        "b/: flat, 2 chunks, 8 copies, planned = executed",
        "c/: flat, 1 chunk, 2 copies, planned = executed",
        "d/: not part of this run",
    ]


@pytest.mark.parametrize("strategy", [Strategy(), *ONE_BY_ONE.values()], ids=["default", *ONE_BY_ONE])
@pytest.mark.parametrize("devices", [2, 4, 5])
def test_the_two_halves_are_executed_as_planned_each_on_its_own(graph, devices, strategy):
    grads = checked(gradients_on(cpus(devices), ones(devices, 3)), cpus(devices), False)
    sums, layout = reduce_to_mains(grads, False, strategy)
    values = []
    for variable, total in enumerate(sums):
        with tf.device(cpus(devices)[layout.mains()[variable]]):
            values.append(0.1 * total)
    result = copy_from_mains(values, layout)
    for fetched in (result, consumed_in_place(result)):
        found = audit(traced(fetched))
        assert [call.copies for call in found.calls] == [
            layout.plan.reduce_half().transfers(),
            layout.plan.copy_half().transfers(),
        ]


@pytest.mark.parametrize("shared", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0)])
@pytest.mark.parametrize("algorithm", BY_NAME)
def test_towers_that_share_a_device_need_no_copy_between_them(graph, shared, algorithm):
    devices = [f"/cpu:{index}" for index in shared]
    result = allreduce_grads(gradients_on(devices, ones(4, 5)), devices, strategy=ONE_BY_ONE[algorithm])
    other = shared.index(1)
    assert set(audit(traced(result)).copies) == {(0, other), (other, 0)}


@pytest.mark.parametrize(
    "devices, pairs",
    [
        ([None, "", None], {}),
        (["", "/cpu:2"], {(0, 1): 1, (1, 0): 1}),
        (["/device:CPU:1", "/job:localhost/replica:0/task:0/device:CPU:2"], {(0, 1): 1, (1, 0): 1}),
        (["/job:localhost/task:0/cpu:1", "/task:0/cpu:2"], {(0, 1): 1, (1, 0): 1}),
    ],
)
def test_devices_are_compared_by_what_they_say(graph, devices, pairs):
    result = allreduce_grads(gradients_on(devices, ones(len(devices))), devices, strategy="hierarchical")
    assert audit(traced(result)).copies == pairs


def test_copies_of_results_are_the_callers_business(graph):
    result = allreduce_grads(gradients_on(cpus(4), ones(4, 2)), cpus(4), strategy="hierarchical")
    with tf.device("/cpu:9"):
        norm = tf.add_n([tf.norm(tensor) for row in result for tensor in row])
    with tf.device("/cpu:1"):
        neighbour = result[2][0] * norm
    through = tf1.gradients(neighbour, result[0])
    assert audit(traced([result, neighbour, through])).copies == plan_of(two_group, 4, [0]).transfers()


def test_waiting_for_another_device_is_no_copy(graph):
    first, mine = gradients_on(["/cpu:3", "/cpu:1"], [[np.float32(1)], [np.float32(1)]])
    grads = gradients_on(cpus(3), ones(3, 2))
    with tf.control_dependencies(first):
        result = allreduce_grads(grads, cpus(3), strategy=ONE_BY_ONE["tree"])
    with tf.device("/cpu:1"), tf.control_dependencies(result[2][:1]):
        after = -mine[0]
    assert audit(traced([result, after])).copies == plan_of(tree, 3, range(2)).transfers()


def test_chunks_whose_names_begin_alike_are_kept_apart(graph):
    value, names = np.ones(2, np.float32), [f"t/w{'/1' * n}" for n in range(3)]
    rows = on_towers(cpus(3), lambda _: [tf1.placeholder_with_default(value, [2], name) for name in names])
    result = allreduce_grads_hierarchical(rows, cpus(3))
    assert audit(traced(result)).copies == plan_of(two_group, 3, range(3)).transfers()


@pytest.mark.parametrize("tables", [1, 2])
@pytest.mark.parametrize("algorithm", BY_NAME)
def test_indices_that_grappler_folds_need_no_copies(graph, algorithm, tables):
    """Those of positional embeddings; the indices of two tables travel as one."""

    def row(tower):
        table = [tf1.placeholder_with_default(np.ones([10, 3], np.float32), [10, 3]) for _ in range(tables)]
        found = [tf.gather(each, tf.range(5)) * tf1.random_uniform([5, 3]) for each in table]
        return tf1.gradients(found, table)

    results = allreduce_grads(on_towers(cpus(4), row), cpus(4), strategy=Strategy(sparse="gather", algorithm=algorithm))
    used = on_towers(cpus(4), lambda tower: segment_sums(results[tower]))
    (call,) = audit(traced(used), graph).calls
    assert sum(call.copies.values()) + call.unneeded == 2 * 6


@pytest.mark.parametrize("algorithm", BY_NAME)
def test_what_a_sum_and_a_mean_have_in_common_is_copied_once(graph, algorithm):
    grads = gradients_on(cpus(4), ones(4, 3))
    results = [allreduce_grads(grads, cpus(4), average, algorithm) for average in (False, True)]
    found = audit(traced([consumed_in_place(result) for result in results]), graph)
    assert sorted((sum(call.copies.values()), call.unneeded) for call in found.calls) == [(3, 3), (6, 0)]
    assert f"/: {algorithm}, 1 chunk, 3 copies and 3 not needed, planned = executed" in str(found)


def test_equal_gradients_of_two_variables_are_copied_once(graph):

    def row(tower):
        scales = [tf1.placeholder_with_default(np.ones(3, np.float32), [3]) for _ in range(2)]
        features = tf1.random_uniform([3])
        return tf.gradients([scale * features for scale in scales], scales)

    result = allreduce_grads(on_towers(cpus(4), row), cpus(4), strategy=TO_ONE_MAIN)
    (call,) = audit(traced(consumed_in_place(result)), graph).calls
    assert sum(call.copies.values()) + call.unneeded == 2 * 6


# ---- what is not, is told --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what, unplanned", [("fed", ", not planned 4→5"), ("constant", ""), ("merged", ", not planned 4→5")]
)
def test_a_graph_that_does_something_else_than_the_plan(graph, monkeypatch, what, unplanned):
    rows = gradients_on(cpus(8), ones(8, 3))
    if what == "constant":
        rows = [[grad.op.inputs[0] for grad in row] for row in rows]  # the placeholders' defaults
    result = [allreduce_grads_hierarchical(rows, cpus(8)) for _ in range(2 if what == "merged" else 1)]
    *others, emitted = emit.emitted_in(graph)
    steps = list(emitted.plan.steps)
    number = next(n for n, step in enumerate(steps) if step[1:] == (4, 5))
    steps[number] = steps[number]._replace(src=0)
    plan = dataclasses.replace(emitted.plan, steps=tuple(steps))
    monkeypatch.setattr(auditing, "emitted_in", lambda graph: [*others, dataclasses.replace(emitted, plan=plan)])
    chunk = steps[number].chunk
    with pytest.raises(AuditError, match=rf"chunk {chunk} \('{emitted.names[chunk]}'\): missing 0→5{unplanned}\n"):
        audit(traced(result))


def with_fault(change):
    """Return an ``emit`` whose ops are of another plan than the one that the audit knows."""
    real = allreduce.emit

    def emit(layout, *rest):
        changed = dataclasses.replace(layout.plan, steps=tuple(map(change, layout.plan.steps)))
        assert changed.transfers().keys() == layout.plan.transfers().keys()  # the same copies, at least once
        return real(layout._replace(plan=changed), *rest)

    return emit


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Reduce(0, (1, 2, 3, 1), 0), r"tower 0: counted too often 'gradient1\S*'$"),
        (Reduce(0, (1, 2, 2, 3, 3), 0), r"tower 0: counted too often 'gradient2\S*', 'gradient3\S*'$"),
    ],
)
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("how", [{}, {"wire_dtype": "float16"}], ids=str)
def test_a_sum_of_the_planned_copies_that_counts_a_tower_twice(graph, monkeypatch, fault, words, average, how):
    monkeypatch.setattr(allreduce, "emit", with_fault(lambda step: fault if isinstance(step, Reduce) else step))
    rows = on_towers(cpus(4), lambda tower: [tf1.random_uniform([2], name=f"gradient{tower}")])
    result = allreduce_grads(rows, cpus(4), average, strategy=Strategy(algorithm="flat", mains=0, pack_below=0, **how))
    with pytest.raises(AuditError, match=rf"(?m)add up something else \(4 results\)\n.*{words}"):
        audit(traced(consumed_in_place(result)))


@pytest.mark.parametrize("towers", [3, 5])
def test_a_copy_in_the_place_of_a_sum_loses_a_tower(graph, monkeypatch, towers):
    faults = []

    def change(step):
        if isinstance(step, Reduce) and not faults:
            faults.append(step)
            return Copy(step.chunk, step.srcs[0], step.dst)
        return step

    monkeypatch.setattr(allreduce, "emit", with_fault(change))
    result = allreduce_grads(gradients_on(cpus(towers), ones(towers)), cpus(towers), strategy="tree")
    with pytest.raises(AuditError, match=r"missing '"):
        audit(traced(consumed_in_place(result)))
    assert faults


@pytest.mark.parametrize(
    "how",
    [
        {"pack_below": 0},
        {},
        {"wire_dtype": "float16"},
        {"topology": "dgx-1v"},
        {"topology": "dgx-1v", "algorithm": "flat"},
        {"topology": "dgx-1v", "algorithm": "ring"},
    ],
    ids=str,
)
@pytest.mark.parametrize("average", [False, True])
def test_every_dense_result_is_counted(graph, how, average):
    allreduce_grads(gradients_on(cpus(8), ones(8, 5)), cpus(8), average, strategy=Strategy(**how))
    (call,) = emit.emitted_in(graph)
    held = built_sums._held(call, chunk_finder(call), graph)
    for row in call.results:
        assert [sum(held[chunk][name].values()) for chunk, name in enumerate(row)] == [8] * call.plan.chunks


def test_a_gradient_that_lives_on_another_device(graph):
    result = allreduce_grads(
        gradients_on(["/cpu:0", "/cpu:3", "/cpu:2", "/cpu:3"], ones(4, 2)), cpus(4), strategy=ONE_BY_ONE["hierarchical"]
    )
    with pytest.raises(AuditError) as caught:
        audit(traced(result))
    first, *chunks, hint = str(caught.value).splitlines()
    assert first.startswith("hier_allreduce/: the run did not move what the hierarchical plan says")
    assert sorted(line.partition(": ")[2] for line in chunks) == ["missing 1→0, not planned 3→0", "not planned 3→1"]
    assert hint.startswith("build tower k's gradients under tf.device(devices[k])")


def test_a_gradient_that_lives_on_no_towers_device(graph):
    result = allreduce_grads(gradients_on(["/cpu:0", "/cpu:9"], ones(2)), cpus(2))
    with pytest.raises(AuditError, match=r"missing 1→0, not planned /job:localhost/.*CPU:9→0"):
        audit(traced(result))


def test_a_step_that_fetches_a_part(graph):
    result = allreduce_grads(gradients_on(cpus(4), ones(4, 9)), cpus(4), strategy=ONE_BY_ONE["hierarchical"])
    with pytest.raises(AuditError) as caught:
        audit(traced(result[1]))
    lines = str(caught.value).splitlines()
    assert len(lines) == 8 and all(": missing " in line for line in lines[1:6])
    assert lines[6:] == [
        "and 4 more chunks",
        "fetch the results of all towers and variables: TensorFlow does not execute what is not fetched; and build"
        " tower k's gradients under tf.device(devices[k]): one that is on its main already is not copied there",
    ]


def test_what_is_missing_of_values_that_look_alike(graph):
    rows = on_towers(cpus(3), lambda _: tf.split(tf1.random_uniform([6]), 2))
    result = allreduce_grads(rows, cpus(3), strategy=TO_ONE_MAIN)
    with pytest.raises(AuditError, match=r"chunk 0 \('\S+'\): missing 0→1 0→2 1→0 2→0\nfetch"):
        audit(traced([row[0].op for row in result]), graph)


def test_a_mean_that_only_one_tower_gets_beside_a_sum(graph):
    grads = gradients_on(cpus(3), ones(3))
    sums, means = (allreduce_grads(grads, cpus(3), average, "tree") for average in (False, True))
    with pytest.raises(AuditError, match=r"missing 0→1 0→2\nfetch"):
        audit(traced([*consumed_in_place(sums), consumed_in_place(means[:1])]), graph)


def test_an_all_reduce_of_which_nothing_is_left_but_a_fetch(graph, monkeypatch):
    """Its sum is merged into another's, and it has no copy."""
    real, grads = allreduce.emit, gradients_on(cpus(2), ones(2))
    first = allreduce_grads(grads, cpus(2), strategy="flat")
    monkeypatch.setattr(allreduce, "emit", lambda layout, *how: real(without_copies(layout), *how))
    second = allreduce_grads(grads, cpus(2), strategy="flat")
    with pytest.raises(AuditError, match=r"missing 0→1"):
        audit(traced([first, second]), graph)


def without_copies(layout):
    return layout._replace(plan=layout.plan.reduce_half())


def test_soft_placement_that_moved_a_tower(graph):
    devices = ["/cpu:0", "/cpu:1", "/gpu:0"]
    result = allreduce_grads(gradients_on(devices, ones(3)), devices)
    with pytest.raises(AuditError, match=r"missing .*2→.*\nno op ran on /gpu:0: soft placement put its ops"):
        audit(traced(result, allow_soft_placement=True))


def test_metadata_without_partition_graphs(graph):
    result = allreduce_grads(gradients_on(cpus(2), ones(2)), cpus(2))
    metadata = tf1.RunMetadata()
    with session() as sess:
        sess.run(result, run_metadata=metadata)
    with pytest.raises(AuditError, match=r"no partition graphs; run .*RunOptions\(output_partition_graphs=True\)"):
        audit(metadata)


def test_a_step_without_an_all_reduce(graph):
    allreduce_grads(gradients_on(cpus(2), ones(2)), cpus(2), name="sync")
    with pytest.raises(AuditError, match=r"the run has none of the graph's all-reduces \(sync/\); fetch their results"):
        audit(traced(tf.constant(1.0)))


@pytest.fixture
def control_flow_v1():
    """As TensorFlow 1 has it by itself: branches are parts of the same graph."""
    was_on = tf1.control_flow_v2_enabled()
    tf1.disable_control_flow_v2()
    yield
    if was_on:
        tf1.enable_control_flow_v2()


def branch(devices):
    return [tf.identity(row[0]) for row in allreduce_grads(gradients_on(devices, ones(3)), devices)]


def in_cond(devices):
    taken = tf1.placeholder_with_default(False, [])
    return tf1.cond(taken, lambda: branch(devices), lambda: [tf.zeros([2]) for _ in devices])


def in_loop(devices):
    start = [tf.zeros([2]) for _ in devices]
    return tf1.while_loop(lambda turn, *_: turn < 3, lambda turn, *_: [turn + 1, *branch(devices)], [0, *start])


@pytest.mark.parametrize("build", [in_cond, in_loop])
def test_what_is_in_control_flow_is_not_audited(graph, control_flow_v1, build):
    """Partition graphs have the branch that was not taken too."""
    devices = cpus(3)
    inside = build(devices)
    with pytest.raises(AuditError, match=r"/hier_allreduce/: in a tf.cond or tf.while_loop"):
        audit(traced(inside))
    outside = consumed_in_place(allreduce_grads(gradients_on(devices, ones(3)), devices))
    found = audit(traced([inside, outside]))
    assert [call.scope for call in found.calls] == ["hier_allreduce/"]
    (scope,) = found.not_audited
    assert str(found).endswith(f"{scope}: in control flow, not audited")


def test_another_graph_than_the_one_that_ran(graph):
    result = allreduce_grads(gradients_on(cpus(2), ones(2)), cpus(2))
    metadata = traced(result)
    with tf.Graph().as_default(), pytest.raises(AuditError, match=r"no all-reduce was built in .*; pass graph="):
        audit(metadata)
    with tf.Graph().as_default():
        assert audit(metadata, graph).copies == {(0, 1): 1, (1, 0): 1}


def test_towers_placed_by_a_function_have_no_names_to_compare(graph):
    devices = ["/cpu:0", lambda op: "/cpu:1"]
    result = allreduce_grads(gradients_on(cpus(2), ones(2)), devices, strategy="hierarchical")
    with pytest.raises(AuditError, match=r"tower 1: its device is a function"):
        audit(traced(result))
