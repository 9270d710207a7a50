"""The cost model: single steps by hand, TensorFlow's rule against ideal links, and the numbers it was built to give."""

import math
from collections import Counter

import pytest

from hier_allreduce.errors import PlanError, StrategyError
from hier_allreduce.planning import algorithms, planner, recipes
from hier_allreduce.planning import simulator as cost
from hier_allreduce.planning.plan import Copy, Plan, Reduce
from hier_allreduce.planning.simulator import RULES, Simulation, lower_bound, simulate
from hier_allreduce.planning.spanning_trees import pack
from hier_allreduce.topology import from_matrix, from_yaml, load, subset
from hier_allreduce.topology.contention import resources
from hier_allreduce.topology.matrix import LinkMatrix

MB = 10**6
# The DGX-1V with the nominal 25 GB/s a link, no PCIe to speak of, and sums that cost their launch only.
NOMINAL = {"speeds": {"nvlink": 25e9, "memory": 1e15}, "links": {"SYS": 1e7}}
CUBE_MESHES = ["dgx-1v", "dgx-1v-azure", "dgx-1v-c", "dgx-1v-d"]


def machine(*rows, **speeds):
    """Rows of kinds, with round numbers: 1 µs to start a copy, 2 µs to launch a sum, 10 GB/s an NVLink."""
    labels = tuple(f"GPU{i}" for i in range(len(rows)))
    table = LinkMatrix(labels, tuple(tuple(row.split()) for row in rows), ("",) * len(rows), "", ())
    given = {"copy_latency": 1e-6, "kernel": 2e-6, "nvlink": 10e9, "memory": 100e9, "pcie": 10e9, **speeds}
    return from_matrix(table, "test", calibration={"speeds": given})


TRIANGLE = machine("X NV1 NV2", "NV1 X NV1", "NV2 NV1 X")
STAR = machine(*["PIX " * i + "X " + "PIX " * (3 - i) for i in range(4)])
SOCKETS = machine("X PIX SYS SYS", "PIX X SYS SYS", "SYS SYS X PIX", "SYS SYS PIX X")


def nominal(name):
    return from_yaml(load(name).to_yaml(), calibration=NOMINAL)


def micros(plan, topology, chunks, **how):
    return simulate(plan, topology, chunks, **how).seconds * 1e6


@pytest.mark.parametrize("rule", RULES)
def test_one_copy_takes_its_start_and_its_bytes(rule):
    assert micros(Plan(3, 1, (Copy(0, 0, 1),)), TRIANGLE, [100_000], rule=rule) == pytest.approx(1 + 10)
    assert micros(Plan(3, 1, (Copy(0, 0, 2),)), TRIANGLE, [100_000], rule=rule) == pytest.approx(1 + 5)


@pytest.mark.parametrize("rule, copies", [("queue", 11 + 5), ("in order", 11 + 6), ("eager", 11)])
def test_a_sum_waits_for_all_its_sources_and_reads_and_writes_memory(rule, copies):
    plan = Plan(3, 1, (Reduce(0, (1, 0), 2),))
    assert micros(plan, TRIANGLE, [100_000], rule=rule) == pytest.approx(copies + 2 + 4 * 1)


def test_a_sender_copies_one_after_the_other_unless_links_are_ideal():
    plan = Plan(3, 2, (Copy(0, 0, 1), Copy(1, 0, 2)))
    assert micros(plan, TRIANGLE, [100_000] * 2) == pytest.approx(11 + 6)
    assert micros(plan, TRIANGLE, [100_000] * 2, ideal_links=True) == pytest.approx(11)


def test_a_receiver_takes_in_one_copy_at_a_time_by_some_rules_the_start_too_by_one():
    plan = Plan(3, 2, (Copy(0, 0, 1), Copy(1, 2, 1)))
    assert micros(plan, TRIANGLE, [100_000] * 2) == pytest.approx(11 + 10)
    assert micros(plan, TRIANGLE, [100_000] * 2, rule="in order") == pytest.approx(11 + 11)
    assert micros(plan, TRIANGLE, [100_000] * 2, rule="eager") == pytest.approx(11)


