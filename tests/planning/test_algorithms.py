"""Schedules: the check by counting, the interpreter, the algorithms, and functions of users."""

import itertools
import runpy
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hier_allreduce import Copy, HierAllreduceError, Reduce, check
from hier_allreduce.planning.algorithms import (
    BY_NAME,
    flat,
    hierarchical,
    schedules_of,
    tree,
)
from hier_allreduce.planning.plan import copies, reductions, root_of, run

RIGHT = (Reduce((1,), 0), Reduce((0,), 2), Copy(2, 0), Copy(2, 1))


def add(move, here, received):
    return sum(received, here)


def adds_up(schedule, towers):
    """Return whether numbers come to their sum everywhere, without a check by counting."""
    return (
        run(schedule, [1 << 8 * tower for tower in range(towers)], add)
        == [sum(1 << 8 * tower for tower in range(towers))] * towers
    )


# ---- the check -----------------------------------------------------------------------------------


def changed(number, *steps):
    return [*RIGHT[:number], *steps, *RIGHT[number + 1 :]]


@pytest.mark.parametrize(
    "steps, message",
    [
        (changed(1), r"in the end towers \[0, 1, 2\] do not have the sum of all towers"),
        (changed(3), r"in the end towers \[1\] do not have the sum of all towers"),
        (
            changed(1, Reduce((0, 1), 2)),
            r"in the end towers \[0, 1, 2\] do not have the sum",
        ),
        (changed(0, Copy(0, 1)), r"in the end towers \[0, 1, 2\] do not have the sum"),
        (changed(2, Copy(0, 1)), r"in the end towers \[0\] do not have the sum"),
        (changed(0), r"in the end towers \[0, 1, 2\] do not have the sum"),
        ([*RIGHT, Copy(0, 1)], "3 copies; 3 towers need 2"),
        ([*RIGHT, Copy(0, 2)], "3 copies; 3 towers need 2"),
        ([*RIGHT[:2], Copy(2, 0), Copy(0, 1), Copy(1, 0)], "3 copies; 3 towers need 2"),
        (changed(0, Reduce((0,), 0)), r"in the end towers \[0, 1, 2\] do not have the sum"),
        (changed(0, Reduce((), 0)), r"in the end towers \[0, 1, 2\] do not have the sum"),
        (changed(0, Reduce((3,), 0)), r"Reduce\(srcs=\(3,\), dst=0\): .* from 0 to 2"),
        (changed(3, Copy(2, -1)), r"Copy\(src=2, dst=-1\): .* from 0 to 2"),
        ([], r"in the end towers \[0, 1, 2\] do not have the sum"),
    ],
)
def test_check_names_the_step_and_the_fault(steps, message):
    with pytest.raises(HierAllreduceError, match=message):
        check(steps, 3)


def test_a_sum_over_nothing_is_left_out():
    assert check([*RIGHT[:2], Reduce((), 1), *RIGHT[2:]], 3) == RIGHT


def test_sums_come_before_copies_as_they_run():
    assert check([*RIGHT[2:], *RIGHT[:2]], 3) == RIGHT


def test_a_schedule_that_is_right_is_kept():
    check(iter(RIGHT), 3)
    assert check(iter(RIGHT), 3) == RIGHT
    assert root_of(RIGHT) == 2 and (reductions(RIGHT), copies(RIGHT)) == (RIGHT[:2], RIGHT[2:])
    assert run(RIGHT, [1, 10, 100], add) == [111, 111, 111]
    assert run(reductions(RIGHT), [1, 10, 100], add) == [None, None, 111]
    assert check([], 1) == () and root_of(()) == 0


