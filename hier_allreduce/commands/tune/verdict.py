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
        runs: its runs with times; none if one of its runs has failed.
        lost: why some runs have no times; an empty text if all have.
        fault: how a run has failed; an empty text if none has.
        ratio: its step divided by that of the first row with runs, in pairs of runs.
    """

    candidate: Candidate
    runs: List[Run]
    lost: str = ""
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
        rows: of all candidates.
        best: the row to use instead of the program as it is.
        sentences: what to do, and how each row compares.
        left_out: why candidates have no run, by their names.
        cost: what the tenth step of the program as it is cost, in a line; empty if it has no trace.
    """

    rows: List[Row]
    best: Optional[Row]
    sentences: List[str]
    left_out: Dict[str, str]
    cost: str = ""


def verdict(runs: Sequence[Run], left_out: Optional[Dict[str, str]] = None) -> Verdict:
    """Return the verdict on the runs of all candidates."""
    rows = _compared(_rows(runs))
    best, sentences = _conclusion([row for row in rows if row.runs])
    cost = next((run.facts.cost for run in runs if run.facts.cost), "")
    return Verdict(rows, best, sentences, left_out or {}, cost)


def _conclusion(measured: Sequence[Row]) -> Tuple[Optional[Row], List[str]]:
    """Return the best of the rows that have runs, and the sentences about all of them."""
    if not measured:
        return None, ["nothing was measured"]
    if len(measured) == 1:
        return None, [f"nothing to compare: only {measured[0].title} was measured"]
    base, others = measured[0], measured[1:]
    best = _best(others)
    sentences = [_beside(row, base) for row in others]
    if not base.candidate.is_as_it_is:
        best = best or base
        sentences.insert(0, f"use {best.title}: {AS_IT_IS} was not measured")
    elif best is not None:
        sentences.insert(0, f"use {best.title}, and not {AS_IT_IS}")
    else:
        sentences.insert(0, f"keep {AS_IT_IS}: {_why_keep(others)}")
    return best, sentences


def _rows(runs: Sequence[Run]) -> List[Row]:
    """Return a row for each candidate, in the order of their first runs."""
    runs_by_name: Dict[str, List[Run]] = {}
    for run in runs:
        runs_by_name.setdefault(run.candidate.name, []).append(run)
    rows = []
    for same in runs_by_name.values():
        # the first run of all had nobody beside it, so it counts if there is no other
        same = [run for run in same if run.round] or same
        fault = next((run.fault for run in same if run.fault), "")
        lost = next((run.lost for run in same if run.lost), "")
        good = [run for run in same if run.seconds and not fault]
        rows.append(Row(same[0].candidate, good, lost, fault))
    return rows


def _compared(rows: Sequence[Row]) -> List[Row]:
    """Return the rows with their ratios to the first one that has runs."""
    measured = [row for row in rows if row.runs]
    compared = []
    for row in rows:
        if row in measured[1:]:
            base = measured[0].runs
            # a run without a partner counts in no ratio, and so in no mean beside it
            rounds = [run.round for run in base]
            pairs = [run for run in row.runs if run.round in rounds]
            compared_with_base = ratio(pairs, base, len(measured) - 1)
            row = row._replace(runs=pairs or row.runs, ratio=compared_with_base)
        compared.append(row)
    return compared


def _best(others: Sequence[Row]) -> Optional[Row]:
    """Return the fastest of those that are certainly faster."""
    faster = [row for row in others if row.ratio and row.ratio.is_faster]
    return min(faster, key=lambda row: row.step, default=None)


def _why_keep(others: Sequence[Row]) -> str:
    """Return why a program stays as it is."""
    ratios = [row.ratio for row in others if row.ratio]
    if all(each.pairs < LEAST_PAIRS for each in ratios):
        return f"nothing is certain with fewer than {LEAST_PAIRS} pairs of runs; more --minutes"
    if all(each.is_slower or each.is_equal for each in ratios):
        return "no other one is faster"
    return "no other one is certainly faster; fewer other programs or more --minutes may tell"


def _beside(row: Row, base: Row) -> str:
    """Return a sentence about a row beside the one that all are compared with."""
    beside = row.ratio
    if beside is None:
        return f"{row.title} has no run in a round of {base.title}"
    low, middle, high = (100 * (end - 1) for end in (beside.low, beside.middle, beside.high))
    between = "unsure" if beside.is_vague else f"{low:+.1f}% to {high:+.1f}% time a step"
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
