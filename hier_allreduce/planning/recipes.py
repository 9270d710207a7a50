"""Recipes: how a bucket is cut and which way each chunk goes, made from a machine's links.

::

    topology ─► ring, groups, packed trees ─► shares of the bytes (LP) ─► a few large or many small chunks

Links between neighbours on a ring are always busy when the chunks' paths start all around it: a path for each edge
left out. Slow edges are left out more often; how often, a linear program says (:func:`.spanning_trees.share_out`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Callable, Iterator, List, Sequence, Tuple

from ..topology import Topology
from . import algorithms
from .algorithms import Groups, ReduceHalf
from .plan import Plan
from .rings import distances, groups, ring
from .spanning_trees import Packing, Tree, centers, ends, pack, pack_paths, rooted_half, share_out, soonest_half

MOST_CHUNKS = 8  # for each device


@dataclass(frozen=True)
class Recipe:
    """How to all-reduce one bucket on ``devices`` (K) devices.

    Chunk ``c`` is the share ``fractions[c]`` of the bucket's bytes, goes by ``halves[c]``, and back by ``backs[c]``
    where there are any; ``order`` lists the steps of :func:`.algorithms.plan_from_halves` in the order of execution.
    """

    algorithm: str
    devices: int
    fractions: Tuple[float, ...]
    halves: Tuple[ReduceHalf, ...]
    order: Tuple[int, ...] = ()
    backs: Tuple[ReduceHalf, ...] = ()

    @property
    def ways(self) -> Tuple[Tuple[ReduceHalf, ReduceHalf], ...]:
        """For each chunk the halves by which it goes there and back."""
        return tuple(zip(self.halves, self.backs or self.halves))

    def alone(self, chunk: int) -> Recipe:
        """All bytes by the way of one chunk."""
        half, back = self.ways[chunk]
        return Recipe(self.algorithm, self.devices, (1.0,), (half,), backs=(back,))

    def plan(self) -> Plan:
        """The plan of one bucket: as many chunks as ``fractions``."""
        plan = _chunk_by_chunk(self.devices, self.halves, self.algorithm, self.backs)
        order = self.order or range(len(plan.steps))
        return replace(plan, steps=tuple(plan.steps[i] for i in order))

    def shares(self, size: float) -> Tuple[float, ...]:
        """``size`` cut by the fractions, to fractions of a byte: equal chunks stay exactly equal."""
        return tuple(fraction * size for fraction in self.fractions)

    def sizes(self, size: int, unit: int = 1) -> Tuple[int, ...]:
        """``size`` (bytes, or elements) cut by the fractions at multiples of ``unit``; the sizes add up to ``size``."""
        cuts, total = [0], 0.0
        for fraction in self.fractions:
            total += fraction
            cuts.append(min(size, round(total * size / unit) * unit))
        cuts[-1] = size
        return tuple(after - before for before, after in zip(cuts, cuts[1:]))


_chunk_by_chunk = lru_cache(maxsize=64)(algorithms.plan_from_halves)


@lru_cache(maxsize=64)
def candidates(topology: Topology) -> Tuple[Recipe, ...]:
    """Recipes made from this machine's links, from one chunk to many."""
    if len(topology) == 1:
        return ()
    found = [
        *_soonest(topology),
        *_exchanges(topology),
        *_hierarchical(topology),
        *_group_rings(topology),
        *_rings(topology),
        *_paths(topology),
        *_packed(topology),
    ]
    return tuple(dict.fromkeys(found))


def _even(algorithm: str, devices: int, halves: Sequence[ReduceHalf]) -> Recipe:
    return Recipe(algorithm, devices, (1 / len(halves),) * len(halves), tuple(halves))


