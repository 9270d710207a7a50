"""Schedules: how many buckets, and by which recipe, leave least exposed after a backward pass."""

from dataclasses import replace

import pytest

from hier_allreduce.planning import (
    Backward,
    Schedule,
    choose,
    choose_for_training,
    choose_schedule,
    exposed_seconds,
    lane_bytes,
    operands,
    verify,
)
from hier_allreduce.planning.kept_recipes import recipe_to_values
from hier_allreduce.planning.planner import algorithms_for
from hier_allreduce.planning.schedule import _from_values, _to_values, exposed_by_algorithm, one_bucket
from hier_allreduce.planning.simulator import host_seconds, lower_bound, predicted_seconds, simulate
from hier_allreduce.topology import load, with_lanes

MB = 10**6


def best_exposed(machine, size, algorithm, backward):
    schedules = [Schedule(count, choose(machine, size // count, algorithm).recipe, 0.0) for count in (1, 4, 8)]
    return min(exposed_seconds(schedule, machine, size, backward) for schedule in schedules)


@pytest.mark.parametrize("name, most", [("dgx-1v", 0.5), ("dgx-a100", 1.0)])
def test_lanes_leave_at_most_half_of_what_is_left_without_and_never_more_on_a_switch(name, most):
    """Gradients of ResNet-50."""
    machine, backward = load(name), Backward(10e-3)
    choice = choose_for_training(machine, 102 * MB, lanes=4, backward=backward)
    best = min(best_exposed(machine, 102 * MB, algorithm, backward) for algorithm in (None, "two-group"))
    assert choice.exposed <= most * best * 1.001
    plan = verify(choice.plan())
    assert sum(choice.sizes()) == 102 * MB and len(plan.buckets) == plan.chunks
    assert (max(plan.buckets) + 1) == choice.schedule.buckets
    assert max(lane_bytes(plan, choice.sizes())) <= 4 * 102 * MB


def test_the_targets_for_an_idle_cube_mesh():
    """Times without lanes over those with four."""
    machine = load("dgx-1v")
    gains = {
        size: choose(machine, size).seconds / choose(machine, size, lanes=4).seconds for size in (MB, 10 * MB, 100 * MB)
    }
    assert gains[MB] == 1.0 and gains[10 * MB] > 1.2 and gains[100 * MB] > 2.0


def test_a_measured_time_of_the_host_for_each_op_limits_lanes():
    machine = load("dgx-1v")
    slow = replace(machine, speeds=replace(machine.speeds, dispatch=5e-6))
    choice = choose(machine, 100 * MB, lanes=4)
    plan = choice.plan()
    ops = 2 * sum(plan.transfers().values()) + sum(added > 1 for added in operands(plan))
    assert host_seconds(plan, slow.speeds) == pytest.approx(ops * 5e-6)
    assert choice.recipe.lanes.count == 4
    assert choose(slow, 100 * MB, lanes=4).recipe.lanes.count == 0


def test_without_a_backlog_there_is_one_bucket_and_the_fastest_plan():
    machine = load("pcie-sockets")
    schedule = choose_schedule(machine, 100 * MB, backward=Backward(0.0))
    assert (schedule.buckets, schedule.recipe) == (1, choose(machine, 100 * MB).recipe)
    assert choose_for_training(machine, 5 * MB).schedule.buckets == 1  # too few bytes for two


def test_a_schedule_of_one_algorithm_uses_no_other():
    for algorithm in ("tree", "ring"):
        assert choose_schedule(load("p3.8xlarge"), 100 * MB, algorithm).recipe.algorithm == algorithm


def test_one_bucket_of_a_schedule_is_timed_and_bounded_alone():
    machine = load("p3.8xlarge")
    choice = choose_for_training(machine, 100 * MB)
    buckets, alone = choice.schedule.buckets, one_bucket(choice, machine)
    assert buckets > 1 and alone.recipe == choice.recipe and alone.size == 100 * MB // buckets
    assert alone.seconds == predicted_seconds(alone.plan(), machine, alone.sizes())
    assert alone.bound == pytest.approx(lower_bound(machine, alone.size))


def test_every_algorithm_leaves_at_least_as_much_exposed_as_the_chosen_one():
    machine = load("p3.8xlarge")
    choice = choose_for_training(machine, 100 * MB)
    exposed = exposed_by_algorithm(choice, machine)
    assert set(exposed) == set(algorithms_for(machine))
    assert exposed[choice.recipe.algorithm] == pytest.approx(choice.exposed)
    assert min(exposed[name] for name in ("two-group", "tree", "flat")) >= choice.exposed * 0.999


def test_kept_schedules_come_back_equal_and_others_are_refused():
    machine = load("p3.8xlarge")
    schedule = choose_schedule(machine, 40 * MB)
    values = _to_values(schedule)
    assert values["recipe"] == recipe_to_values(schedule.recipe)
    assert _from_values(values, machine) == schedule
    for wrong in ({"buckets": 3}, {"recipe": {}}):
        with pytest.raises((ValueError, TypeError, KeyError)):
            _from_values({**values, **wrong}, machine)


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


def test_two_lanes_send_over_two_links_at_the_same_time_and_share_one():
    from hier_allreduce.planning import Copy, Plan

    machine = load("dgx-1v")
    size = [50 * MB] * 2
    towers = Plan(8, 2, (Copy(0, 0, 1), Copy(1, 0, 2)))
    lanes = Plan(24, 2, (Copy(0, 8, 1), Copy(1, 9, 2)), lanes=2)
    one_link = Plan(24, 2, (Copy(0, 8, 1), Copy(1, 9, 10)), lanes=2)
    alone = simulate(towers, machine, size).seconds
    assert simulate(lanes, machine, size).seconds == pytest.approx(alone / 2, rel=0.01)
    assert simulate(one_link, machine, size).seconds == pytest.approx(alone, rel=0.01)
