"""What pairs of runs say about two candidates, and that one is never told apart from itself."""

import json
import random
from math import exp
from pathlib import Path

import pytest

from hier_allreduce_tools.tune.candidates import Candidate
from hier_allreduce_tools.tune.ratio import LEAST_PAIRS, ratio, students_t
from hier_allreduce_tools.tune.run import Run

UNDER_LOAD = Path(__file__).with_name("same_program_under_load.json")


def runs_of(steps):
    """Return runs in rounds 1, 2, …, with these steps; None is a round without a run."""
    numbered = enumerate(steps, 1)
    return [Run(Candidate(), [step], number, Path("log")) for number, step in numbered if step]


def compared(one, other, comparisons=1):
    """Return the ratio of two lists of steps."""
    found = ratio(runs_of(one), runs_of(other), comparisons)
    assert found is not None
    return found


# published tables of Student's t, two-sided
@pytest.mark.parametrize(
    ("freedom", "level", "t"),
    [
        (1, 0.95, 12.706),
        (2, 0.95, 4.303),
        (5, 0.95, 2.571),
        (10, 0.95, 2.228),
        (30, 0.95, 2.042),
        (5, 0.99, 4.032),
        (6, 0.99, 3.707),
        (7, 0.99, 3.499),
        (11, 0.99, 3.106),
        (5, 0.998, 5.893),
        (10, 0.998, 4.144),
        (11, 0.999, 4.437),
    ],
)
def test_students_t_is_that_of_published_tables(freedom, level, t):
    assert students_t(freedom, level) == pytest.approx(t, abs=6e-4)


def test_the_ratio_is_that_of_all_pairs():
    slow = [100, 200, 100, 200, 150, 120]
    fast = [90, 180, 90, 180, 135, 108]
    assert compared(fast, slow) == pytest.approx((0.9, 0.9, 0.9, 6))
    assert compared([90, None, 90, None, 135], slow)[::3] == pytest.approx((0.9, 3))


@pytest.mark.parametrize(("comparisons", "t"), [(1, 4.032), (5, 5.893)])
def test_the_interval_is_students_for_all_comparisons_at_once(comparisons, t):
    # logarithms: mean 0.02, standard deviation 0.01
    logs = [0.01, 0.01, 0.02, 0.02, 0.03, 0.03]
    deviation = (4 * 0.01**2 / 5) ** 0.5
    found = compared([exp(value) for value in logs], [1] * 6, comparisons)
    half = t * deviation / 6**0.5
    assert found[:3] == pytest.approx((exp(0.02), exp(0.02 - half), exp(0.02 + half)), abs=1e-5)


def test_nothing_is_certain_below_six_pairs():
    five = compared([50] * 5, [100] * 5)
    assert five.middle == 0.5 and five.is_vague
    assert not (five.is_faster or five.is_slower or five.is_equal)
    assert compared([50] * 6, [100] * 6).is_faster


def test_without_a_pair_there_is_no_ratio():
    assert ratio(runs_of([1]), runs_of([None, 2])) is None


def test_a_small_difference_decides_nothing():
    found = compared([98.5] * 6, [100] * 6)
    assert found.is_equal and not found.is_faster


@pytest.mark.parametrize("number", range(10))
def test_the_same_program_under_load_is_not_told_apart(number):
    """Not after any number of rounds.

    The file has ten outputs of ``tune --only tree --minutes 30s --json``, in milliseconds, of a
    program that does not look at the candidate: a step has eight products of 400×400 matrices. Ten
    to twelve other processes shared the two cores.
    """
    steps = json.loads(UNDER_LOAD.read_text(encoding="utf-8"))[number]
    rounds = len(steps["one"])
    assert rounds > LEAST_PAIRS
    for last in range(LEAST_PAIRS, rounds + 1):
        found = compared(steps["one"][:last], steps["other"][:last])
        assert not found.is_faster and not found.is_slower


@pytest.mark.parametrize("pairs", [6, 8, 12])
def test_the_same_program_is_told_apart_in_one_of_a_hundred_times_at_most(pairs):
    """Load comes and goes: it slows runs by up to half, for several runs, and some far more."""
    chance = random.Random(pairs)
    told_apart = 0
    for _ in range(2000):
        load, steps = 0.0, []
        for _ in range(2 * pairs):
            load = max(0.0, 0.7 * load + chance.gauss(0.0, 0.1))
            outlier = chance.random() < 0.05
            steps.append((1 + load) * (1.5 if outlier else 1.0) * exp(chance.gauss(0.0, 0.02)))
        found = compared(steps[0::2], steps[1::2])
        told_apart += found.is_faster or found.is_slower
    assert told_apart <= 20
