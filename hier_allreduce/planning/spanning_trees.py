"""Spanning trees of a machine: the best packing of them, and the reductions along one of them.

::

    0 ─── 1         two of the trees, each with a share of the bytes
    │  ╲  │         0─1 1─2 2─3    60 %
    3 ─── 2         0─2 0─3 0─1    40 %

In an all-reduce along a spanning tree, each edge carries the bytes once up and once down. A set of trees, each with a
share of the bytes, keeps each shared resource busy for some seconds per byte. The best set is the solution of a linear
program with one variable for each spanning tree. Column generation solves it: the program's duals are prices of the
resources, and the cheapest tree at these prices is a minimum spanning tree. Source: Blink (Wang et al., MLSys 2020)
packs trees on the links that a job was given; here the resources are those of TensorFlow's copies.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np

from ..topology import Topology, crowds, resources
from .rings import improved, short_tour

Edge = Tuple[int, int]
Hop = Tuple[Tuple[int, ...], int]  # (srcs, dst): dst ← dst + srcs
Tree = Tuple[Edge, ...]  # K-1 edges, the smaller device first

_LEAST_GAIN = 1e-3  # stop when no tree can improve the packing by more than this share
_ROUNDS = 60


@dataclass(frozen=True)
class Packing:
    """Spanning trees and the shares of the bytes that go along them.

    Attributes:
        trees: the trees.
        shares: the share of each tree; their sum is 1.
        rate: the bytes/s of all trees together.
        limit: the bytes/s that no packing exceeds: within 0.1 % of ``rate``, infinite for one device.
    """

    trees: Tuple[Tree, ...]
    shares: Tuple[float, ...]
    rate: float
    limit: float


@lru_cache(maxsize=256)
def pack(topology: Topology, ideal_links: bool = False, lanes: int = 0) -> Packing:
    """Return the best fractional packing of spanning trees on ``topology``, whose GPUs have ``lanes`` each."""
    if len(topology) == 1:
        return Packing((), (), float("inf"), float("inf"))
    return _Packer(topology, ideal_links, lanes).best()


@lru_cache(maxsize=64)
def rings_side_by_side(topology: Topology, lanes: int) -> Tuple[Tuple[int, ...], ...]:
    """Return rings through all devices that share few links, for copies over several links at a time."""
    return _Packer(topology, lanes=lanes, crowded=False).rings()


def share_out(topology: Topology, trees: Sequence[Tree], lanes: int = 0) -> Tuple[float, ...]:
    """Return the trees' shares of the bytes that keep the busiest resource least busy, and are most even.

    ::

        minimise    busiest + 1e-3 · largest
        subject to  load · shares ≤ busiest,    shares ≤ largest,    Σ shares = 1,    all ≥ 0
    """
    packer = _Packer(topology, lanes=lanes)
    load = np.stack([packer.busy([packer.index[edge] for edge in tree]) for tree in trees], axis=1)
    count = len(trees)
    # The variables are the shares, then `busiest`, then `largest`.
    objective = np.concatenate([np.zeros(count), [1.0, 1e-3]])
    limits = np.block(
        [
            [load, -np.ones((len(load), 1)), np.zeros((len(load), 1))],
            [np.eye(count), np.zeros((count, 1)), -np.ones((count, 1))],
        ]
    )
    total = np.concatenate([np.ones(count), [0.0, 0.0]])[np.newaxis]
    solution = linprog(objective, limits, np.zeros(len(limits)), total, [1.0])
    rounded = [max(0.0, round(float(share), 4)) for share in solution.x[:count]]
    return tuple(share / sum(rounded) for share in rounded)


def linprog(objective: Any, limits: Any, upper: Any, *equal: Any) -> Any:
    """Minimise ``objective`` over variables of 0 or more, with ``limits`` at most ``upper`` and ``equal`` (A, b)."""
    from scipy.optimize import linprog  # here, because its import takes longer than most commands

    return linprog(objective, limits, upper, *equal, bounds=(0, None), method="highs")


class _Packer:
    """Searches for packings of spanning trees.

    ``load[resource, pair]`` are the seconds that a resource is busy when one byte goes both ways between two devices.
    Without lanes, :func:`.crowds` count as resources too, unless ``crowded`` is false: the search for rings then finds
    better ones. A tree is a tuple of column numbers of ``load``; ``columns`` are the trees found so far, in order.
    """

    def __init__(self, topology: Topology, ideal_links: bool = False, lanes: int = 0, crowded: bool = True):
        self.count = len(topology)
        self.pairs = list(combinations(range(self.count), 2))
        servers, use = resources(topology, ideal_links, lanes)
        load = np.zeros((len(servers), len(self.pairs)))
        for column, (i, j) in enumerate(self.pairs):
            for server, seconds in use[i, j] + use[j, i]:
                load[server, column] += seconds
        if crowded and not (ideal_links or lanes):
            by_pair = [
                [crowd.get(pair, 0.0) + crowd.get(pair[::-1], 0.0) for pair in self.pairs] for crowd in crowds(topology)
            ]
            load = np.concatenate([load, np.reshape(by_pair, (-1, len(self.pairs)))])
        # A resource that is never busier than another one never limits a packing.
        self.load = load[[not self._dominated(load, row) for row in range(len(load))]]
        self.scale = self.load.max()
        self.load /= self.scale
        self.index = {pair: column for column, (i, j) in enumerate(self.pairs) for pair in ((i, j), (j, i))}
        self.random = np.random.RandomState(0)
        self.columns: Dict[Tuple[int, ...], None] = {}

    @staticmethod
    def _dominated(load: Any, row: int) -> bool:
        busier = (load >= load[row]).all(axis=1)
        equal = (load == load[row]).all(axis=1)
        return bool((busier & ~equal).any() or equal[:row].any())

    def best(self) -> Packing:
        """Return the best packing, by column generation."""
        self._spread()
        bound = np.inf
        for _ in range(_ROUNDS):
            trees_before = len(self.columns)
            solution = self._solve()
            price = -solution.ineqlin.marginals
            cheapest = min(self._add(price, jitter) for jitter in (0.0, 1e-6, 1e-6, 1e-3, 1e-2))
            bound = min(bound, -solution.fun / cheapest)
            if bound <= -solution.fun * (1 + _LEAST_GAIN) or len(self.columns) == trees_before:
                break
        return self._packing(solution, bound)

    def rings(self) -> Tuple[Tuple[int, ...], ...]:
        """Return rings that are short at the prices so far, until another one gains little."""
        found: Dict[Tuple[int, ...], None] = {}
        tour = list(short_tour(self._square(np.ones(len(self.load)))))
        rate = 0.0
        for _ in range(8):
            found[tuple(tour)] = None
            for start in range(self.count):
                path = [tour[(start + i) % self.count] for i in range(self.count)]
                edges = [(min(pair), max(pair)) for pair in zip(path, path[1:])]
                self.columns[tuple(sorted(self.index[edge] for edge in edges))] = None
            solution = self._solve()
            if -solution.fun < rate * 1.02:
                break
            rate = -solution.fun
            tour = improved(tour, self._square(-solution.ineqlin.marginals + 1e-3))
        return tuple(found)

    def _square(self, price: Any) -> Any:
        """Return what each pair of devices costs at these prices (K×K)."""
        cost = np.zeros((self.count, self.count))
        cost[tuple(zip(*self.pairs))] = price @ self.load
        return cost + cost.T

    def _solve(self) -> Any:
        """Return the trees' rates with the largest sum that keeps no resource busy for more than all the time."""
        busy = np.stack([self.busy(tree) for tree in self.columns], axis=1)
        return linprog(-np.ones(len(self.columns)), busy, np.ones(len(self.load)))

    def busy(self, columns: Sequence[int]) -> Any:
        """Return for each resource the seconds that it is busy when one byte goes along a tree."""
        return self.load[:, list(columns)].sum(axis=1)

    def _packing(self, solution: Any, bound: float) -> Packing:
        used = [(tree, rate) for tree, rate in zip(self.columns, solution.x) if rate > -1e-4 * solution.fun]
        total = sum(rate for _, rate in used)
        return Packing(
            tuple(tuple(self.pairs[column] for column in tree) for tree, _ in used),
            tuple(float(rate / total) for _, rate in used),
            float(-solution.fun / self.scale),
            float(bound / self.scale),
        )

    def _spread(self) -> None:
        """Add the first trees: each avoids the resources that earlier ones keep busy (multiplicative weights)."""
        price = np.ones(len(self.load))
        for _ in range(4 * self.count):
            self._add(price, 1e-6)
            busy = self.busy(list(self.columns)[-1])
            price *= np.exp(busy / busy.max())
            price /= price.max()

    def _add(self, price: Any, jitter: float) -> float:
        """Add the cheapest tree at these prices, and return its cost.

        ``jitter`` varies which one of the nearly cheapest trees is added.
        """
        cost = price @ self.load + 1e-6  # for the jitter to vary edges that cost nothing, too
        noisy = cost * (1 + jitter * self.random.rand(len(cost)))
        columns = self._cheapest_tree(noisy.tolist())
        self.columns[columns] = None
        return float(cost[list(columns)].sum())

    def _cheapest_tree(self, cost: Sequence[float]) -> Tuple[int, ...]:
        """Return a minimum spanning tree (Prim). SciPy's takes ten times as long on so few devices."""
        tree = []
        nearest = {other: self.index[0, other] for other in range(1, self.count)}
        while nearest:
            device = min(nearest, key=lambda other: cost[nearest[other]])
            tree.append(nearest.pop(device))
            for other, column in nearest.items():
                if cost[self.index[device, other]] < cost[column]:
                    nearest[other] = self.index[device, other]
        return tuple(sorted(tree))


