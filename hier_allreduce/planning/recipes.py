"""Recipes: how a bucket is cut and which way each chunk goes, made from a machine's links.

::

    topology ─► ring, groups, packed trees ─► shares of the bytes (LP) ─► a few large or many small chunks

The links between neighbours on a ring are always busy if the chunks' paths start all around it: each path leaves out
another edge. Slow edges are left out more often, by the shares of a linear program (:func:`.spanning_trees.share_out`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Callable, Iterator, List, Sequence, Tuple

import numpy as np

from ..topology import Topology
from . import algorithms
from .algorithms import Groups, ReduceHalf
from .lanes import NO_LANES, Lanes, on_lanes
from .plan import Plan
from .rings import distances, groups, ring
from .spanning_trees import Packing, Tree, centers, ends, pack, pack_paths, rooted_half, share_out, soonest_half

MOST_CHUNKS = 8  # for each device


@dataclass(frozen=True)
class Recipe:
    """How to all-reduce one bucket on ``devices`` (K) devices.

    Chunk ``c`` is the share ``fractions[c]`` of the bucket's bytes, goes by ``halves[c]``, and back by ``backs[c]``
    where there are any; ``order`` lists the steps of :func:`.algorithms.plan_from_halves`, brought onto ``lanes``, in
    the order of execution.
    """

    algorithm: str
    devices: int
    fractions: Tuple[float, ...]
    halves: Tuple[ReduceHalf, ...]
    order: Tuple[int, ...] = ()
    backs: Tuple[ReduceHalf, ...] = ()
    lanes: Lanes = NO_LANES

    @property
    def ways(self) -> Tuple[Tuple[ReduceHalf, ReduceHalf], ...]:
        """For each chunk its reduce half, and the half whose reverse copies the sum back."""
        return tuple(zip(self.halves, self.backs or self.halves))

    def alone(self, chunk: int) -> Recipe:
        """Return the recipe that sends all bytes as one chunk, along the way of ``chunk``."""
        half, back = self.ways[chunk]
        lanes = replace(self.lanes, by_chunk=self.lanes.by_chunk[chunk : chunk + 1])
        return Recipe(self.algorithm, self.devices, (1.0,), (half,), backs=(back,), lanes=lanes)

    def plan(self) -> Plan:
        """Return the plan of one bucket, with as many chunks as ``fractions``."""
        plan = _chunk_by_chunk(self.devices, self.halves, self.algorithm, self.backs, self.lanes)
        order = self.order or range(len(plan.steps))
        return replace(plan, steps=tuple(plan.steps[i] for i in order))

    @property
    def copies(self) -> int:
        """The number of copies, each of which costs TensorFlow a dispatch."""
        return sum(self.plan().transfers().values())

    def shares(self, size: float) -> Tuple[float, ...]:
        """Return ``size`` divided by the fractions, not rounded: equal chunks stay exactly equal."""
        return tuple(fraction * size for fraction in self.fractions)

    def sizes(self, size: int, unit: int = 1) -> Tuple[int, ...]:
        """Divide ``size`` (bytes or elements) by the fractions at multiples of ``unit``; the sum is ``size``."""
        cuts, total = [0], 0.0
        for fraction in self.fractions:
            total += fraction
            cuts.append(min(size, round(total * size / unit) * unit))
        cuts[-1] = size
        return tuple(after - before for before, after in zip(cuts, cuts[1:]))


@lru_cache(maxsize=64)
def _chunk_by_chunk(
    devices: int, halves: Tuple[ReduceHalf, ...], algorithm: str, backs: Tuple[ReduceHalf, ...], lanes: Lanes
) -> Plan:
    return on_lanes(algorithms.plan_from_halves(devices, halves, algorithm, backs), lanes)


@lru_cache(maxsize=64)
def candidates(topology: Topology) -> Tuple[Recipe, ...]:
    """Return the recipes that are made from this machine's links, from one chunk to many."""
    if len(topology) == 1:
        return ()
    recipes = [
        *_soonest(topology),
        *_exchanges(topology),
        *_hierarchical(topology),
        *_group_rings(topology),
        *_rings(topology),
        *_paths(topology),
        *_packed(topology),
    ]
    return tuple(dict.fromkeys(recipes))


def _even(algorithm: str, devices: int, halves: Sequence[ReduceHalf]) -> Recipe:
    return Recipe(algorithm, devices, (1 / len(halves),) * len(halves), tuple(halves))


