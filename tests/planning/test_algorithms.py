"""The algorithms: right for every number of devices, and exactly the published schedules where there are any."""

import re

import numpy as np
import pytest
from helpers import strategies
from helpers.adding import Adding
from hypothesis import given

from hier_allreduce import Copy, HierAllreduceError, Reduce, verify
from hier_allreduce.planning import check_groups
from hier_allreduce.planning.algorithms import (
    BY_NAME,
    distinct_turns,
    flat,
    halves,
    in_groups,
    plan_of,
    tree,
    two_group,
)
from hier_allreduce.planning.plan import run

# tensorpack's allreduce_grads_hierarchical at K = 8, written out by hand for variables 0 to 7:
# add inside both quads | across | back | copy inside both quads
TENSORPACK = """
1,2,3→0 5,6,7→4 | 0→4 | 4→0 | 0→1 0→2 0→3 4→5 4→6 4→7
0,2,3→1 4,6,7→5 | 1→5 | 5→1 | 1→0 1→2 1→3 5→4 5→6 5→7
0,1,3→2 4,5,7→6 | 2→6 | 6→2 | 2→0 2→1 2→3 6→4 6→5 6→7
0,1,2→3 4,5,6→7 | 3→7 | 7→3 | 3→0 3→1 3→2 7→4 7→5 7→6
5,6,7→4 1,2,3→0 | 4→0 | 0→4 | 4→5 4→6 4→7 0→1 0→2 0→3
4,6,7→5 0,2,3→1 | 5→1 | 1→5 | 5→4 5→6 5→7 1→0 1→2 1→3
4,5,7→6 0,1,3→2 | 6→2 | 2→6 | 6→4 6→5 6→7 2→0 2→1 2→3
4,5,6→7 0,1,2→3 | 7→3 | 3→7 | 7→4 7→5 7→6 3→0 3→1 3→2
"""
# caffe2 muji's Allreduce2, Allreduce4 and Allreduce8
MUJI = {
    2: "1→0 | 0→1",
    4: "1→0 3→2 | 2→0 | 0→2 | 0→1 2→3",
    8: "1→0 3→2 5→4 7→6 | 2→0 6→4 | 4→0 | 0→4 | 0→2 4→6 | 0→1 2→3 4→5 6→7",
}


def in_rounds(plan, schedule):
    """A one-chunk plan in the rounds of ``schedule``, and that schedule, each round as a set of steps."""
    rounds = [set(text.split()) for text in schedule.split("|")]
    steps = [re.sub("[() ]", "", f"{s.srcs}→{s.dst}").replace(",→", "→") for s in plan.reduce_half().steps]
    steps += [f"{s.src}→{s.dst}" for s in plan.copy_half().steps]
    cut = []
    for expected in rounds:
        cut.append(set(steps[: len(expected)]))
        steps = steps[len(expected) :]
    return cut + [set(steps)] * bool(steps), rounds


@pytest.mark.parametrize("variable, schedule", enumerate(TENSORPACK.strip().splitlines()))
def test_two_groups_of_four_are_tensorpacks_schedule(variable, schedule):
    ours, theirs = in_rounds(plan_of(two_group, 8, [variable]), schedule)
    assert ours == theirs
    assert in_rounds(plan_of(two_group, 8, [variable + 8]), schedule)[0] == theirs


@pytest.mark.parametrize("devices", MUJI)
def test_tree_is_mujis_schedule(devices):
    ours, theirs = in_rounds(plan_of(tree, devices, [0]), MUJI[devices])
    assert ours == theirs


@pytest.mark.parametrize("turn", range(8))
def test_tree_adds_pairs_and_quads_at_every_turn(turn):
    """Whichever device the root is: 6 with 7 and 4 with 5, then these."""
    strides = [src ^ step.dst for step in plan_of(tree, 8, [turn]).reduce_half().steps for src in step.srcs]
    assert strides == [1, 1, 1, 1, 2, 2, 4]


@pytest.mark.parametrize("devices", [3, 5, 6, 7])
def test_flat_at_turn_zero_is_mujis_fallback(devices):
    plan = plan_of(flat, devices, [0, 0])
    assert plan.steps[0] == Reduce(0, tuple(range(1, devices)), 0)
    assert set(plan.steps[1:devices]) == {Copy(0, 0, device) for device in range(1, devices)}
    assert plan.roots == (0, 0)


