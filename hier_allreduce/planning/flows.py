"""Copies that share resources: the links of a machine by number, and the bytes/s of copies under way.

::

    0→1 ─┐ port of GPU1, 12 GB/s        each copy gets a max-min fair share of every resource that it passes
    2→1 ─┘                              (port, uplink, bus): 6 GB/s each, until one of the two ends
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from functools import lru_cache, reduce
from operator import or_
from typing import Dict, Iterable, List, Set

from ..topology import Topology, resources

_MOST_RATES = 50_000  # sets of pairs whose rates are kept
SOON = 1e-9  # seconds: copies that end within this end together


class Wires:
    """A machine's links: a number for each pair of devices, its stream, and fair rates.

    The sets of pairs that copy at the same time recur, so each set's rates are computed once.
    """

    def __init__(self, topology: Topology, ideal_links: bool):
        paths = resources(topology, ideal_links).paths
        self.number = {pair: number for number, pair in enumerate(paths)}
        self.stream = [path[0][0] for path in paths.values()]
        self.latency = [link.latency for link in topology.links]
        self.alone = [1 / max(cost for _, cost in path) for path in paths.values()]  # bytes/s with no other copy
        self.speed = {resource: 1 / cost for path in paths.values() for resource, cost in path[1:]}
        streams: Dict[int, Set[int]] = {resource: set() for resource in self.speed}
        for path in paths.values():
            for resource, _ in path[1:]:
                streams[resource].add(path[0][0])
        # copies of one stream never share: they follow each other
        self.shared = [
            tuple(resource for resource, _ in path[1:] if len(streams[resource]) > 1) for path in paths.values()
        ]
        users: Dict[int, int] = defaultdict(int)
        for pair, shared in enumerate(self.shared):
            for resource in shared:
                users[resource] |= 1 << pair
        self.sharers = [reduce(or_, [users[resource] for resource in shared], 0) for shared in self.shared]  # as bits
        self._rates: Dict[int, Dict[int, float]] = {}

    def rates(self, mask: int, pairs: Iterable[int]) -> Dict[int, float]:
        """Return the bytes/s of each pair in a set of pairs, given as bits and as numbers, that copy at one time."""
        if mask not in self._rates:
            if len(self._rates) >= _MOST_RATES:
                self._rates.clear()
            self._rates[mask] = self._fair(list(pairs))
        return self._rates[mask]

    def _fair(self, pairs: List[int]) -> Dict[int, float]:
        """Return max-min fair rates: the smallest share is fixed first; the others divide what it leaves."""
        users = Counter(resource for pair in pairs for resource in self.shared[pair])
        left = {resource: self.speed[resource] for resource, count in users.items() if count > 1}
        crowded = {pair: [resource for resource in self.shared[pair] if resource in left] for pair in pairs}
        rates = {pair: self.alone[pair] for pair in pairs if not crowded[pair]}
        waiting = [pair for pair in pairs if crowded[pair]]
        while waiting:
            even = {resource: left[resource] / users[resource] for resource in left if users[resource]}
            share = {pair: min(self.alone[pair], *[even[resource] for resource in crowded[pair]]) for pair in waiting}
            least = min(share.values())
            waiting = [pair for pair in waiting if share[pair] > least * (1 + 1e-9)]
            for pair in share.keys() - set(waiting):
                rates[pair] = least
                for resource in crowded[pair]:
                    left[resource] = max(0.0, left[resource] - least)
                    users[resource] -= 1
        return rates


@lru_cache(maxsize=64)
def wires(topology: Topology, ideal_links: bool) -> Wires:
    """Return the links of a machine by number."""
    return Wires(topology, ideal_links)


class Flows:
    """The copies under way, at most one for each pair of devices, and when they end at their present rates."""

    def __init__(self, of: Wires):
        self._wires = of
        self._copies: Dict[int, int] = {}  # pair → copy
        self._rates: Dict[int, float] = {}  # pair → bytes/s
        self._ends: Dict[int, float] = {}  # pair → seconds
        self._mask = 0  # the pairs as bits
        self.next_end = math.inf

    def begin(self, copy: int, pair: int, size: float, now: float) -> None:
        """Let the bytes of a copy move from ``now`` on."""
        rate = self._rates[pair] = self._wires.alone[pair]
        end = self._ends[pair] = now + size / rate
        self._copies[pair] = copy
        shared = self._mask & self._wires.sharers[pair]
        self._mask |= 1 << pair
        if shared:
            self._share(now)
        elif end < self.next_end:
            self.next_end = end

    def end(self, now: float) -> List[int]:
        """Take out the copies that end now, in the plan's order, and return them."""
        ended = [pair for pair, end in self._ends.items() if end <= now + SOON]
        sharers = 0
        for pair in ended:
            del self._ends[pair], self._rates[pair]
            self._mask ^= 1 << pair
            sharers |= self._wires.sharers[pair]
        if self._mask & sharers:
            self._share(now)
        else:
            self.next_end = min(self._ends.values(), default=math.inf)
        return sorted([self._copies.pop(pair) for pair in ended])

    def _share(self, now: float) -> None:
        """Give each pair its fair rate from ``now`` on."""
        ends, rates = self._ends, self._rates
        for pair, rate in self._wires.rates(self._mask, ends).items():
            if rate != rates[pair]:
                ends[pair] = now + (ends[pair] - now) * rates[pair] / rate
                rates[pair] = rate
        self.next_end = min(ends.values(), default=math.inf)