def baselines(topology: Topology) -> Iterator[Recipe]:
    """Yield the algorithms that use only the number of devices, with 1, 2, K/2, K and 2K chunks."""
    count = len(topology)
    halves = algorithms.two_groups(count)
    for chunks in sorted({1, 2, (count + 1) // 2, count, 2 * count}):
        turns = range(chunks)
        yield _even("two-group", count, [algorithms.hierarchical_half(count, turn, halves) for turn in turns])
        yield _even("tree", count, [algorithms.tree_half(count, turn) for turn in turns])
        yield _even("flat", count, [algorithms.flat_half(count, turn) for turn in turns])


def _soonest(topology: Topology) -> Iterator[Recipe]:
    """Yield trees for so few bytes that only the starts of copies count; neighbours are joined first."""
    count, tour, speeds = len(topology), ring(topology), topology.speeds
    for chunks in sorted({1, 2, count}):
        orders = [tour[place:] + tour[:place] for place in (chunk * count // chunks for chunk in range(chunks))]
        halves = [soonest_half(order, speeds.copy_latency, speeds.kernel) for order in orders]
        backs = tuple(soonest_half(order, speeds.copy_latency, 0.0) for order in orders)
        yield replace(_even("soonest", count, halves), backs=backs)


def _exchanges(topology: Topology) -> Iterator[Recipe]:
    """Yield direct reduce-scatter and all-gather: each device adds up its share of the bytes and sends it to all.

    Devices send to their neighbours on the ring first, then to the next ones, so that no two copies meet at a receiver.
    """
    count, tour = len(topology), ring(topology)
    places = range(count)
    for rounds in (1, 2, 4):
        yield _even(
            "exchange",
            count,
            [
                tuple(((tour[(place + shift) % count],), tour[place]) for shift in range(1, count))
                for _ in range(rounds)
                for place in places
            ],
        )


def _hierarchical(topology: Topology) -> Iterator[Recipe]:
    """Yield groups and partners that follow the links, with one reduction for all sources, or one for each."""
    count = len(topology)
    for parts in range(2, max(2, count // 2) + 1):
        device_groups = groups(topology, parts)
        longest = max(map(len, device_groups))
        for chunks in sorted({1, 2, longest, 2 * longest, 4 * longest}):
            halves = [_grouped_half(device_groups, turn) for turn in range(chunks)]
            yield _even("hierarchical", count, halves)
            yield _even("hierarchical", count, [_source_by_source(half) for half in halves])


def _group_rings(topology: Topology) -> Iterator[Recipe]:
    """Yield rings of groups: each group adds up inside, then the sum goes along the groups' members of one place.

    The links inside groups (bridges, switches) carry each byte only once up and once down.
    """
    for parts in range(2, (len(topology) + 1) // 2 + 1):
        yield from _around(topology, groups(topology, parts), "hierarchical")


def _grouped_half(device_groups: Groups, turn: int) -> ReduceHalf:
    """Return a hierarchical half with partners as mains; each turn another group has the sum."""
    return algorithms.over_mains(device_groups, turn, (turn + turn // len(device_groups[0])) % len(device_groups))


def _source_by_source(half: ReduceHalf) -> ReduceHalf:
    """Return the half with one hop for each source: more launches, but a sum starts with the first arrival."""
    return tuple(((src,), dst) for srcs, dst in half for src in sorted(srcs, key=lambda src: (src < dst, src)))


def _rings(topology: Topology) -> Iterator[Recipe]:
    """Yield paths around a ring that each leave out another edge: links between neighbours are always busy."""
    yield from _around(topology, tuple((device,) for device in ring(topology)), "ring")


def _around(topology: Topology, device_groups: Groups, algorithm: str) -> Iterator[Recipe]:
    """Yield paths around the groups from each of them, with the shares that the links allow, and with even ones.

    They go in one direction, in the other, or alternate: where fast and slow links alternate, a single direction would
    leave half of the slow ones idle until the copies come back.
    """
    count, members = len(topology), range(max(map(len, device_groups)))
    ways = [device_groups[start:] + device_groups[:start] for start in range(len(device_groups))]
    halves = [[_group_path(way[::-1], member), _group_path(way, member)] for way in ways for member in members]
    shares = share_out(topology, [_edges(half) for half, _ in halves])
    turns = [slice(0, 1), slice(0, 2)]
    if len(device_groups) < count:  # around a ring of single devices either direction is as good
        turns.append(slice(1, 2))
    for chunks in _doubled(len(halves), count):
        for turn in turns:
            yield _cut(algorithm, count, [(share, pair[turn]) for share, pair in zip(shares, halves)], chunks)
    for starts in _slow_starts(topology, [group[0] for group in device_groups]):
        even = [halves[start * len(members) + member] for start in starts for member in members]
        for chunks in _doubled(len(even), count):
            yield _cut(algorithm, count, [(1 / len(even), pair) for pair in even], chunks)


def _doubled(chunks: int, devices: int) -> List[int]:
    """Return ``chunks`` doubled again and again, up to :data:`MOST_CHUNKS` for each device."""
    return [chunks * 2**i for i in range(8) if chunks * 2**i <= MOST_CHUNKS * devices]


def _slow_starts(topology: Topology, tour: Sequence[int]) -> Iterator[List[int]]:
    """Yield sets of ring edges to cut: for each distinct edge length, all edges at least that long."""
    far = distances(topology)
    length = [round(float(far[tour[place - 1], tour[place]]) / far.max(), 3) for place in range(len(tour))]
    for least in sorted(set(length)):
        yield [place for place in range(len(tour)) if length[place] >= least]


def _group_path(way: Groups, member: int) -> ReduceHalf:
    mains = [group[member % len(group)] for group in way]
    return _source_by_source(algorithms.reduce_inside(way, mains)) + _along(mains)


def _edges(half: ReduceHalf) -> Tree:
    return tuple((min(src, dst), max(src, dst)) for srcs, dst in half for src in srcs)


def _along(path: Sequence[int]) -> ReduceHalf:
    return tuple(((src,), dst) for src, dst in zip(path, path[1:]))


@lru_cache(maxsize=64)
def candidates_on_lanes(topology: Topology, lanes: int) -> Tuple[Recipe, ...]:
    """Return the recipes for links that are busy side by side: each link has a lane, as far as there are any."""
    if len(topology) == 1 or not lanes:
        return ()
    recipes = [*candidates(topology), *_rings_side_by_side(topology, lanes), *_packed(topology, lanes)]
    return tuple(
        replace(recipe, lanes=Lanes(lanes, lane_of_links(topology, recipe.ways, recipe.fractions, lanes)))
        for recipe in dict.fromkeys(recipes)
    )


def _rings_side_by_side(topology: Topology, lanes: int) -> Iterator[Recipe]:
    """Yield paths around several rings that share few links, from all places, in both directions."""
    if len(topology) < 3:
        return
    rings = dict.fromkeys(_closed(path) for path in pack_paths(topology, lanes).trees)
    paths = [tuple(edge for edge in edges if edge != left_out) for edges in rings for left_out in edges]
    shares = share_out(topology, paths, lanes)
    used = [
        (share, [rooted_half(path, end) for end in ends(path)]) for share, path in zip(shares, paths) if share > 1e-6
    ]
    for parts in (2, 4, 8):
        if len(used) * parts > 2 * MOST_CHUNKS * len(topology):
            break
        fractions = tuple(share / parts for _ in range(parts) for share, _ in used)
        yield Recipe(
            "packed_paths",
            len(topology),
            fractions,
            tuple(halves[part % 2] for part in range(parts) for _, halves in used),
        )


def _closed(path: Tree) -> Tree:
    """Return the edges of the ring that a path is a part of."""
    first, last = ends(path)
    return tuple(sorted({*path, (first, last)}))


def lane_of_links(
    topology: Topology, ways: Sequence[Tuple[ReduceHalf, ReduceHalf]], weights: Sequence[float], lanes: int
) -> Tuple[Tuple[int, ...], ...]:
    """Return for each pair of GPUs the sender's lane (K×K); the links that are busiest share a lane last."""
    count = len(topology)
    busy = np.zeros((count, count))
    for weight, (half, back) in zip(weights, ways):
        there = [(src, dst) for srcs, dst in half for src in srcs]
        for src, dst in [*there, *algorithms.way_back(back)]:
            busy[src, dst] += weight / topology.link(src, dst).bandwidth
    chosen = np.zeros((count, count), int)
    for src in range(count):
        seconds = [0.0] * lanes
        for dst in np.argsort(-busy[src], kind="stable"):
            chosen[src, dst] = seconds.index(min(seconds))
            seconds[chosen[src, dst]] += busy[src, dst]
    return tuple(tuple(int(lane) for lane in row) for row in chosen)


def _paths(topology: Topology) -> Iterator[Recipe]:
    """Yield paths of several rings with the shares that the links allow, where links differ."""
    packing = pack_paths(topology)
    for chunks in _chunk_counts(packing):
        yield packed_trees(len(topology), packing, chunks, ends, "packed_paths")


def _packed(topology: Topology, lanes: int = 0) -> Iterator[Recipe]:
    """Yield the best packing of spanning trees, with each tree's share cut into chunks that start from its middle."""
    packing = pack(topology, lanes=lanes)
    for chunks in _chunk_counts(packing):
        yield packed_trees(len(topology), packing, chunks)


def _chunk_counts(packing: Packing) -> List[int]:
    devices = len(packing.trees[0]) + 1
    counts = [len(packing.trees) * rounds for rounds in (1, 2, 4, 8, 16)]
    return [count for count in counts if count <= max(counts[0], MOST_CHUNKS * devices)]


def packed_trees(
    devices: int,
    packing: Packing,
    chunks: int,
    roots: Callable[[Tree], Tuple[int, ...]] = centers,
    name: str = "packed_trees",
) -> Recipe:
    """Return about ``chunks`` chunks of similar size, as many for each tree as its share allows, trees in turn."""
    weighted = [
        (share, [rooted_half(tree, r) for r in roots(tree)]) for tree, share in zip(packing.trees, packing.shares)
    ]
    return _cut(name, devices, weighted, chunks)


def _cut(name: str, devices: int, ways: Sequence[Tuple[float, Sequence[ReduceHalf]]], chunks: int) -> Recipe:
    """Return the recipe of ways with their shares of the bytes; the parts of a way take its halves in turn."""
    pieces: List[Tuple[float, float, ReduceHalf]] = []
    for share, halves in ways:
        parts = max(1, round(share * chunks))
        if share > 0:
            pieces += [((part + 0.5) / parts, share / parts, halves[part % len(halves)]) for part in range(parts)]
    pieces.sort(key=lambda piece: piece[0])
    return Recipe(name, devices, tuple(share for _, share, _ in pieces), tuple(half for *_, half in pieces))
