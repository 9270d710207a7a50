"""Candidates: the algorithms that are tried on a machine, and the buckets in which gradients may travel.

::

    algorithms × chunks of a bucket × buckets, equal or shrinking ─► the planner
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Iterator, List, NamedTuple, Sequence, Tuple, Union

from ..topology import Topology
from . import algorithms
from .algorithms import Algorithm, Groups, checked, name_of
from .lanes import MEMORY, Lanes, chunk_on_lanes, lane_bytes, lane_of_links
from .plan import Plan, Step
from .rings import distances, groups, ring
from .spanning_trees import Tree, pack, rings_side_by_side, share_out

Named = Tuple[str, str, Algorithm, int]  # family, name, algorithm, chunks
MOST_CHUNKS = 8  # of one bucket, for each device
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
# of a bucket's size, that of the next one: the last buckets, which the backward pass does not hide, are the small ones
SHRINKING = {1.0: BUCKETS, 0.8: (4, 6, 8, 12, 16), 0.5: (2, 3, 4, 6, 8)}


class Candidate(NamedTuple):
    """An algorithm, with a number of equal chunks for each bucket.

    Attributes:
        family: the algorithm by which users choose it, such as ``tree``.
        algorithm: its own name, such as ``packed trees``.
        chunks: the number of chunks.
        steps: the steps of a bucket: all chunks' first ones, then all chunks' second ones, …
        lanes: the lanes of each device.
    """

    family: str
    algorithm: str
    chunks: int
    steps: Tuple[Step, ...]
    lanes: int = 0


def bucketings() -> List[Tuple[float, ...]]:
    """Return the divisions of the bytes into buckets that are tried: tuples of shares."""
    return [_shares(count, ratio) for ratio, counts in SHRINKING.items() for count in counts]


def _shares(count: int, ratio: float) -> Tuple[float, ...]:
    sizes = [ratio**number for number in range(count)]
    return tuple(size / sum(sizes) for size in sizes)


def interleaved(devices: int, algorithm: Algorithm, chunks: int) -> Tuple[Step, ...]:
    """Return the steps of several chunks, in turns."""
    by_chunk = [list(algorithm(devices, chunk)) for chunk in range(chunks)]
    turns = range(max(map(len, by_chunk)))
    return tuple(steps[turn] for turn in turns for steps in by_chunk if turn < len(steps))


@lru_cache(maxsize=64)
def candidates(
    topology: Topology, algorithm: Union[str, Algorithm, None] = None, lanes: int = 0
) -> Tuple[Candidate, ...]:
    """Return the candidates for a machine of K ≥ 2 devices, those with equal steps once.

    Args:
        topology: the machine.
        algorithm: a family's name, or a function; None or ``"auto"`` for all.
        lanes: the lanes of each device, which all candidates use.
    """
    count = len(topology)
    found: List[Candidate] = []
    for family, name, function, chunks in _chosen(topology, algorithm, lanes):
        for way in _ways(topology, function, chunks, lanes):
            steps = interleaved(count, way, chunks)
            if not lanes or _fits(steps, count, chunks, lanes):
                found.append(Candidate(family, name, chunks, steps, lanes))
    return tuple({candidate.steps: candidate for candidate in reversed(found)}.values())[::-1]


def _chosen(topology: Topology, algorithm: Union[str, Algorithm, None], lanes: int) -> Iterator[Named]:
    if callable(algorithm):
        name, function = name_of(algorithm), checked(algorithm, topology)
        yield from ((name, name, function, chunks) for chunks in _counts(len(topology)))
    else:
        yield from (each for each in _all(topology, lanes) if algorithm in (None, "auto", each[0]))


def _ways(topology: Topology, function: Algorithm, chunks: int, lanes: int) -> Iterator[Algorithm]:
    """Yield the algorithm on towers, or over lanes: all of them between GPUs, or one as the exit."""
    if not lanes:
        yield function
        return
    towers = len(topology)
    steps = [step for chunk in range(chunks) for step in function(towers, chunk)]
    for exit_lane in (False, True)[:lanes]:
        between = lanes - exit_lane
        over = Lanes(lanes, lane_of_links(topology, steps, between), exit=exit_lane)
        yield partial(_over_lanes, function, over)


def _fits(steps: Tuple[Step, ...], towers: int, chunks: int, lanes: int) -> bool:
    """Return whether no GPU's lanes get more than :data:`.lanes.MEMORY` times the bytes."""
    plan = Plan(towers * (1 + lanes), chunks, steps, lanes=lanes)
    return max(lane_bytes(plan, [1 / chunks * 1e6] * chunks)) <= MEMORY * 1e6


