"""How much faster one candidate is than another, and how certain that is.

::

    round                  1      2      3      4      5      6      7      8
    NcclAllReduce         96 ms  91     99     97    140     95     98     94
    as it is              80 ms  75     83     80    121     80     81     77   a busy machine
    ratio               0.83   0.82   0.84   0.82   0.86   0.84   0.83   0.82   slows a pair
                       └── sorted: the smallest and the largest are the ends ──┘

The order of a round is shuffled, so that of two equal candidates each is the slower one of a pair
with probability 1/2, whatever else the machine does. So the true ratio is below all of n ratios, or
above all, with a probability of 2 / 2ⁿ: their smallest and largest enclose it in 99.2 % of all
cases if n is 8. With more pairs the ends are the k-th ones: by the binomial distribution, k is as
large as it may be. Of n comparisons, each may miss with 1 % / n (Bonferroni), so that all hold
together with 99 %. Nothing is assumed about how times are distributed.
"""

from __future__ import annotations

from math import inf, nan
from statistics import median
from typing import NamedTuple, Sequence

from .journal import Run

MISSED = 100  # one in so many times, some interval misses its ratio
LEAST_GAIN = 0.02  # share of a step: a smaller gain decides nothing


class Row(NamedTuple):
    """The runs of a candidate, and its step divided by that of the first row."""

    runs: Sequence[Run]
    ratio: float  # the median of all pairs; nan without a pair
    low: float  # the ends of its interval; 0 and infinite with too few pairs
    high: float
    pairs: int

    @property
    def name(self) -> str:
        """The candidate."""
        return self.runs[0].candidate

    @property
    def step(self) -> float:
        """The median of its runs in seconds."""
        return median(run.step for run in self.runs)

    @property
    def is_rough(self) -> bool:
        """Whether there are too few pairs for an interval."""
        return self.high == inf

    @property
    def is_faster(self) -> bool:
        """Whether it is certainly faster than the first row, by enough to matter."""
        return self.high < 1 and self.ratio <= 1 - LEAST_GAIN


def row_of(runs: Sequence[Run], base: Sequence[Run], comparisons: int = 1) -> Row:
    """Return the row of a candidate, with its ratio in the rounds in which ``base`` ran too.

    ``comparisons``: how many ratios are looked at together.
    """
    base_step_by_round = {run.round: run.step for run in base}
    paired = [run for run in runs if run.round in base_step_by_round]
    ratios = sorted(run.step / base_step_by_round[run.round] for run in paired)
    rank = _rank_of_ends(len(ratios), comparisons)
    # A rank of 0 takes the ends that stand before and behind all ratios.
    low = [0.0, *ratios][rank]
    high = [*ratios, inf][-1 - rank]
    return Row(runs, median(ratios or [nan]), low, high, len(ratios))


def pairs_needed(comparisons: int) -> int:
    """Return the number of pairs from which on something may be certain.

    >>> [pairs_needed(comparisons) for comparisons in (1, 2, 5)]
    [8, 9, 10]
    """
    return (2 * MISSED * comparisons - 1).bit_length()


def _rank_of_ends(pairs: int, comparisons: int) -> int:
    """Return k, if the k-th smallest and the k-th largest of all ratios are the ends; 0 for none.

    >>> [_rank_of_ends(pairs, 1) for pairs in (7, 8, 11, 12, 40)]
    [0, 1, 1, 2, 12]
    """
    # Count in whole numbers in how many of 2ⁿ equally likely cases fewer than k + 1 ratios are
    # below the true one.
    rank, ways, missed = 0, 1, 1
    while 2 * missed * MISSED * comparisons <= 2**pairs:
        rank += 1
        ways = ways * (pairs - rank + 1) // rank
        missed += ways
    return rank
