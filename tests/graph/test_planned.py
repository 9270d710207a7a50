"""Plans made for a machine's links, running on tensors: the same sums, and the copies that were planned."""

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import (
    checked,
    consumed_in_place,
    cpus,
    evaluate,
    executed,
    gradients_on,
    held,
    on_towers,
    same_bits,
    sparse,
    traced,
)

from hier_allreduce import HierAllreduceError, Strategy, allreduce_grads, audit
from hier_allreduce.graph.allreduce import copy_from_mains, reduce_to_mains
from hier_allreduce.graph.layout import lay_out
from hier_allreduce.planning import NAMES, Bucketing, PlanningTarget, Spec, best_plan, plan_cut, plan_whole, verify
from hier_allreduce.planning.assignment import first_chunks
from hier_allreduce.planning.host import backward_pass
from hier_allreduce.planning.simulator import predicted_seconds
from hier_allreduce.topology import load, subset

tf1 = tf.compat.v1
SHAPES = [(64, 50), (7,), (), (300, 20), (0, 3), (129,)]


def whole_numbers(towers):
    random = np.random.RandomState(towers)
    return [[random.randint(-99, 99, shape).astype("float32") for shape in SHAPES] for _ in range(towers)]


def over_mains(devices, values, strategy):
    """Sums of whole gradients on the main of each, and copies of what is made of them: here, they are doubled."""
    grads = checked(gradients_on(devices, values), devices, False)
    totals, layout = reduce_to_mains(grads, False, strategy)
    updated = []
    for variable, total in enumerate(totals):
        with tf.device(devices[layout.mains()[variable]]):
            updated.append(2 * total)
    return copy_from_mains(updated, layout)


@pytest.mark.parametrize("machine", ["dgx-1v", "dgx-1v-azure", "pcie-sockets", "dgx-a100"])
@pytest.mark.parametrize("towers", [1, 3, 5, 8])
def test_planned_sums_are_right_and_equal_on_all_towers(graph, machine, towers):
    values, devices, strategy = whole_numbers(towers), cpus(towers), Strategy(topology=machine)
    cut = allreduce_grads(gradients_on(devices, values), devices, strategy=strategy)
    rows, doubled = evaluate([cut, over_mains(devices, values, strategy)])
    assert same_bits(rows) and same_bits(doubled)
    for variable, total in enumerate(np.sum([row[variable] for row in values], 0) for variable in range(len(SHAPES))):
        assert np.array_equal(rows[-1][variable], total) and np.array_equal(doubled[-1][variable], 2 * total)


def steps_of(plan):
    """The steps of a plan, bucket by bucket: no order is kept between buckets."""
    return sorted(plan.steps, key=lambda step: plan.buckets[step.chunk])


@pytest.mark.parametrize("algorithm", NAMES)
def test_what_tensorflow_executes_is_what_was_planned(graph, algorithm):
    devices, strategy = cpus(8), Strategy(algorithm, topology="dgx-1v")
    rows = gradients_on(devices, whole_numbers(8))
    result = allreduce_grads(rows, devices, True, strategy=strategy)
    assert len(audit(traced(consumed_in_place(result)), graph).calls) == 1
    filled = [[value for value in row if value.size] for row in whole_numbers(8)]  # what is made of none is a constant
    halves = over_mains(devices, filled, strategy)
    assert [call.scope for call in audit(traced(consumed_in_place(halves)), graph).calls if call.copies] == [
        "reduce_to_mains/",
        "copy_from_mains/",
    ]


def test_the_plan_that_is_printed_is_the_plan_that_runs(graph):
    """Gradients of one dtype: the buckets and steps are those of the command line's plan for these bytes."""
    devices, machine = cpus(8), load("dgx-1v")
    rows = gradients_on(devices, [[np.zeros((250, 1000), "float32"), np.zeros(10**6, "float32")]] * 8)
    result = allreduce_grads(rows, devices, strategy=Strategy(topology=machine))
    (call,) = audit(traced(consumed_in_place(result)), graph).calls
    printed = best_plan(machine, 5 * 10**6).plan
    assert (steps_of(call.plan), call.plan.buckets) == (steps_of(printed), printed.buckets)


@pytest.mark.parametrize("devices", ["/cpu:{}", "/gpu:{}"])
@pytest.mark.parametrize("hosts_in_all", [1, 2])
def test_a_topologys_plan_is_the_same_on_all_devices(graph, devices, hosts_in_all):
    places, machine = [devices.format(k) for k in range(4)], load("p3.8xlarge")
    rows = checked([[tf.zeros([500, 1000])] for _ in places], places, False)
    layout = lay_out(rows, Strategy(topology="p3.8xlarge"), hosts=hosts_in_all)
    plan = PlanningTarget(machine, hosts=hosts_in_all).plan(2 * 10**6, 2 * 10**6)
    assert (steps_of(layout.plan), layout.plan.algorithm) == (steps_of(plan), plan.algorithm)
    assert len(layout.chunks) == plan.chunks


