"""Which all-reduce to use: ratios of pairs of runs, and how certain they are.

Each candidate runs once in a turn, so that two runs of a turn have met the same other programs on
the machine. The logarithms of the ratios of such pairs have a mean and a spread, and these give an
interval by Student's t: with 95 % it has the true ratio. Ratios outside of it are excluded.
"""

from __future__ import annotations

from math import exp, log, sqrt
from statistics import mean, median, stdev
from typing import Dict, List, NamedTuple, Optional, Sequence

from ...planning.candidate import NOW, Candidate
from .run import Run
from .search import FIRST_LAST_TURN

LEAST_GAIN = 0.02  # of a step; less decides nothing
BUSY = 0.05  # half of an interval; with more, other programs run on the machine
WIDEST = 2.0  # high / low of an interval; one that is wider tells a person nothing
AS_IT_IS = "the program as it is"
# Student's t for 95 %, two-sided, by degrees of freedom
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


class Ratio(NamedTuple):
    """The step of one candidate divided by that of another; with 95 % it is within low to high."""

    middle: float
    low: float
    high: float

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
        return self.low >= 1 - LEAST_GAIN and self.is_not_slower

    @property
    def is_not_slower(self) -> bool:
        """Whether the first one is certainly not slower by more than 2 %."""
        return self.high <= 1 + LEAST_GAIN


class Row(NamedTuple):
    """All runs of one candidate, and its step beside the program as it is."""

    candidate: Candidate
    runs: List[Run]
    fault: str
    ratio: Optional[Ratio]

    @property
    def step(self) -> float:
        """The median of all windows, in seconds."""
        return median(seconds for run in self.runs for seconds in run.seconds)

    @property
    def title(self) -> str:
        """The name in sentences."""
        return AS_IT_IS if self.candidate.name == NOW else self.candidate.name


class Verdict(NamedTuple):
    """The rows of all candidates, the one to use instead of the program as it is, and sentences."""

    rows: List[Row]
    best: Optional[Row]
    sentences: List[str]
    left_out: Dict[str, str]


def ratio(first: Sequence[Run], second: Sequence[Run]) -> Optional[Ratio]:
    """Return the ratio of two candidates' steps; None without two pairs of runs.

    The last turns count: by the first two the finalists were chosen, and chance helped to choose
    them. With less than three pairs in the last turns, all pairs count.
    """
    steps = {run.turn: run.step for run in second}
    pairs = [(run.turn, log(run.step / steps[run.turn])) for run in first if run.turn in steps]
    logs = [value for turn, value in pairs if turn >= FIRST_LAST_TURN]
    if len(logs) < 3:
        logs = [value for _, value in pairs]
    if len(logs) < 2:
        return None
    freedom = min(len(logs) - 1, len(_T))
    middle = mean(logs)
    half = _T[freedom - 1] * stdev(logs) / sqrt(len(logs))
    return Ratio(exp(middle), exp(middle - half), exp(middle + half))


def verdict(runs: Sequence[Run], left_out: Optional[Dict[str, str]] = None) -> Verdict:
    """Return the verdict on the runs of all candidates."""
    rows = _rows(runs)
    left_out = left_out or {}
    measured = sorted((row for row in rows if row.runs), key=_speed)
    if not measured:
        return Verdict(rows, None, ["nothing was measured"], left_out)
    if len(measured) == 1:
        sentence = f"nothing to compare: only {measured[0].title} was measured"
        return Verdict(rows, None, [sentence], left_out)
    now = next((row for row in measured if row.candidate.name == NOW), None)
    fastest = measured[0]
    if now is None:
        best: Optional[Row] = fastest
        sentences = [f"use {fastest.title}: {AS_IT_IS} was not measured"]
    elif fastest.ratio and fastest.ratio.is_faster:
        best = fastest
        sentences = [f"use {fastest.title}: it takes {_less(fastest.ratio)} than {AS_IT_IS}"]
    else:
        best = None
        sentences = [_stays(now, measured)]
    ours = _fastest_of_ours(best or now, measured)
    if ours is not None:
        sentences += [_beside(ours, row) for row in measured if row.candidate.peer]
    if _is_busy(measured):
        sentences.append(
            "the runs are too few, or differ much: end other programs on this machine, or give more"
            " --minutes"
        )
    return Verdict(rows, best, sentences, left_out)