@pytest.mark.parametrize(
    "turn, phases",
    [
        (1, ["1,2→0 4→3 6,7→5", "0,3→5", "5→0 5→3", "0→1 0→2 3→4 5→6 5→7"]),
        (2, ["0,2→1 3→4 5,7→6", "1,4→6", "6→1 6→4", "1→0 1→2 4→3 6→5 6→7"]),
        (5, ["0,2→1 3→4 5,7→6", "4,6→1", "1→4 1→6", "1→0 1→2 4→3 6→5 6→7"]),
    ],
)
def test_hierarchical_is_its_phases_in_order(turn, phases):
    plan = plan_of(in_groups(((0, 1, 2), (3, 4), (5, 6, 7))), 8, [turn])
    ours, by_hand = in_rounds(plan, "|".join(phases))
    assert ours == by_hand


def some_groupings(devices):
    everybody = range(devices)
    yield None
    yield (tuple(everybody),)
    yield tuple((device,) for device in everybody)
    yield tuple(group for group in (tuple(everybody[::2]), tuple(everybody[1::2])) if group)
    yield tuple(tuple(reversed(everybody[start : start + 3])) for start in range(0, devices, 3))


CASES = [
    (algorithm, devices, groups)
    for algorithm in BY_NAME
    for devices in range(1, 17)
    for groups in (some_groupings(devices) if algorithm == "hierarchical" else [None])
]


def function(algorithm, groups):
    return in_groups(groups) if groups else BY_NAME[algorithm]


def check(plan):
    """What every all-reduce plan has to be."""
    verify(plan)
    devices, chunks = plan.devices, plan.chunks
    assert sum(plan.transfers().values()) == 2 * (devices - 1) * chunks
    values = [[np.float32([device, 100 * chunk, 1]) for chunk in range(chunks)] for device in range(devices)]
    sums = [np.sum(column, axis=0) for column in zip(*values)]
    assert np.array_equal(run(plan, values, Adding()), [sums] * devices)


@pytest.mark.parametrize("algorithm, devices, groups", CASES)
def test_every_algorithm_reduces_for_any_devices(algorithm, devices, groups):
    check(plan_of(function(algorithm, groups), devices, range(devices + 3)))


@given(strategies.choices().flatmap(lambda c: strategies.st.tuples(strategies.st.just(c), strategies.turns)))
def test_every_grouping_and_every_turn_reduces(case):
    (devices, algorithm, groups), turns = case
    check(plan_of(function(algorithm, groups), devices, turns))


@pytest.mark.parametrize("algorithm, devices, groups", CASES)
def test_every_device_is_the_root_of_one_turn(algorithm, devices, groups):
    roots, turns = zip(*distinct_turns(function(algorithm, groups), devices))
    assert roots == tuple(sorted(turns)) == tuple(range(devices))
    plan = plan_of(function(algorithm, groups), devices, turns)
    assert plan.roots == tuple(range(devices))


@pytest.mark.parametrize(
    "devices, groups", [(1, ((0,),)), (2, ((0,), (1,))), (5, ((0, 1, 2), (3, 4))), (8, ((0, 1, 2, 3), (4, 5, 6, 7)))]
)
def test_two_groups_are_halves_of_neighbours(devices, groups):
    assert halves(devices) == groups


@pytest.mark.parametrize(
    "groups, message",
    [
        (((0, 1), (2,)), r"missing \[3\]"),
        (((0, 1), (1, 2, 3)), r"repeated \[1\]"),
        (((0, 1), (2, 4)), r"unknown \[4\], missing \[3\]"),
        (((0, 1), (2, -1)), r"unknown \[-1\], missing \[3\]"),
        (((0, True), (2, 3)), r"unknown \[True\], missing \[1\]"),
        (((0, 1), (), (2, 3)), r"an empty group"),
        ((), r"missing \[0, 1, 2, 3\]"),
        ((0, 1, 2, 3), r"groups must be tuples of tower numbers .*not \(0, 1, 2, 3\)"),
        (4, r"groups must be tuples of tower numbers .*not 4"),
        ("01", r"unknown \['0', '1'\]"),
    ],
)
def test_groups_that_do_not_fit_are_refused(groups, message):
    with pytest.raises(HierAllreduceError, match=message) as caught:
        check_groups(groups, 4)
    assert "groups=((0, 1), (2, 3))" in str(caught.value)
