"""Which all-reduce to use: a row for each candidate, and a table."""

from __future__ import annotations

from statistics import median
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..text import amount, table
from .journal import CURRENT, Candidate, Run
from .ratio import Ratio, pairs_needed, ratio


class Row(NamedTuple):
    """All runs of one candidate."""

    candidate: Candidate
    runs: List[Run]  # none if one of them has failed
    fault: str = ""  # how one has failed
    ratio: Optional[Ratio] = None  # its step divided by that of the first row with runs

    @property
    def step(self) -> float:
        """The median of its runs in seconds."""
        return median(run.step for run in self.runs)


class Verdict(NamedTuple):
    """What all runs tell."""

    rows: List[Row]
    best: Optional[Row]  # the row to use instead of the program as it is
    advice: str  # what to do
    left_out: Dict[str, str]  # why candidates have no run, by their names
    missing_pairs: int  # of runs, until something may be certain


def verdict(runs: Sequence[Run], left_out: Dict[str, str]) -> Verdict:
    """Return the verdict on the runs of all candidates."""
    runs_by_name: Dict[str, List[Run]] = {}
    for run in runs:
        runs_by_name.setdefault(run.candidate.name, []).append(run)
    rows = []
    for all_runs in runs_by_name.values():
        # The first run of all had nobody beside it, so that it counts if there is no other.
        counted = [run for run in all_runs if run.round] or all_runs
        # One fault excludes a candidate, because a program that fails now and then is of no use.
        fault = next((run.fault for run in counted if run.fault), "")
        rows.append(Row(counted[0].candidate, [] if fault else counted, fault))
    measured = [row for row in rows if row.runs]
    for index, row in enumerate(rows):
        if row in measured[1:]:
            compared = ratio(row.runs, measured[0].runs, len(measured) - 1)
            rows[index] = row._replace(ratio=compared)
    measured = [row for row in rows if row.runs]
    rough = [row.ratio.pairs for row in measured if row.ratio and row.ratio.is_rough]
    missing = pairs_needed(len(measured) - 1) - min(rough) if rough else 0
    best, advice = _advice(rows, measured)
    return Verdict(rows, best, advice, left_out, missing)


def _advice(rows: Sequence[Row], measured: Sequence[Row]) -> Tuple[Optional[Row], str]:
    """Return the best of the rows that have runs, and what to do."""
    if not measured and len(rows) > 1 and all(row.fault.startswith("hung") for row in rows):
        return None, (
            "the program hangs with each of these, so it is not the all-reduce: look at the copies"
            " (hier-allreduce doctor --copies) and at the input"
        )
    if not measured:
        return None, "nothing was measured"
    if len(measured) == 1 and measured[0].candidate.is_current:
        return None, f"nothing to compare: only {CURRENT} was measured"
    faster = [row for row in measured if row.ratio and row.ratio.is_faster]
    best = min(faster, key=lambda row: row.step, default=None)
    if not measured[0].candidate.is_current:
        # The program as it is has failed, so that any row with runs is better, even the first.
        best = best or measured[0]
        return best, f"use {best.candidate.title}: {CURRENT} was not measured"
    if best is not None:
        return best, f"use {best.candidate.title}, and not {CURRENT}"
    why = "no other one is certainly faster"
    if all(row.ratio is None or row.ratio.is_rough for row in measured):
        pairs = pairs_needed(len(measured) - 1)
        why = f"nothing is certain with fewer than {pairs} pairs of runs"
    return None, f"keep {CURRENT}: {why}"


def report(verdict: Verdict) -> str:
    """Return the table, the candidates that are left out, and what to do as text."""
    lines: List[Sequence[str]] = [("", "step, ms", "ratio (interval)", "runs")]
    for row in verdict.rows:
        if not row.runs:
            lines.append((row.candidate.title, "", "", "", row.fault))
            continue
        steps = [1e3 * run.step for run in row.runs]
        step = f"{1e3 * row.step:.4g} ({min(steps):.4g}–{max(steps):.4g})"
        mark = "← use this" if row is verdict.best else ""
        lines.append((row.candidate.title, step, str(row.ratio or ""), str(len(row.runs)), mark))
    size = max((run.built.bytes for row in verdict.rows for run in row.runs), default=0)
    legend = (
        f"step: from one sum of {amount(size)} to the next, median (shortest–longest run); ratio:"
        " to the first row,\nmedian of all pairs of runs of a round; all intervals together hold"
        " with 99 %"
    )
    left_out = [f"not measured: {name}: {reason}" for name, reason in verdict.left_out.items()]
    paragraphs = [
        table(lines),
        legend if size else "",
        "\n".join(left_out),
        verdict.advice,
    ]
    return "\n\n".join(filter(None, paragraphs))
