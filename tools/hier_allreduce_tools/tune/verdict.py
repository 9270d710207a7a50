"""Which all-reduce to use: a row for each candidate, compared with one of them, and sentences."""

from __future__ import annotations

from math import exp, log
from statistics import mean
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from .candidates import AS_IT_IS, Candidate
from .ratio import LEAST_PAIRS, Ratio, ratio
from .run import Run


class Row(NamedTuple):
    """All runs of one candidate.

    Attributes:
        candidate: its all-reduce.
        runs: its runs; none if one of them has failed.
        fault: how a run has failed; an empty text if none has.
        ratio: its step divided by that of the first row with runs, in pairs of runs.
    """

    candidate: Candidate
    runs: List[Run]
    fault: str = ""
    ratio: Optional[Ratio] = None

    @property
    def step(self) -> float:
        """The geometric mean of its runs in seconds: two rows of it have their ratio."""
        return exp(mean(log(run.step) for run in self.runs))

    @property
    def title(self) -> str:
        """Its name in the table and in sentences."""
        return self.candidate.title


class Verdict(NamedTuple):
    """What all runs tell.

    Attributes:
        rows: one for each candidate.
        best: the row to use instead of the program as it is.
        sentences: what to do, and how each row compares.
        left_out: why candidates have no run, by their names.
        cost: the cost of the tenth step of the program as it is, in a line; empty without a trace.
    """

    rows: List[Row]
    best: Optional[Row]
    sentences: List[str]
    left_out: Dict[str, str]
    cost: str = ""


def verdict(runs: Sequence[Run], left_out: Optional[Dict[str, str]] = None) -> Verdict:
    """Return the verdict on the runs of all candidates."""
    runs_by_name: Dict[str, List[Run]] = {}
    for run in runs:
        runs_by_name.setdefault(run.candidate.name, []).append(run)
    rows = []
    for all_runs in runs_by_name.values():
        # The first run of all had nobody beside it, so that it counts if there is no other.
        counted = [run for run in all_runs if run.round] or all_runs
        # One fault excludes a candidate, because a program that hangs now and then is of no use.
        fault = next((run.fault for run in counted if run.fault), "")
        rows.append(Row(counted[0].candidate, [] if fault else counted, fault))

    measured = [row for row in rows if row.runs]
    for index, row in enumerate(rows):
        if row in measured[1:]:
            base = measured[0].runs
            # A run without a partner counts in no ratio, and so in no mean beside it.
            rounds = [run.round for run in base]
            paired = [run for run in row.runs if run.round in rounds]
            compared = ratio(paired, base, len(measured) - 1)
            rows[index] = row._replace(runs=paired or row.runs, ratio=compared)
    best, sentences = _conclusion([row for row in rows if row.runs])
    cost = next((run.facts.cost for run in runs if run.facts.cost), "")
    return Verdict(rows, best, sentences, left_out or {}, cost)


def _conclusion(measured: Sequence[Row]) -> Tuple[Optional[Row], List[str]]:
    """Return the best of the rows that have runs, and the sentences about all of them."""
    if not measured:
        return None, ["nothing was measured"]
    if len(measured) == 1:
        return None, [f"nothing to compare: only {measured[0].title} was measured"]
    base, compared = measured[0], measured[1:]
    sentences = [_beside(row, base) for row in compared]
    faster = [row for row in compared if row.ratio and row.ratio.is_faster]
    best = min(faster, key=lambda row: row.step, default=None)
    if not base.candidate.is_as_it_is:
        # The program as it is has failed, so that any row with runs is better, even the base.
        best = best or base
        return best, [f"use {best.title}: {AS_IT_IS} was not measured", *sentences]
    if best is not None:
        return best, [f"use {best.title}, and not {AS_IT_IS}", *sentences]

    # To keep a program is advice only where it is certain; otherwise time or quiet may still tell.
    ratios = [row.ratio for row in compared if row.ratio]
    why = "no other one is certainly faster; fewer other programs or more --minutes may tell"
    if all(ratio.pairs < LEAST_PAIRS for ratio in ratios):
        why = f"nothing is certain with fewer than {LEAST_PAIRS} pairs of runs; more --minutes"
    elif all(ratio.is_slower or ratio.is_equal for ratio in ratios):
        why = "no other one is faster"
    return None, [f"keep {AS_IT_IS}: {why}", *sentences]


def _beside(row: Row, base: Row) -> str:
    """Return a sentence about a row beside the one that all are compared with."""
    beside = row.ratio
    if beside is None:
        return f"{row.title} has no run in a round of {base.title}"
    low, middle, high = (100 * (end - 1) for end in (beside.low, beside.middle, beside.high))
    between = "unsure" if beside.is_vague else f"{low:+.1f}% to {high:+.1f}% time a step"
    # A wide interval still has one end that is certain, and only that end is said.
    if beside.is_faster:
        ends = f"{-high:.1f}% or more" if beside.is_vague else f"{-high:.1f}% to {-low:.1f}%"
        return f"{row.title} takes {-middle:.0f}% less time a step ({ends}) than {base.title}"
    if beside.is_slower:
        ends = f"{low:.1f}% or more" if beside.is_vague else f"{low:.1f}% to {high:.1f}%"
        return f"{row.title} takes {middle:.0f}% more time a step ({ends}) than {base.title}"
    if beside.is_equal:
        return f"{row.title} takes as long as {base.title} ({between})"
    if beside.pairs < LEAST_PAIRS:
        return f"{row.title}: nothing is certain with {beside.pairs} of {LEAST_PAIRS} pairs of runs"
    return f"{row.title}: no difference is certain ({between})"
