"""Which all-reduce to use: a row for each candidate, and a table."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..text import table
from .candidates import CURRENT
from .journal import Run
from .ratio import Row, pairs_needed, row_of
from .run import STEPS

_ALL_HANG = (
    "the program hangs with each of these, so it is not the all-reduce: look at the copies"
    " (hier-allreduce doctor --copies) and at the input"
)
_NOTHING = f"""\
nothing was measured: the program has to make {STEPS} steps with an all-reduce of hier_allreduce:
    grads = hier_allreduce.allreduce_grads(grads, devices)      # or TowerOptimizer, on towers
    tf.distribute.MirroredStrategy(cross_device_ops=HierarchicalAllReduce())
    launch_train_with_config(config, HierarchicalTrainer(GPUS))      # tensorpack
Its Python needs the PYTHONPATH of tune: no -E, -I, -S, and PYTHONPATH=.:$PYTHONPATH adds to it."""


class Verdict(NamedTuple):
    """What all runs tell."""

    rows: List[Row]  # of candidates of which no run has failed
    faults: Dict[str, str]  # how candidates that ran have failed, or "", by their names
    best: Optional[Row]  # the row to use instead of the program as it is
    advice: str  # what to do
    missing_pairs: int  # of runs, until something may be certain


def verdict(runs: Sequence[Run]) -> Verdict:
    """Return the verdict on the runs of all candidates."""
    # One fault excludes a candidate, because a program that fails now and then is of no use.
    # It runs no more, so that its last run is that one.
    faults = {run.candidate: run.fault for run in runs}
    # The first run of all is the program's, so that it has the first row, if any.
    runs_by_name: Dict[str, List[Run]] = {}
    for run in runs:
        if not faults[run.candidate]:
            runs_by_name.setdefault(run.candidate, []).append(run)
    measured = list(runs_by_name.values())
    comparisons = max(1, len(measured) - 1)
    rows = [row_of(own, measured[0], comparisons) for own in measured]
    needed = pairs_needed(comparisons)
    missing = max([0, *(needed - row.pairs for row in rows[1:])])
    return Verdict(rows, faults, *_advice(rows, faults), missing)


def _advice(rows: Sequence[Row], faults: Dict[str, str]) -> Tuple[Optional[Row], str]:
    """Return the best of the rows, and what to do."""
    if not rows:
        if not faults:
            return None, "no run ended: more --minutes"
        all_hang = len(faults) > 1 and all(fault.startswith("hung") for fault in faults.values())
        return None, _ALL_HANG if all_hang else _NOTHING
    best = min((row for row in rows if row.is_faster), key=lambda row: row.step, default=None)
    # Any is better than a program that fails, even the first.
    if best is None and faults[CURRENT]:
        best = rows[0]
    if best is None:
        return None, f"keep {CURRENT}: no other one is certainly faster"
    return best, f"use {best.name}"


def report(verdict: Verdict, left_out: Dict[str, str]) -> str:
    """Return the table, the candidates without a row, each with its reason, and what to do."""
    paragraphs = []
    if verdict.rows:
        lines: List[Sequence[str]] = [("", "step, ms", "ratio (interval)", "runs")]
        for row in verdict.rows:
            ends = "rough" if row.is_rough else f"{row.low:.3f}–{row.high:.3f}"
            ratio = f"{row.ratio:.3f} ({ends})" if lines[1:] else "1"
            lines.append((row.name, f"{1e3 * row.step:.4g}", ratio, str(len(row.runs))))
        size = verdict.rows[0].runs[0].bytes
        legend = (
            f"step: from one sum of {size / 1e6:.4g} MB to the next, median of all runs; ratio: to"
            " the first row,\nmedian of all pairs of runs of a round; all intervals together hold"
            " with 99 %"
        )
        paragraphs = [table(lines), legend]
    reasons = {**left_out, **verdict.faults}
    not_measured = [f"not measured: {name}: {why}" for name, why in reasons.items() if why]
    return "\n\n".join(filter(None, [*paragraphs, "\n".join(not_measured), verdict.advice]))
