"""What no plan gets below: on an idle machine, and after a backward pass.

::

    idle       the bytes on the best packing of spanning trees, without the starts of copies
    training   gradients of the last ``backlog`` seconds are copied back after the pass: their sums wait for the kernels
               that are queued on a tower; the last one needs two copies and a sum

Both are bounds of links and queues. They leave out the starts of all other copies, and that copies wait for each other,
which makes the second one loose.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import permutations
from typing import Iterator, Set

import numpy as np

from ..topology import Topology, resources
from .host import BackwardPass
from .rings import groups
from .spanning_trees import linprog, pack


def idle_bound(topology: Topology, size: float, lanes: int = 0) -> float:
    """Return the seconds that every packing of spanning trees needs for ``size`` bytes, without latency."""
    return size / pack(topology, lanes=lanes).limit


def exposed_bound(topology: Topology, size: float, backward: BackwardPass, lanes: int = 0) -> float:
    """Return the seconds that every plan leaves exposed after a backward pass; all of it on an idle machine."""
    if len(topology) == 1:
        return 0.0
    if not backward.seconds:
        return idle_bound(topology, size, lanes)
    speeds = topology.speeds
    last = 2 * min(link.latency for link in topology.links) + speeds.kernel
    if lanes:  # sums on lanes wait for no kernels
        return last
    late = min(1.0, backward.backlog / backward.seconds) * size
    return max(last, late * _copied_back(topology))


@lru_cache(maxsize=64)
def _copied_back(topology: Topology) -> float:
    """Return the seconds for each byte that it takes at least to copy sums from their roots to all devices.

    ::

        minimise    busiest
        subject to  load · copied ≤ busiest,    into each group: copied ≥ 1 - roots inside,    Σ roots = 1,    all ≥ 0
    """
    count = len(topology)
    names, paths = resources(topology)
    pairs = list(permutations(range(count), 2))
    width = len(pairs) + count + 1  # the variables: copied for each pair, root for each device, busiest
    limits, upper = [], []
    for resource in range(len(names)):
        row = np.zeros(width)
        row[: len(pairs)] = [dict(paths[pair]).get(resource, 0.0) * 1e9 for pair in pairs]  # seconds for each GB
        row[-1] = -1.0
        limits.append(row)
        upper.append(0.0)
    for inside in _groups(topology):
        row = np.zeros(width)
        row[: len(pairs)] = [-1.0 * (src not in inside and dst in inside) for src, dst in pairs]
        row[len(pairs) : -1] = [-1.0 * (device in inside) for device in range(count)]
        limits.append(row)
        upper.append(-1.0)
    total = np.zeros((1, width))
    total[0, len(pairs) : -1] = 1.0
    objective = np.zeros(width)
    objective[-1] = 1.0
    return float(linprog(objective, np.array(limits), np.array(upper), total, [1.0]).fun) / 1e9


def _groups(topology: Topology) -> Iterator[Set[int]]:
    """Yield sets of devices into which bytes have to come: single ones, near ones, and all others."""
    everything = set(range(len(topology)))
    near = [group for parts in range(2, len(topology) // 2 + 1) for group in groups(topology, parts)]
    for inside in {frozenset(group) for group in [*((device,) for device in everything), *near]}:
        yield set(inside)
        yield everything - inside
