"""Rings and groups of near devices, by heuristics for K ≤ 16 devices.

::

    Topology ──distances──► K×K seconds ──ring──► 0 3 2 1 5 6 7 4 ──groups──► (0 3 2 1) (4 7 6 5)
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations
from typing import Any, Iterator, List, Sequence, Tuple, Union

import numpy as np

from ..topology import Topology, resources


@lru_cache(maxsize=256)
def distances(topology: Topology) -> Any:
    """Return K×K seconds: the total time that a byte sent both ways keeps the resources in between busy."""
    table = np.zeros((len(topology), len(topology)))
    for (src, dst), path in resources(topology).paths.items():
        table[src, dst] += sum(seconds for _, seconds in path)
    return table + table.T


def ring_of(machine: Union[int, Topology]) -> Tuple[int, ...]:
    """Return the devices of a machine in the order of a ring through near ones; numbers in their order."""
    return tuple(range(machine)) if isinstance(machine, int) else ring(machine)


@lru_cache(maxsize=256)
def ring(topology: Topology) -> Tuple[int, ...]:
    """Return a short round trip: an order in which neighbours, also the last and the first, are near."""
    return short_tour(distances(topology))


def short_tour(distance: Any) -> Tuple[int, ...]:
    """Return a short round trip through K devices, from device 0, for K×K distances.

    Each device's greedy tour is improved by 2-opt and by moves of one device; the shortest result is taken.
    """
    tours = [improved(_greedy(distance, start), distance) for start in range(len(distance))]
    best = min(tours, key=lambda tour: round(_length(tour, distance) / (distance.max() or 1.0), 9))
    start = best.index(0)
    return tuple(best[start:] + best[:start])


def improved(tour: List[int], distance: Any) -> List[int]:
    """Return the tour after all changes that make it shorter, until none does."""
    while True:
        limit = _length(tour, distance) * (1 - 1e-9)
        shorter = next((changed for changed in _changes(tour) if _length(changed, distance) < limit), None)
        if shorter is None:
            return tour
        tour = shorter


def _length(tour: List[int], distance: Any) -> float:
    return float(distance[tour, tour[1:] + tour[:1]].sum())


def _greedy(distance: Any, start: int) -> List[int]:
    """Return the tour that always goes on to the nearest device."""
    tour, remaining = [start], set(range(len(distance))) - {start}
    while remaining:
        tour.append(min(remaining, key=lambda device: (distance[tour[-1], device], device)))
        remaining.discard(tour[-1])
    return tour


def _changes(tour: List[int]) -> Iterator[List[int]]:
    """Yield the tours in which one stretch is reversed, or one of its ends is moved to the other."""
    for i, j in combinations(range(len(tour) + 1), 2):
        if j - i > 1:
            yield tour[:i] + tour[i:j][::-1] + tour[j:]
            yield tour[:i] + tour[i + 1 : j] + [tour[i]] + tour[j:]
            yield tour[:i] + [tour[j - 1]] + tour[i : j - 1] + tour[j:]


def groups(topology: Topology, count: int) -> Tuple[Tuple[int, ...], ...]:
    """Return ``count`` groups of near devices; devices at the same place in two groups are near, too.

    The groups are arcs of :func:`ring`, cut where the devices inside are nearest. The least total distance to the first
    group assigns the places.
    """
    from scipy.optimize import linear_sum_assignment  # here, because its import takes longer than most commands

    distance, tour = distances(topology), list(ring(topology))
    sizes = [len(part) for part in np.array_split(tour, count)]
    cuts = [_arcs(tour[offset:] + tour[:offset], sizes) for offset in range(len(tour))]
    first, *others = min(cuts, key=lambda arcs: _inner_distance(arcs, distance))
    ordered = [first]
    for arc in others:
        rows, columns = linear_sum_assignment(distance[np.ix_(first, arc)])
        ordered.append([arc[column] for _, column in sorted(zip(rows, columns))])
    return tuple(tuple(int(device) for device in arc) for arc in ordered)


def _arcs(tour: List[int], sizes: Sequence[int]) -> List[List[int]]:
    return [tour[end - size : end] for size, end in zip(sizes, np.cumsum(sizes))]


def _inner_distance(arcs: List[List[int]], distance: Any) -> float:
    """Return the sum of all distances inside the arcs, in units of the largest; rounded to keep ties."""
    total = sum(float(distance[np.ix_(arc, arc)].sum()) for arc in arcs)
    return round(total / (distance.max() or 1.0), 9)