@given(
    st.sampled_from(list(BY_NAME.values())),
    st.integers(2, 9),
    st.integers(0, 9),
    st.randoms(use_true_random=False),
)
def test_random_faults_in_schedules_are_found(algorithm, towers, chunk, rng):
    steps = list(algorithm(towers, chunk))
    number, fault = rng.randrange(len(steps)), rng.choice(["dropped", "twice", "elsewhere"])
    elsewhere = steps[number]._replace(dst=rng.randrange(towers))
    steps[number : number + 1] = {
        "dropped": [],
        "twice": [steps[number]] * 2,
        "elsewhere": [elsewhere],
    }[fault]
    try:
        check(steps, towers)
    except HierAllreduceError:
        return
    assert adds_up(steps, towers)  # another road to the sum


# ---- the algorithms ------------------------------------------------------------------------------


@pytest.mark.parametrize("towers", [1, 2, 3, 4, 5, 7, 8, 13, 16, 24])
@pytest.mark.parametrize("name", BY_NAME)
def test_algorithms_are_right_and_rotate_over_all_towers(name, towers):
    schedules = schedules_of(BY_NAME[name], towers)
    assert sorted(map(root_of, schedules)) == list(range(towers))
    for schedule in schedules:
        assert adds_up(schedule, towers)
        assert sum(len(step.srcs) for step in schedule) == 2 * (towers - 1)


def log2(towers):
    return (towers - 1).bit_length()


