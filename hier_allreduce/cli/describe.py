"""Machines as text for people."""

from __future__ import annotations

from collections import Counter
from typing import Dict, Iterable, List, Set

from ..formatting import count, table
from ..planning import pack
from ..topology import GB, Topology, guessed


def describe(topology: Topology) -> str:
    """Describe a machine: its matrix, its kinds of links with their speeds, what they share, and its bound."""
    gpu = f", {topology.gpu}" if topology.gpu else ""
    parts = [
        f"{topology.name}: {count(len(topology), 'device')}{gpu}",
        topology.table().rstrip(),
        _kinds(topology),
        _switch(topology),
        _shared(topology),
        _bound(topology),
        *remarks(topology),
    ]
    return paragraphs(parts)


def paragraphs(parts: Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part)


def _kinds(topology: Topology) -> str:
    devices = len(topology)
    kinds = Counter(topology.kinds[i][j] for i in range(devices) for j in range(i))
    speeds = link_speeds(topology)
    rows = [(kind, str(pairs), speeds[kind]) for kind, pairs in sorted(kinds.items())]
    return table([("links", "pairs", "GB/s each way"), *rows]) if rows else ""


def _switch(topology: Topology) -> str:
    ports = switch_ports(topology)
    if not ports:
        return ""
    return (
        f"The NVLinks end in an NVSwitch: each GPU has one port out and one port in, of {_range(ports)} GB/s, "
        "that all its NV pairs share."
    )


def _shared(topology: Topology) -> str:
    # each device has ports, so these are not worth a line, unless they were measured
    rows = [(name, f"{speed / GB:.4g}") for name, speed in topology.shared if topology.measured or " of " in name]
    return table([("shared by", "GB/s"), *rows]) if rows else ""


def _bound(topology: Topology) -> str:
    if len(topology) == 1:
        return ""
    rule = "under TensorFlow's rule (one outgoing copy a device at a time)"
    tensorflow = f"At most {pack(topology).limit / GB:.4g} GB/s of gradients can be all-reduced {rule}"
    if topology.measured:  # how fast all links of a device are together cannot be measured with one copy at a time
        return f"{tensorflow}."
    return f"{tensorflow}; {pack(topology, ideal_links=True).limit / GB:.4g} GB/s if links worked side by side."


def remarks(topology: Topology) -> List[str]:
    """Return the warnings about a machine, and where its speeds come from."""
    lines = [f"warning: {warning}" for warning in topology.warnings]
    return [*lines, _staged(topology), _source_of_speeds(topology)]


def _staged(topology: Topology) -> str:
    """Return how many pairs have no peer access."""
    pairs = sum(link.staged for link in topology.links if link.src < link.dst)
    if not pairs:
        return ""
    every = len(topology) * (len(topology) - 1) // 2
    return f"no peer access between {pairs} of {count(every, 'pair')}: their copies go through the host's memory"


def _source_of_speeds(topology: Topology) -> str:
    """Return whether speeds were measured, or whose were assumed."""
    when = topology.measured
    if when:
        return (
            f"speeds measured on {when.date} with TensorFlow {when.tensorflow}, by hier_allreduce {when.hier_allreduce}"
        )
    assumed = guessed(topology)
    if assumed:
        return (
            f"speeds as of {assumed} (guessed from the links; give `gpu:`, or put `nvidia-smi -L` above the table and"
            " `nvidia-smi topo -p2p r` below it)"
        )
    given = ", some of them overridden" if topology.overrides else ""
    return f"speeds of {topology.gpu or 'this kind of device'} from docs/cost-model.md{given}; not measured"


def link_speeds(topology: Topology) -> Dict[str, str]:
    """Return the GB/s of each kind of link, the fastest first: ``45.6``, or ``10 or 45.6`` where its pairs differ."""
    speeds: Dict[str, Set[float]] = {}
    for link in sorted(topology.links, key=lambda link: -link.bandwidth):
        speeds.setdefault(link.kind, set()).add(link.bandwidth)
    return {kind: _range(bandwidths) for kind, bandwidths in speeds.items()}


def switch_ports(topology: Topology) -> List[float]:
    """Return the bytes/s of each device's port to an NVSwitch, one way; nothing without a switch."""
    return [speed for name, speed in topology.shared if name.endswith(" NVSwitch out")]


def _range(speeds: Iterable[float]) -> str:
    """Return GB/s as ``10 or 45.6``, or as ``10 to 45.6`` if there are more than two."""
    distinct = list(dict.fromkeys(f"{speed / GB:.4g}" for speed in sorted(speeds)))
    return " or ".join(distinct) if len(distinct) < 3 else f"{distinct[0]} to {distinct[-1]}"