@pytest.mark.parametrize("lanes", [0, 3])
def test_the_buckets_that_are_printed_are_the_buckets_that_run(lanes):
    """The first have gradients of the last variable, which the backward pass makes first."""
    machine = load("p3.8xlarge")
    specs = [Spec(5 * 10**6, 4, "float32")] * 2
    chunks, plan = plan_cut(specs, PlanningTarget(machine, lanes=lanes))
    printed = best_plan(machine, 40 * 10**6, lanes=lanes).plan
    assert (steps_of(plan), plan.buckets, plan.devices) == (steps_of(printed), printed.buckets, 4 * (1 + lanes))
    assert max(plan.buckets) > 0 and plan.lanes == lanes
    last = [max(piece.number for piece in chunk.pieces) for chunk in chunks]
    assert last == sorted(last, reverse=True) and last[0] == 1 > last[-1]
    verify(plan)


def test_the_plan_is_called_by_the_algorithms_that_were_chosen():
    machine = load("nvlink-bridges")
    links = PlanningTarget(machine)
    large, small = Spec(25 * 10**6, 4, "float32"), Spec(100, 2, "float16")
    names = best_plan(machine, large.bytes).plan.algorithm, links.idle_plan(small.bytes).algorithm
    assert names[1] not in names[0].split(", ")
    assert plan_cut([large], links)[1].algorithm == names[0]
    assert plan_cut([small, large], links)[1].algorithm == ", ".join(names)  # the last is ready first
    assert plan_whole([large], links, Bucketing())[1].algorithm == links.idle_plan(large.bytes).algorithm


