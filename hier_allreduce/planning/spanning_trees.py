"""Spanning trees of a machine: the best packing of them, and groups that the links suggest.

In an all-reduce along a spanning tree each edge carries the bytes once up and once down. A set of trees, each with a
share of the bytes, keeps each shared resource busy for some time per byte; the best set is a linear program with
a variable for each spanning tree. Column generation solves it: the LP's duals are prices of the resources, and the
tree that costs least at these prices is a minimum spanning tree. Packing trees on the links that a job was given is
Blink's idea (Wang et al., MLSys 2020); here the resources are TensorFlow's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import combinations
from typing import Any, Dict, Iterator, List, Sequence, Tuple

import numpy as np
from scipy.optimize import linear_sum_assignment, linprog

from ..topology import Topology, resources
from .algorithms import Hop, ReduceHalf

Edge = Tuple[int, int]
Tree = Tuple[Edge, ...]  # K-1 edges, the smaller device first

_ENOUGH = 1e-3  # stop when no tree can improve the packing by more than this share
_ROUNDS = 60


@dataclass(frozen=True)
class Packing:
    """Trees with their shares of the bytes (they add up to 1), and the bytes/s they reach together.

    ``bound`` is what no packing of trees exceeds: within 0.1 % of ``rate``, infinite for one device.
    """

    trees: Tuple[Tree, ...]
    shares: Tuple[float, ...]
    rate: float
    bound: float


@lru_cache(maxsize=256)
def pack(topology: Topology, ideal_links: bool = False) -> Packing:
    """The best fractional packing of spanning trees on ``topology``."""
    if len(topology) == 1:
        return Packing((), (), float("inf"), float("inf"))
    return _Packer(topology, ideal_links).best()


@lru_cache(maxsize=256)
def pack_paths(topology: Topology) -> Packing:
    """A good packing of paths through all devices, from few rings with one edge left out.

    Paths keep every device as busy with taking in as with sending, and those of one ring do not get into each
    other's way: where they come near the bound they are faster than trees of any shape.
    """
    if len(topology) < 3:
        return pack(topology)
    return _Packer(topology, False).best_paths()


def share_out(topology: Topology, trees: Sequence[Tree]) -> Tuple[float, ...]:
    """The shares of the bytes for given trees with which the busiest resource is least busy: as even as that allows."""
    packer = _Packer(topology, False)
    busy = np.stack([packer.busy([packer.index[edge] for edge in tree]) for tree in trees], axis=1)
    count = len(trees)
    # Variables: the shares, how busy the busiest resource is, the largest share.
    least = np.concatenate([np.zeros(count), [1.0, 1e-3]])
    limits = np.block(
        [
            [busy, -np.ones((len(busy), 1)), np.zeros((len(busy), 1))],
            [np.eye(count), np.zeros((count, 1)), -np.ones((count, 1))],
        ]
    )
    whole = np.concatenate([np.ones(count), [0.0, 0.0]])[np.newaxis]
    solved = linprog(least, limits, np.zeros(len(limits)), whole, [1.0], bounds=(0, None), method="highs")
    kept = [max(0.0, round(float(x), 4)) for x in solved.x[:count]]
    return tuple(x / sum(kept) for x in kept)


class _Packer:
    """``load[resource, pair]``: seconds a resource is busy when a byte goes both ways between a pair of devices."""

    def __init__(self, topology: Topology, ideal_links: bool):
        self.count = len(topology)
        self.pairs = list(combinations(range(self.count), 2))
        servers, use = resources(topology, ideal_links)
        load = np.zeros((len(servers), len(self.pairs)))
        for column, (i, j) in enumerate(self.pairs):
            for server, seconds in use[i, j] + use[j, i]:
                load[server, column] += seconds
        # A resource that is never busier than another one cannot decide anything.
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
        self._spread()
        bound = np.inf
        for _ in range(_ROUNDS):
            known = len(self.columns)
            solved = self._solve()
            price = -solved.ineqlin.marginals
            cheapest = min(self._add(price, jitter) for jitter in (0.0, 1e-6, 1e-6, 1e-3, 1e-2))
            bound = min(bound, -solved.fun / cheapest)
            if bound <= -solved.fun * (1 + _ENOUGH) or len(self.columns) == known:
                break
        return self._packing(solved, bound)

    def best_paths(self) -> Packing:
        tour = list(ring_of(self._square(np.ones(len(self.load)))))
        rate = 0.0
        for _ in range(8):
            for start in range(self.count):
                path = [tour[(start + i) % self.count] for i in range(self.count)]
                edges = [(min(pair), max(pair)) for pair in zip(path, path[1:])]
                self.columns[tuple(sorted(self.index[edge] for edge in edges))] = None
            solved = self._solve()
            if -solved.fun < rate * 1.005:
                break
            rate = -solved.fun
            tour = _shorter(tour, self._square(-solved.ineqlin.marginals + 1e-3))
        return self._packing(solved, rate)

    def _square(self, price: Any) -> Any:
        """K×K: what a pair costs at these prices."""
        table = np.zeros((self.count, self.count))
        table[tuple(zip(*self.pairs))] = price @ self.load
        return table + table.T

    def _solve(self) -> Any:
        """Shares of the columns that give most together while no resource is busy more than all the time."""
        busy = np.stack([self.busy(tree) for tree in self.columns], axis=1)
        return linprog(-np.ones(len(self.columns)), busy, np.ones(len(self.load)), bounds=(0, None), method="highs")

    def busy(self, columns: Sequence[int]) -> Any:
        """For each resource the time it is busy per byte that goes along a tree, given as its pairs' columns."""
        return self.load[:, list(columns)].sum(axis=1)

    def _packing(self, solved: Any, bound: float) -> Packing:
        used = [(tree, x) for tree, x in zip(self.columns, solved.x) if x > -1e-4 * solved.fun]
        total = sum(x for _, x in used)
        return Packing(
            tuple(tuple(self.pairs[column] for column in tree) for tree, _ in used),
            tuple(float(x / total) for _, x in used),
            float(-solved.fun / self.scale),
            float(bound / self.scale),
        )

    def _spread(self) -> None:
        """First trees: each avoids what the ones before it have made busy (multiplicative weights)."""
        price = np.ones(len(self.load))
        for _ in range(4 * self.count):
            self._add(price, 1e-6)
            busy = self.busy(list(self.columns)[-1])
            price *= np.exp(busy / busy.max())
            price /= price.max()

    def _add(self, price: Any, jitter: float) -> float:
        """Add the cheapest tree at these prices; what it costs. ``jitter`` picks among trees (nearly) as cheap."""
        cost = price @ self.load + 1e-6  # so that the jitter picks among edges that cost nothing too
        noisy = cost * (1 + jitter * self.random.rand(len(cost)))
        columns = self._cheapest_tree(noisy.tolist())
        self.columns[columns] = None
        return float(cost[list(columns)].sum())

    def _cheapest_tree(self, cost: Sequence[float]) -> Tuple[int, ...]:
        """A minimum spanning tree (Prim). On so few devices a call of SciPy's takes ten times as long."""
        tree = []
        nearest = {other: self.index[0, other] for other in range(1, self.count)}
        while nearest:
            device = min(nearest, key=lambda other: cost[nearest[other]])
            tree.append(nearest.pop(device))
            for other, column in nearest.items():
                if cost[self.index[device, other]] < cost[column]:
                    nearest[other] = self.index[device, other]
        return tuple(sorted(tree))