def rooted(tree: Tree, root: int) -> Tuple[Hop, ...]:
    """Return the reductions along a tree: each device adds its neighbours away from ``root``, leaves first."""
    neighbours: Dict[int, List[int]] = {}
    for i, j in tree:
        neighbours.setdefault(i, []).append(j)
        neighbours.setdefault(j, []).append(i)
    hops: List[Hop] = []
    seen = {root}
    level = [root]
    while level:
        farther = [(tuple(n for n in neighbours.get(device, ()) if n not in seen), device) for device in level]
        hops += [hop for hop in farther if hop[0]]
        level = [device for srcs, _ in farther for device in srcs]
        seen.update(level)
    return tuple(reversed(hops))


def centers(tree: Tree) -> Tuple[int, ...]:
    """Return the one or two devices with the fewest edges to their farthest device."""
    edges = list(tree)
    remaining = {device for edge in tree for device in edge}
    while len(remaining) > 2:  # remove the leaves, again and again
        degree = Counter(device for edge in edges for device in edge)
        remaining -= {device for device in remaining if degree[device] == 1}
        edges = [edge for edge in edges if remaining.issuperset(edge)]
    return tuple(sorted(remaining))


def ends(tree: Tree) -> Tuple[int, ...]:
    """Return the devices with one neighbour."""
    degree = Counter(device for edge in tree for device in edge)
    return tuple(sorted(device for device in degree if degree[device] == 1))