@pytest.mark.parametrize("machine, size", [("dgx-1v", 10**8), ("dgx-a100", 10**9), ("pcie-pairs", 10**7)])
def test_more_hosts_make_fewer_chunks(machine, size):
    """So many that the hops of all chunks, with the first chunk's sums and the last one's copies, take least."""
    links, counts = load(machine), []
    alone = PlanningTarget(links).idle_plan(size)
    one_chunk = predicted_seconds(first_chunks(alone, 1), links, [size])
    for hosts in (2, 4, 8, 32, 1024):
        chunks, plan = plan_cut([Spec(size // 4, 4, "float32")], PlanningTarget(links, hosts=hosts))
        verify(plan)
        possible = range(1, alone.chunks + 1)
        seconds = {count: count * 2 * (hosts - 1) * 0.3e-3 + one_chunk / count for count in possible}
        assert abs(len(chunks) - min(seconds, key=seconds.get)) <= 1
        assert sum(chunk.bytes for chunk in chunks) == size
        counts.append(len(chunks))
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] == 1


def ways_of(plan):
    """The steps of each chunk."""
    return [tuple(s._replace(chunk=0) for s in plan.steps if s.chunk == chunk) for chunk in range(plan.chunks)]


@pytest.mark.parametrize("machine, algorithm", [("dgx-1v", None), ("pcie-sockets", "ring")])
def test_whole_gradients_share_the_planned_ways_by_their_bytes(machine, algorithm):
    specs = [Spec(1000 * (gradient % 7 + 1), 4, "float32") for gradient in range(96)]
    links = PlanningTarget(load(machine), algorithm)
    chunks, plan = plan_whole(specs, links, Bucketing(pack_below=0))
    carried, total = Counter(), sum(chunk.bytes for chunk in chunks)
    for chunk, way in zip(chunks, ways_of(plan)):
        carried[way] += chunk.bytes
    model, planned_for = links.idle_plan(total), Counter()
    for way, share in zip(ways_of(model), model.shares):
        planned_for[way] += share * total
    assert len(planned_for) > 1
    for way, share in planned_for.items():
        assert abs(carried[way] - share) <= 7000 * 4  # one gradient more or less


def test_gradients_of_unknown_size_take_the_planned_ways_in_turn():
    links = PlanningTarget(load("dgx-1v"))
    _, plan = plan_cut([Spec(None, 4, "float32")] * 10, links)
    ways = ways_of(links.idle_plan(0))
    assert len(ways) > 1
    assert ways_of(plan) == [ways[gradient % len(ways)] for gradient in range(10)]


@pytest.mark.parametrize("wire_dtype, travel", [(None, 2 * 10**6), ("float16", 10**6)])
def test_links_are_planned_for_the_bytes_that_travel(graph, wire_dtype, travel):
    devices, machine = cpus(8), load("dgx-1v")
    rows = checked([[tf.zeros([500, 1000])] for _ in devices], devices, False)
    layout = lay_out(rows, Strategy(topology=machine, wire_dtype=wire_dtype))
    backward = backward_pass(2 * 10**6)  # of the gradients, however they travel
    assert steps_of(layout.plan) == steps_of(best_plan(machine, travel, backward).plan)
    assert steps_of(layout.plan) != steps_of(best_plan(machine, 3 * 10**6 - travel, backward).plan)


@pytest.mark.parametrize("devices", ["/cpu:{}", "/gpu:{}"])
def test_gradients_stay_whole_only_for_updates_at_the_mains(graph, devices):
    places = tuple(devices.format(k) for k in range(4))
    sizes = [500_000, 9, 210_000, 5]
    rows = checked([[tf.zeros([size]) for size in sizes] for _ in places], places, False)
    for one_main in (False, True):
        layout = lay_out(rows, Strategy(topology="p3.8xlarge"), one_main)
        pieces = [piece for chunk in layout.chunks for piece in chunk.pieces if piece.stop is not None]
        assert any(piece.stop - piece.start < sizes[piece.number] for piece in pieces) != one_main


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_whole_gradients_are_added_up_along_the_plan(graph, dtype):
    values = [[np.full((300, 100), 2.0**k, dtype)] for k in range(8)]
    result = over_mains(cpus(8), values, Strategy("ring", topology="dgx-1v"))
    sums = [op for op in graph.get_operations() if op.type in ("AddN", "AddV2", "Add")]
    assert [len(op.inputs) for op in sums] == [2] * 7
    there, back = audit(traced(consumed_in_place(result)), graph).calls
    assert len({frozenset(pair) for pair in [*there.copies, *back.copies]}) == 7  # only along the path
    for half in (there, back):
        assert str(half).endswith("1 chunk, 7 copies, planned = executed")  # to the main, and back


def test_whole_gradients_travel_in_the_wire_dtype_too(graph):
    strategy = Strategy("ring", topology="dgx-1v", wire_dtype="float16")
    over_mains(cpus(8), [[np.ones((300, 100), "float32")]] * 8, strategy)
    ops = [op for op in graph.get_operations() if "/sent" in op.name]  # of 7 sums, and of the total
    assert len(ops) == 8 and {op.outputs[0].dtype for op in ops} == {tf.float16}


def test_sparse_rows_on_cpu_devices_are_joined_along_the_plan(graph):
    devices = cpus(8)
    rows = on_towers(devices, lambda tower: [sparse(tower, 3)])
    result = allreduce_grads(rows, devices, strategy=Strategy("ring", topology="dgx-1v", sparse="gather"))
    joins = [op for op in graph.get_operations() if op.type == "ConcatV2"]
    assert [len(op.inputs) for op in joins] == [3] * 14  # values and indices of two towers, and the axis, at each hop
    (call,) = audit(traced(consumed_in_place([[row[0].values, row[0].indices] for row in result])), graph).calls
    assert sum(call.copies.values()) == 2 * 14


def test_a_job_on_some_gpus_is_planned_for_their_links(graph):
    devices, machine = ("/gpu:5", "/gpu:0", "/gpu:3"), load("dgx-1v")
    rows = checked([[tf.zeros([500, 500])] for _ in devices], devices, False)
    steps = steps_of(lay_out(rows, Strategy(topology="dgx-1v")).plan)
    assert steps == steps_of(best_plan(subset(machine, [5, 0, 3]), 10**6).plan)
    for others in ([0, 1, 2], [0, 3, 5]):
        assert steps != steps_of(best_plan(subset(machine, others), 10**6).plan)


def test_sparse_rows_and_their_indices_go_the_same_way(graph):
    """Rows enough for several ways: of each the value and the index are the number of its tower."""
    devices, strategy = cpus(4), Strategy(topology="p3.8xlarge", sparse="gather", pack_below=0)
    counts = [[(tower + 1) * rows for rows in (1000, 2000, 4000, 8000)] for tower in range(4)]
    rows = [
        [tf.IndexedSlices(held(np.full([n, 64], tower, "float32")), held(np.full([n], tower, "int64"))) for n in row]
        for tower, row in enumerate(counts)
    ]
    assert len(set(lay_out(checked(rows, devices, False), strategy).plan.roots)) > 1
    for grad, column in zip(evaluate(allreduce_grads(rows, devices, strategy=strategy)[2]), zip(*counts)):
        assert len(grad.indices) == sum(column)
        assert (grad.values == grad.indices[:, np.newaxis]).all()


@pytest.mark.parametrize(
    "towers, strategy",
    [
        (3, Strategy(topology="this machine")),
        (3, Strategy("ring", topology="this machine")),
        (1, Strategy("tree", topology="dgx-1v")),
    ],
)
def test_where_there_are_no_links_there_is_no_plan(towers, strategy):
    values = whole_numbers(towers)
    rows = executed(values, cpus(towers), strategy=strategy)
    assert np.array_equal(rows[-1][0], np.sum([row[0] for row in values], 0))


def test_a_topology_object_is_taken_as_it_is():
    machine = subset(load("dgx-1v"), [0, 3, 2])
    assert "planned for the links of DGX-1V" in str(Strategy(topology=machine))
    rows = executed(whole_numbers(3), cpus(3), strategy=Strategy(topology=machine))
    assert same_bits(rows)


def test_a_machine_with_too_few_devices_is_refused(graph):
    rows = gradients_on(cpus(8), whole_numbers(8))
    before = len(graph.get_operations())
    words = "does not fit devices.*has devices 0 to 3, each once; cannot take 4, 5, 6, 7"
    with pytest.raises(HierAllreduceError, match=words):
        allreduce_grads(rows, cpus(8), strategy=Strategy(topology="p3.8xlarge"))
    assert len(graph.get_operations()) == before
