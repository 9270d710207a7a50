"""The table of measured steps, the candidate to use, and its strategy as a file."""

from __future__ import annotations

from math import inf
from statistics import median
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import yaml

from ..formatting import table
from ..planning.candidate import Candidate
from .candidates import NOW
from .runs import Run

LEAST_GAIN = 0.02  # of a step; less decides nothing
MOST_NOISE = 0.10  # of a step; with more, nothing is decided


class Row(NamedTuple):
    """One candidate: the seconds of a step in the windows of every run; none, but a fault, if a run failed.

    The step is the median of all windows. The noise is the difference between two runs' medians, as a share of a step.
    """

    candidate: Candidate
    runs: List[List[float]]
    fault: str
    step: float
    noise: Optional[float]


class Verdict(NamedTuple):
    """The rows of all candidates, the best one of ours if it is worth a change, and advice."""

    rows: List[Row]
    best: Optional[Row]
    advice: str


def _row(same: Sequence[Run]) -> Row:
    """Return the row of all runs of one candidate."""
    fault = next((run.fault for run in same if run.fault), "")
    if fault:
        return Row(same[0].candidate, [], fault, inf, None)
    medians = [median(run.seconds) for run in same]
    noise = max(medians) / min(medians) - 1 if len(same) > 1 else None
    step = median(seconds for run in same for seconds in run.seconds)
    return Row(same[0].candidate, [run.seconds for run in same], "", step, noise)


def verdict(runs: Sequence[Run]) -> Verdict:
    """Return the verdict on runs.

    The noise is the largest difference between two runs of one candidate. Candidates are as fast as the fastest within
    the noise, and within 2 %. Of these, a peer is kept, else the program as it is; a candidate of ours wins only alone.
    Above 10 % of noise, nothing is decided.
    """
    grouped: Dict[str, List[Run]] = {}
    for run in runs:
        grouped.setdefault(run.candidate.name, []).append(run)
    rows = [_row(same) for same in grouped.values()]
    done = sorted((row for row in rows if row.runs), key=lambda row: row.step)
    if not done:
        return Verdict(rows, None, "no candidate was measured")
    noises = {row.candidate.name: row.noise for row in done if row.noise is not None}
    if not noises:
        return Verdict(rows, None, "nothing is decided: no candidate has run twice")
    noise, noisiest = max((share, name) for name, share in noises.items())
    if noise > MOST_NOISE:
        advice = f"nothing is decided: two runs of {noisiest} differ by {noise:.0%}"
        return Verdict(
            rows, None, f"{advice}; end other programs on this machine, and give more --minutes"
        )
    as_fast = [row for row in done if row.step * (1 - max(noise, LEAST_GAIN)) <= done[0].step]
    peers = [row.candidate.name for row in as_fast if row.candidate.peer]
    if peers or any(row.candidate.name == NOW for row in as_fast):
        kept = peers[0] if peers else "the program as it is"
        return Verdict(
            rows, None, f"keep {kept}: no candidate is faster by more than the noise and 2 %"
        )
    return Verdict(rows, done[0], f"use {done[0].candidate.name}")


def report(found: Verdict) -> str:
    """Return the table and the verdict as text."""
    base = next((row for row in found.rows if row.runs), found.rows[0])
    lines: List[Sequence[str]] = [("", "step, ms", f"of {base.candidate.name}", "noise")]
    for row in found.rows:
        if row.fault:
            lines.append((row.candidate.name, "", "", "", row.fault))
            continue
        windows = sorted(1e3 * seconds for run in row.runs for seconds in run)
        step = f"{1e3 * row.step:.4g} ({windows[0]:.4g}–{windows[-1]:.4g})"
        noise = "?" if row.noise is None else f"{row.noise:.1%}"
        lines.append(
            (
                row.candidate.name,
                step,
                f"{row.step / base.step:.2f}",
                noise,
                "← best" * (row is found.best),
            )
        )
    return f"{table(lines)}\n\nstep: median (shortest–longest window); noise: between runs\n{found.advice}"


def as_json(found: Verdict) -> Dict[str, Any]:
    """Return the verdict as a JSON object: seconds, shares, names."""
    rows = []
    for candidate, runs, fault, step, noise in found.rows:
        measured = {"step": step if runs else None, "noise": noise, "runs": runs, "fault": fault}
        rows.append({"candidate": candidate.name, "changes": candidate.changes, **measured})
    return {
        "candidates": rows,
        "best": found.best and found.best.candidate.name,
        "advice": found.advice,
    }


def as_yaml(found: Verdict, kept: Dict[str, Any]) -> str:
    """Return the best candidate's strategy, with the ``kept`` fields of the program's, and the table as comments."""
    changes = found.best.candidate.changes if found.best else {}
    strategy = {**kept, **{name: value for name, value in changes.items() if value is not None}}
    comments = "".join(f"# {line}".rstrip() + "\n" for line in report(found).splitlines())
    return comments + yaml.safe_dump(strategy, sort_keys=False)
