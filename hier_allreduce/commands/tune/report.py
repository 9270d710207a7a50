"""The table of measured steps, the same as JSON, and the best strategy as a YAML file."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

import yaml

from ...formatting import table
from ...planning.candidate import NOW
from .verdict import Row, Verdict


def report(found: Verdict) -> str:
    """Return the table, the candidates that are left out, and the verdict as text."""
    lines: List[Sequence[str]] = [("", "step, ms", "ratio (95 %)", "runs")]
    lines += [_line(row, row is found.best) for row in found.rows]
    parts = [
        table(lines),
        "step: median (shortest–longest run); ratio: to the program as it is, in pairs of runs",
    ]
    if found.left_out:
        parts.append("left out:\n" + _reasons(found.left_out))
    parts.append("\n".join(found.sentences))
    return "\n\n".join(parts)


def _reasons(left_out: Dict[str, str]) -> str:
    """Return a line for each reason why candidates are left out."""
    names: Dict[str, List[str]] = {}
    for name, why in left_out.items():
        names.setdefault(why, []).append(name)
    return "\n".join(f"  {', '.join(same)}: {why}" for why, same in names.items())


def _line(row: Row, is_best: bool) -> Sequence[str]:
    """Return the cells of a candidate."""
    if row.fault:
        return (row.title, "", "", "", row.fault)
    steps = [run.step for run in row.runs]
    step = f"{_ms(row.step)} ({_ms(min(steps))}–{_ms(max(steps))})"
    ratio = ""
    if row.ratio and row.candidate.name != NOW:
        middle, low, high = row.ratio
        ends = "unsure" if row.ratio.is_vague else f"{low:.3f}–{high:.3f}"
        ratio = f"{middle:.3f} ({ends})"
    mark = "← use this" if is_best else ""
    return (row.title, step, ratio, str(len(row.runs)), mark)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


def as_json(found: Verdict) -> Dict[str, Any]:
    """Return the verdict as a JSON object: seconds, ratios, names."""
    rows = [_as_object(row) for row in found.rows]
    return {
        "candidates": rows,
        "left_out": found.left_out,
        "best": found.best and found.best.candidate.name,
        "sentences": found.sentences,
    }


def _as_object(row: Row) -> Dict[str, Any]:
    """Return a row: its runs have the number of the turn and the seconds of a step in windows."""
    candidate = row.candidate
    return {
        "candidate": candidate.name,
        "peer": bool(candidate.peer),
        "changes": candidate.changes,
        "step": row.step if row.runs else None,
        "ratio": list(row.ratio) if row.ratio else None,
        "runs": [{"turn": run.turn, "windows": run.seconds} for run in row.runs],
        "fault": row.fault,
    }


def as_yaml(found: Verdict, kept: Dict[str, Any]) -> str:
    """Return the best candidate's strategy, with ``kept`` fields, and the table as comments."""
    changes = found.best.candidate.changes if found.best else {}
    given = {name: value for name, value in changes.items() if value is not None}
    comments = [f"# {line}".rstrip() for line in report(found).splitlines()]
    values = yaml.safe_dump({**kept, **given}, sort_keys=False)
    return "\n".join([*comments, values])
