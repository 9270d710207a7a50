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
    faults: Dict[str, str]  # how candidates have failed, by their names
    best: Optional[Row]  # the row to use instead of the program as it is
    advice: str  # what to do
    missing_pairs: int  # of runs, until something may be certain


def verdict(runs: Sequence[Run]) -> Verdict:
    """Return the verdict on the runs of all candidates."""
    # One fault excludes a candidate, because a program that fails now and then is of no use.
    faults = {run.candidate: run.fault for run in runs if run.fault}
    runs_by_name: Dict[str, List[Run]] = {}
    for run in runs:
        if run.candidate not in faults:
            runs_by_name.setdefault(run.candidate, []).append(run)
    counted: List[List[Run]] = []
    for own in runs_by_name.values():
        # The first run of all had nobody beside it, so that it counts if there is no other.
        counted.append([run for run in own if run.round] or own)
    counted.sort(key=lambda own: own[0].candidate != CURRENT)
    comparisons = max(1, len(counted) - 1)
    rows = [row_of(own, counted[0], comparisons) for own in counted]
    rough = [row.pairs for row in rows[1:] if row.is_rough]
    missing = pairs_needed(comparisons) - min(rough) if rough else 0
    best, advice = _advice(rows, faults)
    return Verdict(rows, faults, best, advice, missing)


def _advice(rows: Sequence[Row], faults: Dict[str, str]) -> Tuple[Optional[Row], str]:
    """Return the best of the rows, and what to do."""
    if not rows:
        if not faults:
            return None, "no run ended: more --minutes"
        all_hang = len(faults) > 1 and all(fault.startswith("hung") for fault in faults.values())
        return None, _ALL_HANG if all_hang else _NOTHING
    faster = [row for row in rows if row.is_faster]
    best = min(faster, key=lambda row: row.step, default=None)
    if best is not None or CURRENT in faults:
        best = best or rows[0]  # any is better than a program that fails, even the first
        return best, f"use {best.name}"
    if len(rows) == 1:
        return None, f"nothing to compare: only {rows[0].name} was measured"
    return None, f"keep {CURRENT}: no other one is certainly faster"


def report(verdict: Verdict, left_out: Dict[str, str]) -> str:
    """Return the table, the candidates without a row, each with its reason, and what to do."""
    lines: List[Sequence[str]] = [("", "step, ms", "ratio (interval)", "runs")]
    for row in verdict.rows:
        steps = [1e3 * run.step for run in row.runs]
        step = f"{1e3 * row.step:.4g} ({min(steps):.4g}–{max(steps):.4g})"
        ends = "rough" if row.is_rough else f"{row.low:.3f}–{row.high:.3f}"
        ratio = "1" if row is verdict.rows[0] else f"{row.ratio:.3f} ({ends})"
        lines.append((row.name, step, ratio, str(len(row.runs))))
    paragraphs = []
    if verdict.rows:
        size = max(run.bytes for row in verdict.rows for run in row.runs)
        legend = (
            f"step: from one sum of {size / 1e6:.4g} MB to the next, median (shortest–longest run);"
            " ratio: to the first row,\nmedian of all pairs of runs of a round; all intervals"
            " together hold with 99 %"
        )
        paragraphs += [table(lines), legend]
    reasons = {**left_out, **verdict.faults}
    not_measured = [f"not measured: {name}: {reason}" for name, reason in reasons.items()]
    return "\n\n".join(filter(None, [*paragraphs, "\n".join(not_measured), verdict.advice]))
