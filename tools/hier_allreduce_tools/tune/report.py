"""The table of measured steps, the same as JSON, and the best strategy as a YAML file."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

import yaml

from hier_allreduce.formatting import table
from .candidates import AS_IT_IS
from .ratio import LEAST_PAIRS
from .run import TRACED
from .verdict import Verdict

WRITTEN_BY_TUNE = "# written by hier-allreduce tune, which may write it again"
_LEGEND = (
    "step: mean (shortest–longest run); ratio: to the first row, from all pairs of runs of a round;"
    "\nall intervals together hold with 99 %"
)


def report(verdict: Verdict) -> str:
    """Return the table, the candidates that are left out, and the verdict as text."""
    lines: List[Sequence[str]] = [("", "step, ms", "ratio (interval)", "runs")]
    for row in verdict.rows:
        if not row.runs:
            lines.append((row.title, "", "", "", row.fault))
            continue
        steps = [run.step for run in row.runs]
        step = f"{_ms(row.step)} ({_ms(min(steps))}–{_ms(max(steps))})"
        ratio = ""
        if row.ratio is not None:
            ends = f"{row.ratio.low:.3f}–{row.ratio.high:.3f}"
            ratio = f"{row.ratio.middle:.3f} ({'unsure' if row.ratio.is_vague else ends})"
        mark = "← use this" if row is verdict.best else ""
        lines.append((row.title, step, ratio, str(len(row.runs)), mark))
    paragraphs = [table(lines), _LEGEND]
    if verdict.cost:
        paragraphs.append(f"step {TRACED} of {AS_IT_IS}, traced: {verdict.cost}")

    # One reason may leave out many candidates, so that each has one line with their names.
    names_by_reason: Dict[str, List[str]] = {}
    for name, reason in verdict.left_out.items():
        names_by_reason.setdefault(reason, []).append(name)
    reasons = [f"  {', '.join(names)}: {reason}" for reason, names in names_by_reason.items()]
    if reasons:
        paragraphs.append("\n".join(["left out:", *reasons]))
    paragraphs.append("\n".join(verdict.sentences))
    return "\n\n".join(paragraphs)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


def as_json(verdict: Verdict) -> Dict[str, Any]:
    """Return the verdict as a JSON object: seconds, ratios, names.

    A run has the number of its round, and a step's seconds in windows.
    """
    candidates: List[Dict[str, Any]] = []
    for row in verdict.rows:
        # JSON has no infinite numbers, such as the upper end of an interval of few pairs.
        ratio = row.ratio if row.ratio and row.ratio.pairs >= LEAST_PAIRS else None
        candidates.append(
            {
                "candidate": row.candidate.name,
                "baseline": bool(row.candidate.baseline),
                "as_it_was": row.candidate.was,
                "changes": row.candidate.changes,
                "step": row.step if row.runs else None,
                "ratio": ratio and ratio._asdict(),
                "runs": [{"round": run.round, "windows": run.seconds} for run in row.runs],
                "fault": row.fault,
            }
        )
    return {
        "candidates": candidates,
        "left_out": verdict.left_out,
        "best": verdict.best and verdict.best.candidate.name,
        "sentences": verdict.sentences,
        "cost": verdict.cost,
    }


def as_yaml(verdict: Verdict, kept: Dict[str, Any]) -> str:
    """Return the best candidate's strategy, with ``kept`` fields, and the table as comments."""
    changes = verdict.best.candidate.changes if verdict.best else {}
    # None is the default of a field, and a file says no more than it must.
    fields = {field: choice for field, choice in {**kept, **changes}.items() if choice is not None}
    comments = [WRITTEN_BY_TUNE, *(f"# {line}".rstrip() for line in report(verdict).splitlines())]
    return "\n".join([*comments, yaml.safe_dump(fields, sort_keys=False)])
