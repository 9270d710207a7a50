"""What copies compete for: the queues and shared ways that a byte passes from one device to another."""

from __future__ import annotations

from functools import lru_cache
from typing import Dict, NamedTuple, Tuple

from .topology import Topology

Path = Tuple[Tuple[int, float], ...]  # (resource, seconds a byte occupies it)


class Resources(NamedTuple):
    """``names`` of the resources; ``paths[src, dst]``: those that a copy passes.

    The first resource of a path is the sender's stream, which one copy holds from its start to its end; the others are
    ports, uplinks and buses, which copies share evenly.
    """

    names: Tuple[str, ...]
    paths: Dict[Tuple[int, int], Path]


@lru_cache(maxsize=256)
def resources(topology: Topology, ideal_links: bool = False, lanes: int = 0) -> Resources:
    """Return what copies compete for.

    TensorFlow runs the outgoing copies of a device one after the other on its single device-to-device stream; it takes
    in as many at a time as come. With ``ideal_links`` a link is busy only with its own copies, as under NCCL; with
    ``lanes`` too, and a GPU sends as many copies at a time as it has lanes.
    """
    speed = dict(topology.shared)
    numbers: Dict[str, int] = {}
    paths = {}
    for link in topology.links:
        sender, receiver = topology.devices[link.src], topology.devices[link.dst]
        alone = ideal_links or lanes
        passed = [(f"{sender} → {receiver}" if alone else f"{sender} copy stream", 1 / link.bandwidth)]
        if lanes:
            passed.append((f"{sender} {lanes} copy streams", 1 / link.bandwidth / lanes))
        passed += [(name, 1 / speed[name]) for name in link.through]
        paths[link.src, link.dst] = tuple((numbers.setdefault(name, len(numbers)), cost) for name, cost in passed)
    return Resources(tuple(numbers), paths)
