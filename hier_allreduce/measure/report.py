"""Measured copies as a table, as JSON, and as lines that name remedies."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

from ..formatting import duration, rate, table
from .links import Copies, Measured, repeated


def report(found: Measured) -> str:
    """Return the table of copies, and the lines about groups and ops."""
    on_cpu = any("cpu" in device.lower() for pair in found.pairs for device in pair)
    rows: List[Sequence[str]] = [("copy", "bits") if on_cpu else ("copy", "bits", "speed", "start")]
    for (src, dst), copies in found.pairs.items():
        bits = f"{copies.differ} B DIFFER" if copies.differ else "equal"
        cells = [copies.fault] if copies.fault else [bits, _figure(copies.rate, rate), _figure(copies.start, duration)]
        rows.append((f"{src} → {dst}", *(cells[:1] if on_cpu else cells)))
    lines = [table(rows)]
    if on_cpu:
        return lines[0] + "\nCPU devices share one memory: copies between them are no copies, and have no speed"
    for name, copies in found.groups.items():
        lines.append(f"out of {name} at once: {copies.fault or _figure(copies.rate, rate)}")
    lines.append(f"an op costs the host {_figure(found.dispatch, duration)}")
    return "\n".join(lines)


def _figure(figures: Sequence[float], shown: Any) -> str:
    value = repeated(figures)
    if value is not None:
        return str(shown(value))
    return "does not repeat: " + ", ".join(shown(max(figure, 0.0)) for figure in figures)


def faults(found: Measured) -> List[str]:
    """Return a line for every kind of broken copy, with its remedy."""
    hung = [f"{src} → {dst}" for (src, dst), copies in found.pairs.items() if copies.fault]
    wrong = [f"{src} → {dst}" for (src, dst), copies in found.pairs.items() if copies.differ]
    remedy = "turn off the IOMMU and ACS in the firmware, or update the driver; until then leave these GPUs out"
    lines = [f"copies did not end or failed ({', '.join(hung)}): {remedy}"] if hung else []
    return lines + ([f"bits differ after copies {', '.join(wrong)}: {remedy}"] if wrong else [])


def as_json(found: Measured) -> Dict[str, Any]:
    """Return the figures as a JSON object, in bytes/s and seconds; a figure that does not repeat is null."""

    def shown(copies: Copies) -> Dict[str, Any]:
        figures = {"rate": repeated(copies.rate), "start": repeated(copies.start)}
        return {"differ": copies.differ, **figures, "fault": copies.fault}

    return {
        "copies": [{"from": src, "to": dst, **shown(copies)} for (src, dst), copies in found.pairs.items()],
        "groups": {name: repeated(copies.rate) for name, copies in found.groups.items()},
        "dispatch": repeated(found.dispatch),
    }
