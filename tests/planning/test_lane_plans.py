"""Plans over lanes."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from hier_allreduce.errors import HierAllreduceError
from hier_allreduce.planning import (
    IDLE,
    Copy,
    Lanes,
    Plan,
    Reduce,
    best_plan,
    lane_bytes,
    on_lanes,
    run,
    simulate,
    verify,
)
from hier_allreduce.planning.algorithms import BY_NAME, flat, plan_of, tree, two_group
from hier_allreduce.planning.plan import Counting
from hier_allreduce.topology import load, subset, with_lanes

MB = 10**6


def links_of(devices, lanes):
    return tuple(tuple((src + dst) % lanes for dst in range(devices)) for src in range(devices))


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("algorithm", sorted(BY_NAME))
def test_every_plan_stays_right_on_lanes(devices, algorithm):
    plan = plan_of(BY_NAME[algorithm], devices, range(4))
    for count, exit_lane, on_tower in itertools.product((1, 2, 3), (False, True), (False, True)):
        if exit_lane and count == 1:
            continue
        for by_link in ((), links_of(devices, count - exit_lane)):
            lanes = Lanes(count, by_link, exit=exit_lane)
            done = verify(on_lanes(plan, lanes, on_tower))
            assert (done.devices, done.towers, done.lanes) == (devices * (1 + count), devices, count)
            if on_tower:
                assert done.roots == plan.roots


def test_each_links_copies_leave_from_a_lane_of_its_own():
    lanes = Lanes(2, links_of(4, 2))
    plan = on_lanes(plan_of(two_group, 4, range(4)), lanes)
    for (src, dst), _ in plan.transfers().items():
        towers = plan.tower(src), plan.tower(dst)
        if towers[0] != towers[1]:
            assert src == plan.lane(towers[0], lanes.of(0, *towers))


def test_only_exit_lanes_and_last_hops_bring_results():
    plan = on_lanes(plan_of(tree, 4, range(4)), Lanes(3, exit=True))
    into_towers = [step.src for step in plan.steps if isinstance(step, Copy) and step.dst < 4]
    assert set(into_towers) == {plan.lane(tower, 2) for tower in range(4)}


def test_the_plan_names_lanes():
    text = str(on_lanes(plan_of(flat, 2, [0]), Lanes(1)))
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
        ([Reduce(0, (1,), 2), Reduce(0, (2,), 0)], r"step 2.*device 1 misses \[0\]"),
        ([Reduce(0, (1,), 2), Reduce(0, (2, 1), 0), Copy(0, 0, 1)], r"step 2 of 3, .* counts \[1\] twice"),
        # the mean is taken of the last sum only
        (
            [Reduce(0, (0, 1), 2), Reduce(0, (0,), 3), Copy(0, 2, 0), Copy(0, 2, 1)],
            "step 3 of 4, .* device 0.0 is not where the last Reduce ends",
        ),
    ],
)
def test_a_wrong_plan_is_named(steps, message):
    with pytest.raises(HierAllreduceError, match=message):
        verify(Plan(4, 1, tuple(steps), lanes=1))


def test_devices_that_are_not_towers_with_lanes_are_refused():
    with pytest.raises(HierAllreduceError, match="5 devices are not towers with 1 lanes each"):
        verify(Plan(5, 1, (), lanes=1))
    with pytest.raises(HierAllreduceError, match="has 1 lanes already"):
        on_lanes(Plan(4, 1, (), lanes=1), Lanes(1))


def test_run_takes_and_returns_towers_only():
    plan = on_lanes(plan_of(flat, 2, [0, 1]), Lanes(1))
    results = run(plan, [[Counter({tower: 1})] * 2 for tower in range(2)], Counting())
    assert results == [[Counter({0: 1, 1: 1})] * 2] * 2


@pytest.mark.parametrize("count", [1, 2, 3])
def test_machines_of_any_size_have_a_plan_with_lanes(count):
    """One GPU has nothing to send, and two have no rings."""
    machine = subset(load("nvlink-bridges"), range(count))
    plan = verify(best_plan(machine, 1 << 20, lanes=2).plan)
    assert plan.towers == count


def test_lanes_leave_less_exposed_on_a_cube_mesh():
    """Gradients of ResNet-50."""
    machine, size = load("dgx-1v"), 102 * MB
    without, over = (best_plan(machine, size, lanes=lanes) for lanes in (0, 4))
    assert over.seconds <= 0.6 * without.seconds
    plan = verify(over.plan)
    assert plan.lanes == 4 and len(plan.buckets) == plan.chunks
    assert max(lane_bytes(plan, plan.sizes(size))) <= 4 * size


def test_the_host_decides_whether_lanes_pay():
    machine = load("dgx-1v")
    gains = []
    for dispatch in (0.0, 4e-6, 40e-6):
        slow = replace(machine, speeds=replace(machine.speeds, dispatch=dispatch))
        seconds = [best_plan(slow, 1000 * MB, IDLE, lanes=lanes).seconds for lanes in (0, 4)]
        gains.append(seconds[0] / seconds[1])
    assert gains[0] > 2.5 and 1.5 < gains[1] < gains[0] and gains[2] < 1.2


def test_lanes_of_a_gpu_share_its_links_and_memory():
    machine = load("dgx-1v")
    lanes = with_lanes(machine, 2)
    assert len(lanes) == 24 and lanes.devices[8:11] == ("GPU0 lane 0", "GPU0 lane 1", "GPU1 lane 0")
    shared = dict(lanes.shared)
    for src, dst in ((0, 1), (8, 10), (9, 1)):
        link = lanes.link(src, dst)
        assert shared["GPU0 → GPU1"] == link.bandwidth == machine.link(0, 1).bandwidth
        assert "GPU0 → GPU1" in link.through
    local = lanes.link(0, 8)
    assert local.bandwidth == shared["GPU0 memory"] == machine.speeds.memory / 2
    assert with_lanes(machine, 0) == machine


def test_two_lanes_send_over_two_links_and_share_one():
    machine = load("dgx-1v")
    size = [50 * MB] * 2
    towers = Plan(8, 2, (Copy(0, 0, 1), Copy(1, 0, 2)))
    lanes = Plan(24, 2, (Copy(0, 8, 1), Copy(1, 9, 2)), lanes=2)
    one_link = Plan(24, 2, (Copy(0, 8, 1), Copy(1, 9, 10)), lanes=2)
    alone = simulate(towers, machine, size).seconds
    assert simulate(lanes, machine, size).seconds == pytest.approx(alone / 2, rel=0.01)
    assert simulate(one_link, machine, size).seconds == pytest.approx(alone, rel=0.01)