def _rows(runs: Sequence[Run]) -> List[Row]:
    """Return a row for each candidate, in the order of their first runs."""
    grouped: Dict[str, List[Run]] = {}
    for run in runs:
        grouped.setdefault(run.candidate.name, []).append(run)
    now = [run for run in grouped.get(NOW, []) if run.seconds]
    rows = []
    for same in grouped.values():
        fault = next((run.fault for run in same if run.fault), "")
        good = [] if fault else same
        rows.append(Row(same[0].candidate, good, fault, ratio(good, now)))
    return rows


def _speed(row: Row) -> float:
    """Return the ratio to the program as it is; a candidate without one comes last."""
    return row.ratio.middle if row.ratio else row.step * 1e9


def _fastest_of_ours(chosen: Optional[Row], measured: Sequence[Row]) -> Optional[Row]:
    """Return the candidate that is compared with the peers."""
    if chosen and not chosen.candidate.peer:
        return chosen
    return next((row for row in measured if not row.candidate.peer), None)


def _stays(now: Row, measured: Sequence[Row]) -> str:
    """Return the sentence of a program that stays as it is."""
    other = next(row for row in measured if row is not now)
    found = other.ratio
    if found is None:
        return "nothing is certain: no other candidate has run twice; give more --minutes"
    if found.is_slower:
        return f"use {AS_IT_IS}: {other.title}, the fastest other one, takes {_more(found)}"
    words = "no difference" if found.is_equal else "no difference is certain"
    # chance makes a candidate of few runs the fastest one; the next one may be measured better
    other = next((row for row in measured if row is not now and _is_clear(row)), other)
    between = _between(other.ratio or found)
    return f"{words}: leave {AS_IT_IS}; the fastest other one is {other.title} ({between})"


def _is_clear(row: Row) -> bool:
    """Return whether a candidate was measured well, and is not slower."""
    return row.ratio is not None and not row.ratio.is_vague and not row.ratio.is_slower


def _beside(ours: Row, peer: Row) -> str:
    """Return the sentence about ours and a peer."""
    found = ratio(ours.runs, peer.runs)
    who = f"ours ({ours.title})"
    if found is None:
        return f"{who} and {peer.title}: they ran together less than twice"
    if found.is_faster:
        return f"{who} takes {_less(found)} than {peer.title}"
    if found.is_not_slower:
        return f"{who} is not slower than {peer.title} ({_between(found)})"
    if found.is_slower:
        return f"{who} takes {_more(found)} than {peer.title}"
    return f"{who} and {peer.title}: no difference is certain ({_between(found)})"


def _less(found: Ratio) -> str:
    least = f"{1 - found.high:.1%}"
    ends = f"{least} or more" if found.is_vague else f"{least} to {1 - found.low:.1%}"
    return f"{1 - found.middle:.0%} less time a step ({ends})"


def _more(found: Ratio) -> str:
    least = f"{found.low - 1:.1%}"
    ends = f"{least} or more" if found.is_vague else f"{least} to {found.high - 1:.1%}"
    return f"{found.middle - 1:.0%} more time a step ({ends})"


def _between(found: Ratio) -> str:
    if found.is_vague:
        return "unsure"
    low = f"{found.low - 1:+.1%}"
    return f"{low} to {found.high - 1:+.1%} time a step"


def _is_busy(measured: Sequence[Row]) -> bool:
    """Return whether the intervals are wide, of the candidates that ran in the last turns."""
    often = [row for row in measured if len(row.runs) > FIRST_LAST_TURN] or measured
    ratios = [row.ratio for row in often if row.ratio and row.candidate.name != NOW]
    return bool(ratios) and median(log(found.high / found.low) / 2 for found in ratios) > BUSY
