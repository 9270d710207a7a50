"""Two groups of near devices, from the distance of each pair.

::

    GPU0 ═ GPU1    GPU2 ═ GPU3         groups ((0, 1, 2, 3), (4, 5, 6, 7)): links inside are near,
      ║  ×   ║       ║  ×   ║          and so is the link from each device to its partner, the one
    GPU4 ═ GPU5    GPU6 ═ GPU7         at the same index of the other group
"""

from __future__ import annotations

from itertools import combinations, product
from typing import Callable, List, Sequence, Tuple

Groups = Tuple[Tuple[int, ...], ...]
Distance = Sequence[Sequence[float]]  # K×K, symmetric
_GAIN = 1 - 1e-9  # a shorter sum must be shorter by more than rounding


def two_groups(distance: Distance) -> Groups:
    """Return two halves of K ≥ 2 devices with the least distances inside, their members paired with near partners.

    This is a local search by swaps, from the neighbours of each device (Kernighan and Lin, 1970, swap pairs in the same
    manner). Where K is odd, the first group has one device more, and its last one has no partner.
    """
    devices = range(len(distance))
    half = (len(distance) + 1) // 2
    best: List[List[int]] = []
    for device in devices:
        near = sorted(devices, key=lambda other: (distance[device][other], other))
        near.remove(device)
        first = sorted([device, *near[: half - 1]])
        found = _swapped([first, sorted(set(devices) - set(first))], lambda groups: _inside(groups, distance))
        if not best or _inside(found, distance) < _inside(best, distance) * _GAIN:
            best = found
    first, second = sorted(map(sorted, best), key=lambda group: (-len(group), group))
    return tuple(first), tuple(_paired(first, second, distance))


def _inside(groups: Sequence[Sequence[int]], distance: Distance) -> float:
    return sum(distance[a][b] for group in groups for a, b in combinations(group, 2))


def _swapped(groups: List[List[int]], cost: Callable[[List[List[int]]], float]) -> List[List[int]]:
    """Return the groups after the best swaps of a member of each, as long as swaps help."""
    while True:
        swaps = []
        for a, b in product(*map(range, map(len, groups))):
            first, second = list(groups[0]), list(groups[1])
            first[a], second[b] = second[b], first[a]
            swaps.append([first, second])
        best = min(swaps, key=cost, default=groups)
        if cost(best) >= cost(groups) * _GAIN:
            return groups
        groups = best


def _paired(first: Sequence[int], second: Sequence[int], distance: Distance) -> List[int]:
    """Return the second group in an order whose members are near their partners."""

    def cost(order: Sequence[int]) -> float:
        return sum(distance[a][b] for a, b in zip(first, order))

    order = list(second)
    while True:
        swaps = []
        for a, b in combinations(range(len(order)), 2):
            swapped = list(order)
            swapped[a], swapped[b] = swapped[b], swapped[a]
            swaps.append(swapped)
        best = min(swaps, key=cost, default=order)
        if cost(best) >= cost(order) * _GAIN:
            return order
        order = best