def rooted_half(tree: Tree, root: int) -> ReduceHalf:
    """The reductions along a tree: every device adds up its neighbours farther from ``root``, leaves first."""
    around: Dict[int, List[int]] = {}
    for i, j in tree:
        around.setdefault(i, []).append(j)
        around.setdefault(j, []).append(i)
    hops: List[Hop] = []
    seen = {root}
    ring = [root]
    while ring:
        outside = [(tuple(n for n in around.get(d, ()) if n not in seen), d) for d in ring]
        hops += [hop for hop in outside if hop[0]]
        ring = [n for beyond, _ in outside for n in beyond]
        seen.update(ring)
    return tuple(reversed(hops))


def soonest_half(order: Sequence[int], start: float, pause: float) -> ReduceHalf:
    """The reductions by which the first device of ``order`` has the sum soonest, if all links are alike.

    Read backwards it is the LogP model's best broadcast (Karp et al., SPAA 1993): everybody who has the value hands it
    on, a copy every ``start`` seconds, the first of them ``pause`` seconds after the value came. Devices that stand
    together in ``order`` are joined first.
    """
    above = [0]
    turns = [(start + pause, 0)]
    for place in range(1, len(order)):
        now, giver = heappop(turns)
        above.append(giver)
        heappush(turns, (now + start, giver))
        heappush(turns, (now + pause + start, place))
    sizes = [1] * len(order)
    for place in range(len(order) - 1, 0, -1):
        sizes[above[place]] += sizes[place]

    def joined(place: int, devices: Sequence[int]) -> List[Hop]:
        hops: List[Hop] = []
        mains: List[int] = []
        end = len(devices)
        for below in (child for child in range(1, len(order)) if above[child] == place):
            hops += joined(below, devices[end - sizes[below] : end])
            end -= sizes[below]
            mains.append(devices[end])
        return hops + [(tuple(mains), devices[0])] if mains else hops

    return tuple(joined(0, order))


