"""What pairs of runs say about two candidates, and that one is never told apart from itself."""

import json
import random
from math import exp, inf, isnan
from pathlib import Path

import pytest

from hier_allreduce_tools.tune.journal import Run
from hier_allreduce_tools.tune.ratio import pairs_needed, row_of

UNDER_LOAD = Path(__file__).with_name("same_program_under_load.json")


def runs_of(steps):
    """Return runs in rounds 1, 2, …, with these steps; None is a round without a run."""
    return [Run(round, "tree", step, 1.0) for round, step in enumerate(steps, 1) if step]


def compared(one, other, comparisons=1):
    """Return the row of the first of two lists of steps."""
    return row_of(runs_of(one), runs_of(other), comparisons)


def test_the_ratio_is_the_median_of_all_pairs():
    slow = [100, 200, 100, 200, 150, 120, 100, 100]
    fast = [80, 180, 90, 180, 135, 108, 95, 90]
    assert compared(fast, slow)[1:] == pytest.approx((0.9, 0.8, 0.95, 8))
    few = compared([90, None, 90, None, 135], slow)
    assert few[1:] == pytest.approx((0.9, 0.0, inf, 3)) and few.is_rough


def binomials(size):
    """Return a row of Pascal's triangle."""
    row = [1]
    for _ in range(size):
        row = [left + right for left, right in zip([0, *row], [*row, 0])]
    return row


@pytest.mark.parametrize("comparisons", [1, 2, 3, 6])
@pytest.mark.parametrize("pairs", [5, 8, 9, 10, 12, 25, 60])
def test_the_interval_covers_as_the_binomial_distribution_says(pairs, comparisons):
    found = compared([100 + pair for pair in range(pairs)], [100] * pairs, comparisons)
    if pairs < pairs_needed(comparisons):
        assert found.is_rough
        return
    # the k-th smallest of the ratios 1.00, 1.01, …: it misses if fewer than k are below the truth
    k = round(100 * found.low) - 99
    missed = [2 * sum(binomials(pairs)[:end]) / 2**pairs for end in (k, k + 1)]
    assert missed[0] <= 0.01 / comparisons < missed[1]
    assert found.high == pytest.approx(1 + (pairs - k) / 100)


def test_a_small_difference_decides_nothing():
    assert compared([97.5] * 8, [100] * 8).is_faster
    assert not compared([98.5] * 8, [100] * 8).is_faster


def test_without_a_pair_nothing_is_told_apart():
    found = compared([1], [None, 2])
    assert found.pairs == 0 and isnan(found.ratio) and found.is_rough and not found.is_faster


def is_told_apart(found):
    return found.is_faster or (found.low > 1.02 and not found.is_rough)


@pytest.mark.parametrize("number", range(10))
def test_the_same_program_under_load_is_not_told_apart(number):
    """Not after any number of rounds.

    The file has ten outputs of ``tune --only tree --minutes 30s --json``, in milliseconds, of a
    program that does not look at the candidate: a step has eight products of 400×400 matrices. Ten
    to twelve other processes shared the two cores.
    """
    steps = json.loads(UNDER_LOAD.read_text(encoding="utf-8"))[number]
    for last in range(1, len(steps["one"]) + 1):
        assert not is_told_apart(compared(steps["one"][:last], steps["other"][:last]))


def loads_that_come_and_go(chance):
    load = 0.0
    while True:
        load = max(0.0, 0.7 * load + chance.gauss(0.0, 0.1))
        outlier = chance.random() < 0.05
        yield (1 + load) * (1.5 if outlier else 1.0)


def load_of_every_other_pair_of_runs(chance):
    while True:
        yield from (1.0, 1.1, 1.1, 1.0)


@pytest.mark.parametrize("loads", [loads_that_come_and_go, load_of_every_other_pair_of_runs])
@pytest.mark.parametrize("pairs", [8, 12, 30])
def test_the_same_program_is_told_apart_in_one_of_a_hundred_times_at_most(pairs, loads):
    chance = random.Random(pairs)
    told_apart = 0
    for _ in range(2000):
        load = loads(chance)
        rounds = []
        for _ in range(pairs):
            pair = [next(load) * exp(chance.gauss(0.0, 0.02)) for _ in range(2)]
            rounds.append(chance.sample(pair, 2))  # a round's order is shuffled
        told_apart += is_told_apart(compared(*zip(*rounds)))
    assert told_apart <= 20
