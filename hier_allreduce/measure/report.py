"""Measured copies as a table, as JSON, and as lines that name remedies."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

from ..formatting import duration, rate, table
from .links import Measured, repeated


def report(found: Measured) -> str:
    """Return the table of copies, and the lines about groups and ops."""
    rows: List[Sequence[str]] = [("copy", "bits", "speed", "start")]
    for (src, dst), copies in found.pairs.items():
        bits = f"{copies.differ} B DIFFER" if copies.differ else "equal"
        figures = (
            () if copies.fault else (_figure(copies.rate, rate), _figure(copies.start, duration))
        )
        rows.append((f"{src} → {dst}", copies.fault or bits, *figures))
    if any("cpu" in device for pair in found.pairs for device in pair):
        bits_only = table(row[:2] for row in rows)
        return f"{bits_only}\nCPU devices share one memory: copies between them are no copies, and have no speed"
    lines = [table(rows)]
    for name, copies in found.groups.items():
        lines.append(f"out of {name} at once: {copies.fault or _figure(copies.rate, rate)}")
    lines.append(f"an op costs the host {found.op.fault or _figure(found.op.start, duration)}")
    return "\n".join(lines)


def _figure(figures: Sequence[float], shown: Any) -> str:
    value = repeated(figures)
    both = ", ".join(shown(max(figure, 0.0)) for figure in figures)
    return f"does not repeat: {both}" if value is None else str(shown(value))


def faults(found: Measured) -> List[str]:
    """Return a line for every kind of broken copy, with its remedy."""
    hung = [f"{src} → {dst}" for (src, dst), copies in found.pairs.items() if copies.fault]
    wrong = [f"{src} → {dst}" for (src, dst), copies in found.pairs.items() if copies.differ]
    remedy = "turn off the IOMMU and ACS in the firmware, or update the driver; until then leave these GPUs out"
    lines = [f"copies did not end or failed ({', '.join(hung)}): {remedy}"] if hung else []
    return lines + ([f"bits differ after copies {', '.join(wrong)}: {remedy}"] if wrong else [])


def as_json(found: Measured) -> Dict[str, Any]:
    """Return the figures as a JSON object, in bytes/s and seconds, both measurements of every figure."""
    groups = {name: copies._asdict() for name, copies in found.groups.items()}
    return {
        "copies": [copies._asdict() for copies in found.pairs.values()],
        "groups": groups,
        "op": found.op.start,
    }
