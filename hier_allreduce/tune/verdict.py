"""The table of measured steps, the candidate to use, and its strategy as a file."""

from __future__ import annotations

from statistics import median
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import yaml

from ..formatting import table
from .candidates import NOW, Candidate
from .runs import Run

LEAST_GAIN = 0.02  # of a step; less decides nothing
MOST_NOISE = 0.10  # of a step; with more, nothing is decided


class Row(NamedTuple):
    """All runs of one candidate: the seconds of a step in every run's windows; none, but a fault, if a run failed."""

    candidate: Candidate
    runs: List[List[float]]
    fault: str

    @property
    def windows(self) -> List[float]:
        """The seconds of a step in all windows of all runs."""
        return [seconds for run in self.runs for seconds in run]

    @property
    def step(self) -> float:
        """The median seconds of a step; infinite if none was measured."""
        return median(self.windows) if self.runs else float("inf")

    @property
    def noise(self) -> Optional[float]:
        """The difference between the medians of its runs, as a share of a step; None if it did not run twice."""
        medians = [median(run) for run in self.runs]
        return max(medians) / min(medians) - 1 if len(medians) > 1 else None


class Verdict(NamedTuple):
    """The rows of all candidates, the largest noise of them, the best candidate if it is worth a change, and advice."""

    rows: List[Row]
    noise: Optional[float]
    best: Optional[Row]
    advice: str


def verdict(runs: Sequence[Run]) -> Verdict:
    """Return the verdict on runs.

    The noise is the largest difference between two runs of one candidate. Candidates are as fast as the fastest within
    the noise, and within 2 %. Of these, a peer is kept, else the program as it is; a candidate of ours wins only alone.
    Above 10 % of noise, nothing is decided.
    """
    grouped: Dict[str, List[Run]] = {}
    for run in runs:
        grouped.setdefault(run.candidate.name, []).append(run)
    rows = []
    for same in grouped.values():
        fault = next((run.fault for run in same if run.fault), "")
        rows.append(Row(same[0].candidate, [] if fault else [run.seconds for run in same], fault))
    done = sorted((row for row in rows if row.runs), key=lambda row: row.step)
    if not done:
        return Verdict(rows, None, None, "no candidate was measured")
    noises = {row.candidate.name: row.noise for row in done if row.noise is not None}
    if not noises:
        return Verdict(rows, None, None, "nothing is decided: no candidate has run twice")
    noise, noisiest = max((share, name) for name, share in noises.items())
    if noise > MOST_NOISE:
        advice = f"nothing is decided: two runs of {noisiest} differ by {noise:.0%}"
        return Verdict(rows, noise, None, f"{advice}; end other programs on this machine, and give more --minutes")
    as_fast = [row for row in done if row.step * (1 - max(noise, LEAST_GAIN)) <= done[0].step]
    peer = next((row.candidate.name for row in as_fast if row.candidate.peer), None)
    if peer is not None:
        return Verdict(rows, noise, None, f"keep {peer}: no other candidate is faster by more than the noise and 2 %")
    if any(row.candidate.name == NOW for row in as_fast):
        advice = "keep the program as it is: no candidate is faster by more than the noise and 2 %"
        return Verdict(rows, noise, None, advice)
    return Verdict(rows, noise, done[0], f"use {done[0].candidate.name}")


def report(found: Verdict) -> str:
    """Return the table and the verdict as text."""
    base = next((row for row in found.rows if row.runs), None)
    lines: List[Sequence[str]] = [("", "step, ms", f"of {base.candidate.name}" if base else "", "noise")]
    for row in found.rows:
        if base is None or not row.runs:
            lines.append((row.candidate.name, row.fault.split(":")[0].split(" after")[0]))
            continue
        low, high = (f"{1e3 * limit:.4g}" for limit in (min(row.windows), max(row.windows)))
        step, noise = f"{1e3 * row.step:.4g} ({low}–{high})", "" if row.noise is None else f"{row.noise:.1%}"
        lines.append((row.candidate.name, step, f"{row.step / base.step:.2f}", noise, "← best" * (row is found.best)))
    faults = "".join(f"{row.candidate.name}: {row.fault}\n" for row in found.rows if row.fault)
    return f"{table(lines)}\n\n{faults}step: median (shortest–longest window); noise: between runs\n{found.advice}"


def as_json(found: Verdict) -> Dict[str, Any]:
    """Return the verdict as a JSON object: seconds, shares, names."""
    rows = []
    for row in found.rows:
        measured = {"step": row.step if row.runs else None, "noise": row.noise, "runs": row.runs, "fault": row.fault}
        rows.append({"candidate": row.candidate.name, "changes": row.candidate.changes, **measured})
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
