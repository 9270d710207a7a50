"""The table of measured steps, the same as JSON, and the best strategy as a YAML file."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

import yaml

from ...formatting import table
from .candidates import AS_IT_IS
from .ratio import LEAST_PAIRS
from .run import TRACED
from .verdict import Row, Verdict

WRITTEN_BY_TUNE = "# written by hier-allreduce tune, which may write it again"
_LEGEND = (
    "step: mean (shortest–longest run); ratio: to the first row, from all pairs of runs of a round;"
    "\nall intervals together hold with 99 %"
)


def report(verdict: Verdict) -> str:
    """Return the table, the candidates that are left out, and the verdict as text."""
    lines: List[Sequence[str]] = [("", "step, ms", "ratio (interval)", "runs")]
    lines += [_line(row, row is verdict.best) for row in verdict.rows]
    parts = [table(lines), _LEGEND]
    if verdict.cost:
        parts.append(f"step {TRACED} of {AS_IT_IS}, traced: {verdict.cost}")
    if verdict.left_out:
        parts.append("left out:\n" + _reasons(verdict.left_out))
    parts.append("\n".join(verdict.sentences))
    return "\n\n".join(parts)


def _reasons(left_out: Dict[str, str]) -> str:
    """Return a line for each reason why candidates are left out."""
    names_by_reason: Dict[str, List[str]] = {}
    for name, why in left_out.items():
        names_by_reason.setdefault(why, []).append(name)
    return "\n".join(f"  {', '.join(names)}: {why}" for why, names in names_by_reason.items())


def _line(row: Row, is_best: bool) -> Sequence[str]:
    """Return the cells of a candidate."""
    if not row.runs:
        return (row.title, "", "", "", row.fault or row.lost)
    steps = [run.step for run in row.runs]
    step = f"{_ms(row.step)} ({_ms(min(steps))}–{_ms(max(steps))})"
    ratio = ""
    if row.ratio is not None:
        ends = f"{row.ratio.low:.3f}–{row.ratio.high:.3f}"
        ratio = f"{row.ratio.middle:.3f} ({'unsure' if row.ratio.is_vague else ends})"
    mark = "← use this" if is_best else ""
    return (row.title, step, ratio, str(len(row.runs)), mark or row.lost)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


def as_json(verdict: Verdict) -> Dict[str, Any]:
    """Return the verdict as a JSON object: seconds, ratios, names."""
    return {
        "candidates": [_as_object(row) for row in verdict.rows],
        "left_out": verdict.left_out,
        "best": verdict.best and verdict.best.candidate.name,
        "sentences": verdict.sentences,
        "cost": verdict.cost,
    }


def _as_object(row: Row) -> Dict[str, Any]:
    """Return a row: its runs have the number of the round and a step's seconds in windows."""
    candidate = row.candidate
    ratio = None
    if row.ratio is not None and row.ratio.pairs >= LEAST_PAIRS:  # JSON has no infinite ends
        ratio = row.ratio._asdict()
    return {
        "candidate": candidate.name,
        "peer": bool(candidate.peer),
        "as_it_was": candidate.was,
        "changes": candidate.changes,
        "step": row.step if row.runs else None,
        "ratio": ratio,
        "runs": [{"round": run.round, "windows": run.seconds} for run in row.runs],
        "lost": row.lost,
        "fault": row.fault,
    }


def as_yaml(verdict: Verdict, kept: Dict[str, Any]) -> str:
    """Return the best candidate's strategy, with ``kept`` fields, and the table as comments."""
    changes = verdict.best.candidate.changes if verdict.best else {}
    given = {name: value for name, value in changes.items() if value is not None}
    comments = [WRITTEN_BY_TUNE, *(f"# {line}".rstrip() for line in report(verdict).splitlines())]
    values = yaml.safe_dump({**kept, **given}, sort_keys=False)
    return "\n".join([*comments, values])
