"""A machine whose GPUs are cut into a tower's device and lanes: logical GPUs that share links, ports and memory.

::

    GPU0          = device 0      ─┐ one GPU: copies between them stay in its memory
    GPU0 lane 0   = device K       │
    GPU0 lane 1   = device K + 1  ─┘
      │                each has a copy stream of its own; all of them share GPU0's links and ports
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import permutations
from typing import Dict, List, Tuple

from .links import Link
from .matrix import HOST, SELF
from .topology import Topology


@lru_cache(maxsize=64)
def with_lanes(topology: Topology, lanes: int) -> Topology:
    """Return the machine with ``lanes`` (L) logical GPUs next to each tower's device: K×(1 + L) devices.

    Devices 0 to K-1 are the towers', device ``K + g×L + l`` is lane ``l`` of GPU ``g``. A link between two GPUs is one
    resource for all their logical devices. A copy inside a GPU passes its memory twice: it is read and written.
    """
    if not lanes:
        return topology
    gpus = [*range(len(topology)), *(gpu for gpu in range(len(topology)) for _ in range(lanes))]
    labels = [*topology.devices, *(f"{gpu} lane {lane}" for gpu in topology.devices for lane in range(lanes))]
    shared: Dict[str, float] = dict(topology.shared)
    links: List[Link] = []
    for src, dst in permutations(range(len(gpus)), 2):
        link, own = _local(topology, gpus[src]) if gpus[src] == gpus[dst] else _remote(topology, gpus[src], gpus[dst])
        shared.update(own)
        links.append(replace(link, src=src, dst=dst))
    kinds = tuple(tuple(SELF if a == b else topology.kinds[a][b] for b in gpus) for a in gpus)
    return replace(
        topology,
        devices=tuple(labels),
        kinds=kinds,
        links=tuple(links),
        shared=tuple(shared.items()),
        cpus=tuple(topology.cpus[gpu] for gpu in gpus) if topology.cpus else (),
    )


def _remote(topology: Topology, src: int, dst: int) -> Tuple[Link, Dict[str, float]]:
    """Return a link between logical devices of two GPUs, with the shared resource that the GPUs' link is."""
    link = topology.link(src, dst)
    name = f"{topology.devices[src]} → {topology.devices[dst]}"
    return replace(link, through=(name, *link.through)), {name: link.bandwidth}


def _local(topology: Topology, gpu: int) -> Tuple[Link, Dict[str, float]]:
    """Return a link between two logical devices of one GPU, or of CPU devices in one host's memory."""
    speeds = topology.speeds
    if any(HOST in row for row in topology.kinds):
        return Link(gpu, gpu, HOST, speeds.host, speeds.copy_latency), {}
    name, speed = f"{topology.devices[gpu]} memory", speeds.memory / 2
    return Link(gpu, gpu, SELF, speed, speeds.copy_latency, (name,)), {name: speed}
