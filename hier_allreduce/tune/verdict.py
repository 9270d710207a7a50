"""The table of measured steps, the candidate to use, and its strategy as a file."""

from __future__ import annotations

from statistics import median
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import yaml

from ..formatting import table
from .candidates import NOW, Candidate
from .runs import Run

LEAST_GAIN = 0.02  # of a step; less decides nothing


class Row(NamedTuple):
    """All runs of one candidate: the seconds of a step in every window, or a fault."""

    candidate: Candidate
    seconds: List[float]
    fault: str

    @property
    def step(self) -> float:
        """The median seconds of a step; infinite if none was measured."""
        return median(self.seconds) if self.seconds else float("inf")


class Verdict(NamedTuple):
    """The rows of all candidates, the noise as a share of a step, and the best candidate, if it is worth a change."""

    rows: List[Row]
    noise: Optional[float]
    best: Optional[Row]
    advice: str


def verdict(runs: Sequence[Run]) -> Verdict:
    """Return the verdict on runs.

    A candidate of ours wins if its step is shorter than that of the program as it is, and than that of others, by more
    than the noise and 2 %. The noise is the difference between the first and the last run of the program as it is.
    """
    grouped: Dict[str, List[Run]] = {}
    for run in runs:
        grouped.setdefault(run.candidate.name, []).append(run)
    rows = []
    for same in grouped.values():
        fault = next((run.fault for run in same if run.fault), "")
        rows.append(Row(same[0].candidate, [] if fault else [s for run in same for s in run.seconds], fault))
    usual = [median(run.seconds) for run in grouped.get(NOW, []) if run.seconds]
    noise = abs(usual[-1] - usual[0]) / min(usual) if len(usual) > 1 else None
    needed = 1 - max(noise or 0.0, LEAST_GAIN)
    done = sorted((row for row in rows if row.seconds), key=lambda row: row.step)
    ours = next((row for row in done if row.candidate.is_ours), None)
    other = next((row for row in done if not row.candidate.is_ours), None)
    now = next((row.step for row in done if row.candidate.name == NOW), float("inf"))
    if ours is None:
        return Verdict(rows, noise, None, f"keep {other.candidate.name}" if other else "no candidate was measured")
    is_usual = ours.candidate.name == NOW or ours.step > now * needed
    if is_usual and (other is None or ours.step < other.step * (1 - LEAST_GAIN)):
        return Verdict(rows, noise, None, "keep the program as it is: no candidate is faster by more than the noise")
    if other is not None and ours.step > other.step * needed:
        return Verdict(rows, noise, None, f"{other.candidate.name} is as fast as ours: keep it")
    return Verdict(rows, noise, ours, f"use {ours.candidate.name}")


def report(found: Verdict) -> str:
    """Return the table and the verdict as text."""
    done = [row for row in found.rows if row.seconds]
    base = done[0] if done else None
    lines: List[Sequence[str]] = [("", "step, ms", f"of {base.candidate.name}" if base else "")]
    for row in found.rows:
        if base is None or not row.seconds:
            lines.append((row.candidate.name, row.fault.split(":")[0].split(" after")[0]))
            continue
        low, high = (f"{1e3 * limit:.4g}" for limit in (min(row.seconds), max(row.seconds)))
        mark = "  ← best" if row is found.best else ""
        step = f"{1e3 * row.step:.4g} ({low}–{high})"
        lines.append((row.candidate.name, step, f"{row.step / base.step:.2f}{mark}"))
    noise = "not known: the program as it is was measured once, or not at all"
    if found.noise is not None:
        noise = f"{found.noise:.1%} of a step, between the first and the last run of the program as it is"
    faults = "".join(f"{row.candidate.name}: {row.fault}\n" for row in found.rows if row.fault)
    return f"{table(lines)}\n\n{faults}noise: {noise}\n{found.advice}"


def as_json(found: Verdict) -> Dict[str, Any]:
    """Return the verdict as a JSON object: seconds, shares, names."""
    rows = []
    for (name, _, changes), seconds, fault in found.rows:
        step = median(seconds) if seconds else None
        rows.append({"candidate": name, "step": step, "windows": seconds, "fault": fault, "changes": changes})
    best = found.best.candidate.name if found.best else None
    return {"candidates": rows, "noise": found.noise, "best": best, "advice": found.advice}


def as_yaml(found: Verdict, kept: Dict[str, Any]) -> str:
    """Return the best candidate's strategy for ``strategy=``, with the table as comments.

    Args:
        found: a verdict with a best candidate.
        kept: fields of the program's strategy that no candidate changes.
    """
    changes = found.best.candidate.changes if found.best else {}
    strategy = {**kept, **{name: value for name, value in changes.items() if value is not None}}
    comments = "".join(f"# {line}".rstrip() + "\n" for line in report(found).splitlines())
    return comments + yaml.safe_dump(strategy, sort_keys=False)
