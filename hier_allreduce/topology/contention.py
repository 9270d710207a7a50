"""What copies compete for: which servers a byte holds on its way from one device to another, and for how long."""

from __future__ import annotations

from functools import lru_cache
from typing import Dict, NamedTuple, Tuple

from .topology import Topology

Path = Tuple[Tuple[int, float], ...]  # (server, seconds a byte occupies it)


class Resources(NamedTuple):
    """``servers``: names; ``use[src, dst]``: what is on the way.

    The first server of each link is held by one copy from its start to its end; the others pass on one copy's bytes
    after another's.
    """

    servers: Tuple[str, ...]
    use: Dict[Tuple[int, int], Path]


@lru_cache(maxsize=256)
def resources(topology: Topology, ideal_links: bool = False, one_receive: bool = True) -> Resources:
    """What copies compete for.

    TensorFlow runs the outgoing copies of a device one after the other on its single device-to-device stream. With
    ``one_receive`` a device also takes in one copy at a time, as a copy waits for the receiver's stream. With
    ``ideal_links`` a link is busy only with its own copies, as under NCCL.
    """
    speed = dict(topology.shared)
    names: Dict[str, int] = {}
    use = {}
    for link in topology.links:
        sender, receiver = topology.devices[link.src], topology.devices[link.dst]
        passed = [(f"{sender} → {receiver}" if ideal_links else f"{sender} copy stream", 1 / link.bandwidth)]
        if one_receive and not ideal_links:
            passed.append((f"{receiver} receives", 1 / link.bandwidth))
        passed += [(name, 1 / speed[name]) for name in link.through]
        use[link.src, link.dst] = tuple((names.setdefault(name, len(names)), cost) for name, cost in passed)
    return Resources(tuple(names), use)
