"""How much faster one candidate is than another, and how certain that is.

::

    round            1      2      3      4      5      6
    NcclAllReduce   96 ms  91     99     97    140     95
    as it is        80 ms  75     83     80    121     80      a busy machine slows a pair
    logarithm     0.18   0.19   0.18   0.19   0.15   0.17  ──► mean, spread ──► interval

Two runs of a round have met the same other programs on the machine. Every pair of runs counts. The
logarithms of their ratios have a mean and a spread, which give an interval by Student's t. If there
are n comparisons, each interval misses the true ratio with a probability of 1 % / n at most
(Bonferroni). So all of them together hold with 99 %.
"""

from __future__ import annotations

from math import atan, cos, exp, inf, log, pi, sin, sqrt
from statistics import mean, stdev
from typing import NamedTuple, Optional, Sequence

from .run import Run

MISSED = 0.01  # probability that one of all intervals misses its ratio
LEAST_PAIRS = 6  # with fewer pairs of runs nothing is certain
LEAST_GAIN = 0.02  # share of a step: a smaller gain decides nothing
WIDEST = 2.0  # high / low of an interval: a wider one tells a person nothing


class Ratio(NamedTuple):
    """The step of one candidate divided by that of another.

    Attributes:
        middle: the geometric mean of all pairs.
        low: the lower end of its interval; 0 with fewer than six pairs.
        high: the upper end; infinite with fewer than six pairs.
        pairs: the number of pairs of runs.
    """

    middle: float
    low: float
    high: float
    pairs: int

    @property
    def is_vague(self) -> bool:
        """Whether the interval is too wide to be shown."""
        return self.high > WIDEST * self.low

    @property
    def is_faster(self) -> bool:
        """Whether the first one is certainly faster, by enough to matter."""
        return self.high < 1 and self.middle <= 1 - LEAST_GAIN

    @property
    def is_slower(self) -> bool:
        """Whether the first one is certainly slower, by enough to matter."""
        return self.low > 1 and self.middle >= 1 + LEAST_GAIN

    @property
    def is_equal(self) -> bool:
        """Whether the difference is certainly at most 2 %."""
        return self.low >= 1 - LEAST_GAIN and self.high <= 1 + LEAST_GAIN


def ratio(runs: Sequence[Run], base: Sequence[Run], comparisons: int = 1) -> Optional[Ratio]:
    """Return the ratio of two candidates' steps; None without a pair of runs.

    Args:
        runs: runs of one candidate.
        base: runs of the other one, by which it is divided.
        comparisons: how many ratios are looked at together.
    """
    base_step_by_round = {run.round: run.step for run in base}
    paired = [run for run in runs if run.round in base_step_by_round]
    if not paired:
        return None
    # Times vary by factors, and the logarithm of a ratio is the negative one of its inverse.
    logs = [log(run.step / base_step_by_round[run.round]) for run in paired]
    middle = mean(logs)
    # So few pairs may agree by chance, and their spread would then promise too much.
    if len(paired) < LEAST_PAIRS:
        return Ratio(exp(middle), 0.0, inf, len(paired))
    t = students_t(len(paired) - 1, 1 - MISSED / comparisons)
    half = t * stdev(logs) / sqrt(len(paired))
    return Ratio(exp(middle), exp(middle - half), exp(middle + half), len(paired))


def students_t(freedom: int, level: float) -> float:
    """Return the t between whose negative and itself a value is with a probability of ``level``.

    >>> round(students_t(5, 0.95), 3), round(students_t(10, 0.99), 3)
    (2.571, 3.169)
    """
    # It is searched by halving an interval, because the probability has no inverse in closed form.
    low, high = 0.0, 1.0
    while _probability(high, freedom) < level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if _probability(middle, freedom) < level:
            low = middle
        else:
            high = middle
    return high


def _probability(t: float, freedom: int) -> float:
    """Return how probable a value between -t and t is: the finite sums for whole degrees."""
    angle = atan(t / sqrt(freedom))
    is_odd = freedom % 2
    term = cos(angle) if is_odd else 1.0
    total = 0.0
    for power in range(1, freedom // 2 + 1):
        total += term
        term *= cos(angle) ** 2 * (2 * power - 1 + is_odd) / (2 * power + is_odd)
    if is_odd:
        return 2 / pi * (angle + sin(angle) * total)
    return sin(angle) * total