def test_a_port_an_uplink_and_a_bus_are_shared():
    two_into_one = Plan(4, 2, (Copy(0, 0, 1), Copy(1, 2, 1)))
    assert micros(two_into_one, STAR, [100_000] * 2, rule="eager") == pytest.approx(10 + 11)
    across = Plan(4, 2, (Copy(0, 0, 2), Copy(1, 1, 3)))
    alone = micros(Plan(4, 1, (Copy(0, 0, 2),)), SOCKETS, [100_000])
    assert micros(across, SOCKETS, [100_000] * 2, rule="eager") == pytest.approx(alone + 10)
    back = Plan(4, 2, (Copy(0, 0, 2), Copy(1, 3, 1)))
    assert micros(back, SOCKETS, [100_000] * 2, rule="eager") == pytest.approx(alone)


def test_in_order_waits_for_a_copy_that_is_not_ready_and_the_queue_does_not():
    steps = (Copy(0, 0, 1), Copy(0, 1, 2), Copy(1, 1, 2))
    plan = Plan(3, 2, steps)
    assert micros(plan, TRIANGLE, [100_000] * 2) == pytest.approx(22)
    assert micros(plan, TRIANGLE, [100_000] * 2, rule="in order") == pytest.approx(33)


def test_an_eager_sender_starts_what_can_start_at_once():
    plan = Plan(4, 3, (Copy(0, 2, 1), Copy(1, 0, 1), Copy(2, 0, 3)))
    assert micros(plan, STAR, [100_000] * 3, rule="eager") == pytest.approx(11 + 11)


def test_a_sum_waits_for_the_sum_before_it_on_its_device():
    """Also if its own source arrives sooner: after 6 µs, where the other takes 11."""
    plan = Plan(3, 1, (Reduce(0, (1,), 2), Reduce(0, (0,), 2)))
    assert micros(plan, TRIANGLE, [100_000], rule="eager") == pytest.approx(11 + 5 + 5)


def test_link_bytes_are_what_the_plan_moves():
    plan = algorithms.hierarchical(8, range(8))
    sizes = [10 * MB + chunk for chunk in range(8)]
    run = simulate(plan, load("dgx-1v"), sizes)
    counted = Counter()
    for step in plan.steps:
        for src in step.srcs if isinstance(step, Reduce) else (step.src,):
            counted[src, step.dst] += sizes[step.chunk]
    assert run.link_bytes == counted


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["dgx-1v", "pcie-sockets", "dgx-a100"])
def test_no_device_does_two_things_on_one_stream(name, rule):
    topology = load(name)
    run = simulate(algorithms.tree(8, range(8)), topology, [MB] * 8, rule=rule)
    for device in range(8):
        for copies in (True, False):
            spans = sorted(
                (span.start, span.end) for span in run.spans if span.device == device and (span.dst != device) == copies
            )
            assert all(end <= start + 1e-12 for (_, end), (start, _) in zip(spans, spans[1:]))
    assert run.seconds == max(span.end for span in run.spans)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["dgx-1v", "pcie-sockets", "pcie-switch", "nvlink-bridges", "dgx-a100"])
def test_what_is_left_out_of_the_simulation_is_never_waited_for(name, rule, monkeypatch):
    """A port out, behind one stream, and a port in, behind one receiver: runs are the same to the last bit."""
    topology, plan = load(name), algorithms.tree(8, range(16))
    sizes = [MB * (1 + chunk % 3) for chunk in range(16)]
    short = simulate(plan, topology, sizes, rule=rule)
    way = max(map(len, resources(topology).use.values()))
    contended = cost._contended(topology, False, RULES[rule].one_receive)
    assert max(len(passed.way) for passed in contended.values()) < way - 1

    def everything(topology, ideal_links, one_receive):
        use = resources(topology, ideal_links, one_receive).use
        return {pair: cost._Passed(w[0][0], w[1:], max(s for _, s in w)) for pair, w in use.items()}

    monkeypatch.setattr(cost, "_contended", everything)
    assert simulate(plan, topology, sizes, rule=rule) == short