def baselines(topology: Topology) -> Iterator[Recipe]:
    """The algorithms that know only the number of devices, with 1, 2, K/2, K, 2K chunks."""
    count = len(topology)
    halves = algorithms.two_groups(count)
    for chunks in sorted({1, 2, (count + 1) // 2, count, 2 * count}):
        turns = range(chunks)
        yield _even("two-group", count, [algorithms.hierarchical_half(count, turn, halves) for turn in turns])
        yield _even("tree", count, [algorithms.tree_half(count, turn) for turn in turns])
        yield _even("flat", count, [algorithms.flat_half(count, turn) for turn in turns])


def _soonest(topology: Topology) -> Iterator[Recipe]:
    """For so few bytes that only the starts count: sums by twos and threes, copies by twos, neighbours first."""
    count, tour, speeds = len(topology), ring(topology), topology.speeds
    for chunks in sorted({1, 2, count}):
        orders = [tour[place:] + tour[:place] for place in (chunk * count // chunks for chunk in range(chunks))]
        halves = [soonest_half(order, speeds.copy_latency, speeds.kernel) for order in orders]
        backs = tuple(soonest_half(order, speeds.copy_latency, 0.0) for order in orders)
        yield replace(_even("soonest", count, halves), backs=backs)


def _exchanges(topology: Topology) -> Iterator[Recipe]:
    """Every device adds up its own share of the bytes, and hands it out: reduce-scatter and all-gather, directly.

    The devices send to their neighbours on the ring first, then to the next ones, so that no two meet at a receiver.
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
    """Groups and partners found from the links; each reduction at once, or source by source in turn."""
    count = len(topology)
    for parts in range(2, max(2, count // 2) + 1):
        found = groups(topology, parts)
        longest = max(map(len, found))
        for chunks in sorted({1, 2, longest, 2 * longest, 4 * longest}):
            halves = [_grouped_half(found, turn) for turn in range(chunks)]
            yield _even("hierarchical", count, halves)
            yield _even("hierarchical", count, [_source_by_source(half) for half in halves])


def _group_rings(topology: Topology) -> Iterator[Recipe]:
    """Groups add up inside; then each member in turn goes along the other groups' members of its place.

    As a ring, but the links inside groups (bridges, switches) carry each byte only once up and once down.
    """
    for parts in range(2, (len(topology) + 1) // 2 + 1):
        yield from _around(topology, groups(topology, parts), "hierarchical")


def _grouped_half(found: Groups, turn: int) -> ReduceHalf:
    """As :func:`.algorithms.hierarchical_half`, with partners as mains and the sum at another group each turn."""
    return algorithms.over_mains(found, turn, (turn + turn // len(found[0])) % len(found))


def _source_by_source(half: ReduceHalf) -> ReduceHalf:
    """One hop for each source: more launches, but a sum starts with the first arrival."""
    return tuple(((src,), dst) for srcs, dst in half for src in sorted(srcs, key=lambda src: (src < dst, src)))


def _rings(topology: Topology) -> Iterator[Recipe]:
    """Paths around a ring, one for each edge left out: links between neighbours are always busy."""
    yield from _around(topology, tuple((device,) for device in ring(topology)), "ring")


def _around(topology: Topology, found: Groups, algorithm: str) -> Iterator[Recipe]:
    """Paths around the groups from each of them, with the shares that the links allow, and with even ones.

    All in one direction, all in the other, or in turn: where fast and slow links take turns, one direction would
    leave half of the slow ones idle until the copies come back.
    """
    count, members = len(topology), range(max(map(len, found)))
    ways = [found[start:] + found[:start] for start in range(len(found))]
    halves = [[_group_path(way[::-1], member), _group_path(way, member)] for way in ways for member in members]
    shares = share_out(topology, [_edges(half) for half, _ in halves])
    turns = [slice(0, 1), slice(0, 2)] + [slice(1, 2)] * (len(found) < count)  # around a ring either way is as good
    for chunks in _doubled(len(halves), count):
        for turn in turns:
            yield _cut(algorithm, count, [(share, pair[turn]) for share, pair in zip(shares, halves)], chunks)
    for starts in _slow_starts(topology, [group[0] for group in found]):
        even = [halves[start * len(members) + member] for start in starts for member in members]
        for chunks in _doubled(len(even), count):
            yield _cut(algorithm, count, [(1 / len(even), pair) for pair in even], chunks)


def _doubled(chunks: int, devices: int) -> List[int]:
    """``chunks``, twice, four times as many, as long as that is not too many."""
    return [chunks * 2**i for i in range(8) if chunks * 2**i <= MOST_CHUNKS * devices]


def _slow_starts(topology: Topology, tour: Sequence[int]) -> Iterator[List[int]]:
    """Places at which to cut a ring: everywhere, and only at edges at least as long as each of its lengths."""
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


def _paths(topology: Topology) -> Iterator[Recipe]:
    """Paths of several rings with the shares that the links allow, where links are not alike."""
    packing = pack_paths(topology)
    for chunks in _chunk_counts(packing):
        yield packed_trees(len(topology), packing, chunks, ends, "packed_paths")


def _packed(topology: Topology) -> Iterator[Recipe]:
    """The best packing of spanning trees, each tree's share cut into sub-chunks that start from its middle."""
    packing = pack(topology)
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
    """About ``chunks`` chunks of like size: each tree gets as many as its share, the first of all trees first."""
    weighted = [
        (share, [rooted_half(tree, r) for r in roots(tree)]) for tree, share in zip(packing.trees, packing.shares)
    ]
    return _cut(name, devices, weighted, chunks)


def _cut(name: str, devices: int, ways: Sequence[Tuple[float, Sequence[ReduceHalf]]], chunks: int) -> Recipe:
    """Ways with their shares of the bytes, each cut into parts that take its halves in turn."""
    pieces: List[Tuple[float, float, ReduceHalf]] = []
    for share, halves in ways:
        parts = max(1, round(share * chunks))
        if share > 0:
            pieces += [((part + 0.5) / parts, share / parts, halves[part % len(halves)]) for part in range(parts)]
    pieces.sort(key=lambda piece: piece[0])
    return Recipe(name, devices, tuple(share for _, share, _ in pieces), tuple(half for *_, half in pieces))