def _over_lanes(function: Algorithm, lanes: Lanes, devices: int, chunk: int) -> List[Step]:
    return chunk_on_lanes(devices, chunk, list(function(devices, chunk)), lanes)


def _all(topology: Topology, lanes: int) -> Iterator[Named]:
    count = len(topology)
    for chunks in _counts(count):
        yield from ((*named, chunks) for named in algorithms.OURS)
    for chunks in _doubled(count, count):
        yield "flat", "exchange", partial(algorithms.exchange, topology=topology), chunks
    for chunks in sorted({1, 2, count}):
        yield "tree", "soonest", algorithms.soonest(topology, chunks), chunks
    for parts in range(2, max(2, count // 2) + 1):
        longest = max(map(len, groups(topology, parts)))
        for chunks in sorted({1, 2, longest, 2 * longest, 4 * longest}):
            for source_by_source in (False, True):
                yield "hierarchical", "groups", algorithms.link_groups(topology, parts, source_by_source), chunks
    yield from _around(topology, tuple((device,) for device in ring(topology)), "ring", "ring")
    yield from _weighted(topology, lanes)
    for parts in range(2, (count + 1) // 2 + 1):
        yield from _around(topology, groups(topology, parts), "hierarchical", "ring of groups")
    packing = pack(topology, lanes=lanes)
    for chunks in _doubled(len(packing.trees), count):
        yield "tree", "packed trees", algorithms.packed_trees(packing, chunks), chunks


def _around(topology: Topology, device_groups: Groups, family: str, name: str) -> Iterator[Named]:
    members = max(map(len, device_groups))
    for starts in _slow_starts(topology, [group[0] for group in device_groups]):
        algorithm = partial(algorithms.around, device_groups=device_groups, starts=starts)
        for chunks in _doubled(len(starts) * members, len(topology)):
            yield family, name, algorithm, chunks


def _weighted(topology: Topology, lanes: int) -> Iterator[Named]:
    """Yield paths around the ring by what the links allow; over lanes, both ways around rings that share few links."""
    rings = rings_side_by_side(topology, lanes) if lanes else [ring(topology)]
    paths = [tour[start:] + tour[:start] for tour in rings for start in range(len(tour))]
    shares = list(share_out(topology, [_edges(path) for path in paths], lanes))
    if lanes:
        paths, shares = [*paths, *(path[::-1] for path in paths)], [share / 2 for share in shares * 2]
    for chunks in _doubled(len(paths), (1 + bool(lanes)) * len(topology)):
        algorithm = algorithms.weighted_paths(shares, paths, chunks)
        yield "ring", "ring" if len(rings) == 1 else "rings", algorithm, len(algorithms.spread(shares, chunks))


def _edges(path: Sequence[int]) -> Tree:
    return tuple((min(pair), max(pair)) for pair in zip(path, path[1:]))


def _counts(devices: int) -> List[int]:
    """Return the numbers of chunks that are tried for a function of which nothing else is known."""
    return sorted({1, 2, (devices + 1) // 2, *_doubled(devices, devices)})


def _doubled(chunks: int, devices: int) -> List[int]:
    """Return ``chunks`` doubled again and again, up to :data:`MOST_CHUNKS` for each device."""
    counts = [chunks * 2**times for times in range(8)]
    return [number for number in counts if number <= max(chunks, MOST_CHUNKS * devices)]


def _slow_starts(topology: Topology, tour: Sequence[int]) -> Iterator[Tuple[int, ...]]:
    """Yield sets of ring edges to cut: for each distinct length of edges, all at least that long."""
    far = distances(topology)
    length = [float(far[tour[place - 1], tour[place]]) / far.max() for place in range(len(tour))]
    for least in sorted({round(each, 2) for each in length}):
        yield tuple(place for place, each in enumerate(length) if round(each, 2) >= least)