# communication steps, and the most chunks that one tower sends; for K = 4, 8 and 16 exactly these
COSTS = {
    "flat": lambda K: (2, K - 1),
    "tree": lambda K: (2 * log2(K), log2(K)),
    "hierarchical": lambda K: (4, (K + 1) // 2),
    "flat_hierarchical": lambda K: (3, (K + 1) // 2),
}


@pytest.mark.parametrize("towers", [2, 3, 4, 5, 6, 7, 8, 9, 16])
@pytest.mark.parametrize("name", BY_NAME)
def test_algorithms_cost_what_their_page_says(name, towers):
    for schedule in schedules_of(BY_NAME[name], towers):
        hops = [(src, step.dst) for step in schedule for src in step.srcs]
        arrival = [0] * towers  # communication steps after which a tower has its newest value
        for step in schedule:
            kept = arrival[step.dst] if isinstance(step, Reduce) else 0
            arrival[step.dst] = max(kept, *(arrival[src] + 1 for src in step.srcs), 0)
        found = max(arrival), max(Counter(src for src, _ in hops).values())
        most = COSTS[name](towers)
        if towers in (4, 8, 16):
            assert found == most, schedule
        assert found[0] <= most[0] and found[1] <= most[1], schedule


# tensorpack's allreduce_grads_hierarchical at K = 8, written by hand for variables 0 to 7:
# sums inside both quads | across | back | copies inside both quads
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
# caffe2 muji's Allreduce2, Allreduce4 and Allreduce8; its fallback adds up on GPU 0
MUJI = {
    2: "1→0 | 0→1",
    4: "1→0 3→2 | 2→0 | 0→2 | 0→1 2→3",
    8: "1→0 3→2 5→4 7→6 | 2→0 6→4 | 4→0 | 0→4 | 0→2 4→6 | 0→1 2→3 4→5 6→7",
}
FALLBACK = {3: "1,2→0 | 0→1 0→2", 6: "1,2,3,4,5→0 | 0→1 0→2 0→3 0→4 0→5"}


def in_rounds(schedule, expected):
    """Return the rounds of a schedule and of ``expected``, as sets.

    The schedule is cut into as many steps as each round of ``expected`` has.
    """
    steps = [f"{','.join(map(str, step.srcs))}→{step.dst}" for step in schedule]
    rounds, cut = [set(text.split()) for text in expected.split("|")], []
    for texts in rounds:
        cut.append(set(steps[: len(texts)]))
        steps = steps[len(texts) :]
    return cut + [set(steps)] * bool(steps), rounds


@pytest.mark.parametrize(
    "algorithm, devices, chunk, expected",
    [
        *(
            (hierarchical, 8, chunk, text)
            for chunk, text in enumerate(TENSORPACK.strip().splitlines())
        ),
        *((tree, devices, 0, text) for devices, text in MUJI.items()),
        *((flat, devices, 0, text) for devices, text in FALLBACK.items()),
    ],
)
def test_published_schedules(algorithm, devices, chunk, expected):
    ours, theirs = in_rounds(algorithm(devices, chunk), expected)
    assert ours == theirs


@pytest.mark.parametrize("towers", [2, 4, 8, 16])
def test_in_a_tree_neighbours_add_up_first_whatever_the_root_is(towers):
    for chunk in range(towers):
        for step in tree(towers, chunk)[: towers // 2]:
            assert isinstance(step, Reduce) and step.srcs == (step.dst ^ 1,)


@given(st.integers(2, 12), st.integers(0, 12), st.randoms(use_true_random=False))
def test_any_groups_add_up(devices, chunk, rng):
    order = rng.sample(range(devices), devices)
    cuts = sorted(rng.sample(range(1, devices), rng.randint(0, devices - 1)))
    groups = tuple(tuple(order[a:b]) for a, b in zip([0, *cuts], [*cuts, devices]))
    assert adds_up(check(hierarchical(devices, chunk, groups), devices), devices)


@pytest.mark.parametrize("groups", [((0, 1),), ((0, 1), (1, 2)), ((0, 1), (2, 3))])
def test_groups_that_miss_repeat_or_invent_towers_are_an_error(groups):
    with pytest.raises(
        HierAllreduceError,
        match=r"groups=.* each of towers 0 to 2 once",
    ):
        hierarchical(3, 0, groups)


# ---- functions of users --------------------------------------------------------------------------

EXAMPLES = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "algorithms.py"))


@pytest.mark.parametrize("algorithm", EXAMPLES["ALGORITHMS"])
def test_the_examples_are_right(algorithm):
    for devices in range(2, 17):
        if algorithm is EXAMPLES["two_quads"] and devices % 2:
            continue
        for schedule in schedules_of(algorithm, devices):
            assert adds_up(schedule, devices) and sum(len(step.srcs) for step in schedule) == 2 * (
                devices - 1
            )


def test_the_example_of_two_quads_is_hierarchical():
    assert [set(EXAMPLES["two_quads"](8, chunk)) for chunk in range(8)] == [
        set(hierarchical(8, c)) for c in range(8)
    ]


def fails(devices, chunk):
    raise KeyError("no such device")


def one_copy_short(devices, chunk):
    return flat(devices, chunk)[:-1]


@pytest.mark.parametrize(
    "algorithm, message",
    [
        (one_copy_short, r"^one_copy_short\(4, 0\): in the end towers \[3\] do not have the sum"),
        (fails, r"^fails\(4, 0\): KeyError: 'no such device'"),
        (lambda devices, chunk: None, r"^<lambda>\(4, 0\): TypeError: 'NoneType'"),
        (lambda devices, chunk: [(0, 1)], r"^<lambda>\(4, 0\): AttributeError: 'tuple'"),
        (
            lambda devices, chunk: [Reduce(1, 0)],  # type: ignore[arg-type]
            r"^<lambda>\(4, 0\): TypeError: 'int'",
        ),
        (lambda devices: [], r"\(4, 0\): TypeError: .*takes 1 positional argument"),
        (
            lambda devices, chunk: flat(devices + 1, chunk),
            r"^<lambda>\(4, 0\): Reduce.* from 0 to 3",
        ),
        (lambda towers, chunk, topology: [], r"<lambda>\(4, 0\): TypeError: .*missing 1"),
    ],
)
def test_a_wrong_function_is_an_error_that_names_it_and_the_chunk(algorithm, message):
    with pytest.raises(HierAllreduceError, match=message):
        schedules_of(algorithm, 4)


@pytest.mark.parametrize("move", [Reduce((1,), 0), Copy(0, 1)])
def test_a_generator_without_an_end_is_an_error(move):
    with pytest.raises(HierAllreduceError):
        check(itertools.chain([Reduce((1,), 0)], itertools.repeat(move)), 2)
