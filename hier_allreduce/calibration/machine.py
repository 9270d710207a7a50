"""A machine of measured speeds, in the keys of a machine's file."""

from __future__ import annotations

from itertools import permutations
from typing import Any, Dict, FrozenSet, Iterable, List, Sequence, Tuple

from ..topology import Topology, calibrated
from .measurement import Measurement
from .sharing import Way
from .timer import Pair


def measured_machine(measurement: Measurement, assumed: Topology, stamp: Dict[str, Any]) -> Topology:
    """Return the machine with the measured speeds, and what its copies were measured to share.

    Args:
        measurement: of as many devices as ``assumed`` has, in its order.
        assumed: the same machine with the speeds of the table, whose devices' labels and kinds of links it keeps.
        stamp: the value of the key ``measured``.
    """
    labels, rates = assumed.devices, measurement.both_ways()
    speeds = {
        "copy_latency": max(_three_digits(measurement.starts.start.median), 1e-9),
        "staged_latency": 0.0,  # the start that was measured has it
        "arrival": _three_digits(measurement.starts.arrival.median),
        "dispatch": _three_digits(measurement.starts.dispatch.median),
        "kernel": max(_three_digits(measurement.sums.start), 1e-9),
        "memory": _three_digits(measurement.sums.rate),
    }
    pairs = [(a, b) for a, b in permutations(range(len(labels)), 2) if a < b]
    content = {
        "gpu": assumed.gpu,
        "speeds": speeds,
        "links": {f"{labels[a]}-{labels[b]}": _three_digits(rates[a, b]) for a, b in pairs},
        "shared": {
            name: {"speed": _three_digits(way.speed), "copies": _copies(way.pairs, labels)}
            for name, way in named(measurement.found.ways, labels)
        },
        "measured": stamp,
    }
    return calibrated(assumed, content)


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")


def _copies(pairs: Iterable[Pair], labels: Sequence[str]) -> Dict[str, List[str]]:
    copies: Dict[str, List[str]] = {}
    for src, dst in sorted(pairs):
        copies.setdefault(labels[src], []).append(labels[dst])
    return copies


def named(ways: Sequence[Way], labels: Sequence[str]) -> List[Tuple[str, Way]]:
    """Return each way with a name that says whose it is; ``port of GPU2 in``, ``way out of GPU0+GPU1``."""
    found: Dict[str, Way] = {}
    for way in ways:
        name = base = _name(way.pairs, labels)
        number = 1
        while name in found:
            number += 1
            name = f"{base}, {number}"
        found[name] = way
    return list(found.items())


def _name(pairs: FrozenSet[Pair], labels: Sequence[str]) -> str:
    senders, receivers = ({pair[end] for pair in pairs} for end in (0, 1))
    everyone = set(range(len(labels)))

    def joined(devices: Iterable[int]) -> str:
        return "+".join(labels[device] for device in sorted(devices))

    if senders == receivers == everyone:
        return "memory"
    if len(receivers) == 1:
        return f"port of {joined(receivers)} in"
    if receivers == everyone - senders and len(senders) <= len(receivers):
        return f"way out of {joined(senders)}"
    if senders == everyone - receivers:
        return f"way into {joined(receivers)}"
    return f"way from {joined(senders)} to {joined(receivers)}"