def centers(tree: Tree) -> Tuple[int, ...]:
    """The one or two devices from which the farthest device is fewest edges away (found by taking leaves off)."""
    edges = list(tree)
    left = {d for edge in tree for d in edge}
    while len(left) > 2:
        degree = Counter(d for edge in edges for d in edge)
        left -= {d for d in left if degree[d] == 1}
        edges = [edge for edge in edges if left.issuperset(edge)]
    return tuple(sorted(left))


def ends(tree: Tree) -> Tuple[int, ...]:
    """The devices with one neighbour."""
    degree = Counter(d for edge in tree for d in edge)
    return tuple(sorted(d for d in degree if degree[d] == 1))


# ---- rings and groups -------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def distances(topology: Topology) -> Any:
    """K×K: how long a byte both ways between two devices keeps everything on its way busy, in all, in seconds."""
    use = resources(topology).use
    count = len(topology)
    table = np.zeros((count, count))
    for (i, j), passed in use.items():
        table[i, j] += sum(seconds for _, seconds in passed)
    return table + table.T


@lru_cache(maxsize=256)
def ring(topology: Topology) -> Tuple[int, ...]:
    """An order of the devices in which neighbours, the last and the first too, are near: a short round trip."""
    return ring_of(distances(topology))


def ring_of(far: Any) -> Tuple[int, ...]:
    """The same for a K×K table of distances: 2-opt and moves of one device, from each device's greedy tour."""
    tours = [_shorter(_greedy(far, start), far) for start in range(len(far))]
    best = min(tours, key=lambda tour: round(_length(tour, far) / (far.max() or 1.0), 9))
    at = best.index(0)
    return tuple(best[at:] + best[:at])


def _length(tour: List[int], far: Any) -> float:
    return float(far[tour, tour[1:] + tour[:1]].sum())


def _greedy(far: Any, start: int) -> List[int]:
    tour, left = [start], set(range(len(far))) - {start}
    while left:
        tour.append(min(left, key=lambda d: (far[tour[-1], d], d)))
        left.discard(tour[-1])
    return tour


def _shorter(tour: List[int], far: Any) -> List[int]:
    best, length = tour, _length(tour, far)
    improved = True
    while improved:
        improved = False
        for other in _changes(best):
            new = _length(other, far)
            if new < length * (1 - 1e-9):
                best, length, improved = other, new, True
                break
    return best


def _changes(tour: List[int]) -> Iterator[List[int]]:
    for i, j in combinations(range(len(tour) + 1), 2):
        if j - i > 1:
            yield tour[:i] + tour[i:j][::-1] + tour[j:]
            yield tour[:i] + tour[i + 1 : j] + [tour[i]] + tour[j:]
            yield tour[:i] + [tour[j - 1]] + tour[i : j - 1] + tour[j:]


def groups(topology: Topology, count: int) -> Tuple[Tuple[int, ...], ...]:
    """``count`` groups of near devices, each in such an order that the first of all are near each other, and so on.

    The groups are arcs of :func:`ring`, cut where the devices inside are nearest; the partners are
    matched by least total distance.
    """
    far, tour = distances(topology), list(ring(topology))
    sizes = [len(part) for part in np.array_split(tour, count)]

    def arcs(offset: int) -> List[List[int]]:
        turned = tour[offset:] + tour[:offset]
        return [turned[end - size : end] for size, end in zip(sizes, np.cumsum(sizes))]

    def inside(offset: int) -> float:
        return round(sum(float(far[np.ix_(arc, arc)].sum()) for arc in arcs(offset)) / (far.max() or 1.0), 9)

    best = arcs(min(range(len(tour)), key=inside))
    first = best[0]
    ordered = [first]
    for arc in best[1:]:
        rows, columns = linear_sum_assignment(far[np.ix_(first, arc)])
        ordered.append([arc[c] for _, c in sorted(zip(rows, columns))])
    return tuple(tuple(int(d) for d in arc) for arc in ordered)