def test_a_run_that_takes_longer_than_patience_is_broken_off():
    plan, sizes = algorithms.hierarchical(8, range(8)), [MB] * 8
    seconds = simulate(plan, load("dgx-1v"), sizes).seconds
    assert Simulation(plan, load("dgx-1v"), sizes, patience=seconds).timing().seconds == seconds
    broken_off = Simulation(plan, load("dgx-1v"), sizes, patience=seconds / 2).timing()
    assert broken_off.seconds == math.inf and len(broken_off.spans) < 8 * 14


def test_a_plan_for_another_machine_is_an_error():
    with pytest.raises(PlanError, match="4 devices and 1 chunks; DGX-1V"):
        simulate(algorithms.flat(4, [0]), load("dgx-1v"), [1])
    with pytest.raises(PlanError, match="2 sizes"):
        simulate(algorithms.flat(8, [0]), load("dgx-1v"), [1, 1])
    with pytest.raises(StrategyError, match="did you mean 'queue'"):
        simulate(algorithms.flat(8, [0]), load("dgx-1v"), [1], rule="queues")


# ---- the numbers that the model has to give ---------------------------------------------------------


@pytest.mark.parametrize("name", CUBE_MESHES)
def test_trees_reach_28_57_of_25_gb_a_link_on_every_numbering_of_the_cube_mesh(name):
    packing = pack(nominal(name))
    assert packing.rate == pytest.approx(28.57e9, rel=1e-3)
    assert packing.bound == pytest.approx(28.57e9, rel=1e-3)
    assert pack(nominal(name), ideal_links=True).bound == pytest.approx(85.7e9, rel=2e-3)


@pytest.mark.parametrize("ideal_links, limit", [(False, 18.18e9), (True, 50e9)])
def test_the_two_group_schedule_can_reach_18_and_with_ideal_links_50(ideal_links, limit):
    topology = nominal("dgx-1v")
    busy = Counter()
    for (src, dst), chunks in algorithms.hierarchical(8, range(8)).transfers().items():
        busy[(src, dst) if ideal_links else src] += chunks / 8 / topology.link(src, dst).bandwidth
    assert 1 / max(busy.values()) == pytest.approx(limit, rel=1e-3)


def test_two_groups_in_8_chunks_reach_12_and_four_trees_in_16_chunks_25_gb_a_second():
    topology, size = nominal("dgx-1v"), 100 * MB
    two_groups = simulate(algorithms.hierarchical(8, range(8)), topology, [size / 8] * 8).seconds
    assert size / two_groups == pytest.approx(12.0e9, rel=0.13)
    recipe = recipes.packed_trees(8, pack(topology), 16)
    trees = simulate(planner.in_simulated_order(recipe, topology, size).plan(), topology, recipe.sizes(size)).seconds
    assert size / trees == pytest.approx(25.0e9, rel=0.1)  # which of the best packings, SciPy decides


def test_the_bound_holds_for_every_candidate():
    for name in ("dgx-1p", "pcie-sockets", "nvlink-bridges", "p3.8xlarge"):
        topology = load(name)
        for recipe in recipes.candidates(topology):
            least = lower_bound(topology, MB)
            assert simulate(recipe.plan(), topology, recipe.shares(MB)).seconds > least * 0.999


def test_the_bound_of_like_links_is_that_of_reduce_scatter_and_all_gather():
    for count in (2, 3, 5, 8, 16):
        topology = subset(load("dgx-2"), range(count))
        speed = topology.link(0, 1).bandwidth
        assert pack(topology).bound == pytest.approx(speed * count / 2 / (count - 1), rel=2e-3)


def test_one_device_has_nothing_to_wait_for():
    topology = subset(load("dgx-2"), [3])
    assert lower_bound(topology, MB) == 0
    assert simulate(Plan(1, 1, ()), topology, [MB]).seconds == 0
