"""What copies compete for: the queues and shared ways that a byte passes from one device to another."""

from __future__ import annotations

from functools import lru_cache
from typing import Dict, NamedTuple, Tuple

from .topology import Topology

Path = Tuple[Tuple[int, float], ...]  # (resource, seconds a byte occupies it)
_LEAST_REST = 1e-3  # of a port's speed: where less is left, whole copies fill it


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


@lru_cache(maxsize=256)
def crowds(topology: Topology) -> Tuple[Dict[Tuple[int, int], float], ...]:
    """Return a load for each port or uplink that one copy cannot fill: to fill it holds several senders up.

    ::

        uplink of 24 GB/s, a copy alone runs at 18     n copies at a time pass min(18·n, 24) GB/s
                                                       so the second one adds 6, and holds its stream like the first

    If ``whole`` copies at full speed fit, and leave ``rest`` bytes/s, then to pass r bytes/s takes on average at least
    ``whole + (r - whole·alone) / rest`` copies at a time. The same senders may also copy elsewhere. In all, each of
    them has at most one copy at a time.

    A load has the seconds of a byte from ``src`` to ``dst``, scaled so that no plan can use more than one a second.
    """
    names, paths = resources(topology)
    speed = dict(topology.shared)
    loads = (_crowd(number, speed[name], paths) for number, name in enumerate(names) if name in speed)
    return tuple(load for load in loads if load)


def _crowd(resource: int, speed: float, paths: Dict[Tuple[int, int], Path]) -> Dict[Tuple[int, int], float]:
    """Return the load of one port or uplink, empty if whole copies at full speed fill it."""
    through = {pair: path for pair, path in paths.items() if resource in dict(path)}
    alone = max(1 / max(cost for _, cost in path) for path in through.values())
    whole = speed // (alone * (1 - 1e-9))
    rest = speed - whole * alone
    if rest <= _LEAST_REST * speed:
        return {}
    streams = {path[0][0] for path in through.values()}
    most = len(streams) - whole + (speed - rest) / rest
    return {
        pair: (1 / rest if pair in through else path[0][1]) / most
        for pair, path in paths.items()
        if path[0][0] in streams
    }
