"""What was measured, next to what is assumed without a measurement, as text."""

from __future__ import annotations

from typing import Dict, List, Tuple

import numpy as np

from ..formatting import count, duration, percent, table
from ..sampling import Quartiles
from ..topology import GB, Topology
from .machine import named
from .measurement import Measurement
from .sharing import ways_of
from .timer import Pair


def report_text(measurement: Measurement, assumed: Topology) -> str:
    """Return tables of the links, of the other speeds, and of what copies share."""
    parts = [
        _matrix(measurement, assumed),
        _speeds(measurement, assumed),
        _shared(measurement, assumed),
        _patterns(measurement),
    ]
    return "\n\n".join(part for part in parts if part)


def _matrix(measurement: Measurement, assumed: Topology) -> str:
    labels = assumed.devices
    rows = [("GB/s from, to", *labels)]
    for src, label in enumerate(labels):
        cells = [_gb(measurement.links[src, dst].rate) if src != dst else "" for dst in range(len(labels))]
        rows.append((label, *cells))
    return table(rows, all_right=True)


def _speeds(measurement: Measurement, assumed: Topology) -> str:
    rates = measurement.both_ways()
    by_kind: Dict[str, List[Pair]] = {}
    for src, dst in sorted(rates):
        by_kind.setdefault(assumed.kinds[src][dst], []).append((src, dst))
    rows: List[Tuple[str, ...]] = [("", "measured", "quartiles", "assumed")]
    for kind, pairs in by_kind.items():
        slowest, fastest = min(rates[pair] for pair in pairs), max(rates[pair] for pair in pairs)
        spread = max(measurement.links[pair].spread for pair in pairs)
        measured = _gb(slowest) if _gb(slowest) == _gb(fastest) else f"{_gb(slowest)} to {_gb(fastest)}"
        without = _gb(assumed.link(*pairs[0]).bandwidth)
        rows.append((f"links {kind}, GB/s", measured, f"{percent(spread)} apart", without))
    speeds, starts, sums = assumed.speeds, measurement.starts, measurement.sums
    for name, seconds, expected in (
        ("start of a copy", starts.start, speeds.copy_latency),
        ("host, at an arrival", starts.arrival, speeds.arrival),
        ("host, for an op", starts.dispatch, speeds.dispatch),
    ):
        rows.append((name, duration(seconds.median), _range(seconds), duration(expected)))
    rows.append(("start of a sum", duration(sums.start), "", duration(speeds.kernel)))
    rows.append(("memory, GB/s", _gb(sums.rate), f"{percent(sums.spread)} apart", _gb(speeds.memory)))
    return table(rows)


def _shared(measurement: Measurement, assumed: Topology) -> str:
    """Return the ways that copies share, and those that were assumed but no copies were slowed by."""
    left = ways_of(assumed)
    rows: List[Tuple[str, ...]] = [("shared", "pairs", "GB/s measured", "assumed")]
    for name, way in named(measurement.found.ways, assumed.devices):
        rows.append((name, str(len(way.pairs)), _gb(way.speed), _gb(left.pop(way.pairs)) if way.pairs in left else "–"))
    rows += [("not found to be shared", str(len(pairs)), "–", _gb(speed)) for pairs, speed in left.items()]
    return table(rows) if len(rows) > 1 else "No copies were found to slow each other."


def _patterns(measurement: Measurement) -> str:
    """Return how long patterns of copies took, compared with the prediction."""
    ratios = measurement.found.ratios
    if not ratios:
        return ""
    return (
        f"{count(len(ratios), 'pattern')} of copies at once took {np.median(ratios):.2f} times as long as these speeds "
        f"predict (median), {max(ratios):.2f} times at most."
    )


def _gb(speed: float) -> str:
    return f"{speed / GB:.3g}"


def _range(quartiles: Quartiles) -> str:
    return f"{duration(quartiles.low)} to {duration(quartiles.high)}"
