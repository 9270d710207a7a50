"""Plans over lanes."""

import itertools
from collections import Counter

import pytest

from hier_allreduce.errors import PlanError
from hier_allreduce.planning import ALGORITHMS, Copy, Lanes, Plan, Reduce, choose, on_lanes, run, verify
from hier_allreduce.planning.plan import Counting
from hier_allreduce.topology import load, subset


def links_of(devices, lanes):
    return tuple(tuple((src + dst) % lanes for dst in range(devices)) for src in range(devices))


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_every_plan_stays_right_on_lanes(devices, algorithm):
    plan = ALGORITHMS[algorithm](devices, range(4))
    for count, exit_lane, on_tower in itertools.product((1, 2, 3), (False, True), (False, True)):
        if exit_lane and count == 1:
            continue
        for by_link in ((), links_of(devices, count - exit_lane)):
            lanes = Lanes(count, by_link, exit=exit_lane)
            done = verify(on_lanes(plan, lanes, on_tower))
            assert (done.devices, done.towers, done.lanes) == (devices * (1 + count), devices, count)
            if on_tower:
                assert done.roots == plan.roots


def test_copies_between_towers_leave_from_lanes_and_each_link_from_its_own():
    lanes = Lanes(2, links_of(4, 2))
    plan = on_lanes(ALGORITHMS["hierarchical"](4, range(4)), lanes)
    for (src, dst), _ in plan.transfers().items():
        towers = plan.tower(src), plan.tower(dst)
        if towers[0] != towers[1]:
            assert src == plan.lane(towers[0], lanes.of(0, *towers))


def test_only_the_exit_lane_and_last_hops_bring_results_to_towers():
    plan = on_lanes(ALGORITHMS["tree"](4, range(4)), Lanes(3, exit=True))
    into_towers = [step.src for step in plan.steps if isinstance(step, Copy) and step.dst < 4]
    assert set(into_towers) == {plan.lane(tower, 2) for tower in range(4)}


def test_the_plan_names_lanes():
    text = str(on_lanes(ALGORITHMS["flat"](2, [0]), Lanes(1)))
    assert text.splitlines() == [
        "flat: 2 devices with 1 lane each, 1 chunk",
        "c0  1→1.0  enter",
        "c0  0,1.0→0.0  sum",
        "c0  0.0→1,0  copy",
    ]


@pytest.mark.parametrize(
    "steps, message",
    [
        ([Reduce(0, (2,), 0)], "takes something from 0.0, a lane that is empty"),
        ([Reduce(0, (1,), 2), Reduce(0, (2,), 0)], r"device 1, chunk 0: missing \[0\]"),
        ([Reduce(0, (1,), 2), Reduce(0, (2, 1), 0), Copy(0, 0, 1)], r"counted twice \[1\]"),
    ],
)
def test_a_wrong_plan_is_named(steps, message):
    with pytest.raises(PlanError, match=message):
        verify(Plan(4, 1, tuple(steps), lanes=1))


def test_devices_that_are_not_towers_with_lanes_are_refused():
    with pytest.raises(PlanError, match="5 devices are not towers with 1 lanes each"):
        verify(Plan(5, 1, (), lanes=1))
    with pytest.raises(PlanError, match="has 1 lanes already"):
        on_lanes(Plan(4, 1, (), lanes=1), Lanes(1))


def test_run_takes_and_returns_towers_only():
    plan = on_lanes(ALGORITHMS["flat"](2, [0, 1]), Lanes(1))
    results = run(plan, [[Counter({tower: 1})] * 2 for tower in range(2)], Counting())
    assert results == [[Counter({0: 1, 1: 1})] * 2] * 2


@pytest.mark.parametrize("count", [1, 2, 3])
def test_machines_of_any_size_have_a_plan_with_lanes(count):
    """One GPU has nothing to send, and two have no rings."""
    machine = subset(load("nvlink-bridges"), range(count))
    plan = verify(choose(machine, 1 << 20, lanes=2).recipe.plan())
    assert plan.towers == count
