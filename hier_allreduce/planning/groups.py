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
_GAIN = 1 - 1e-9  # a shorter sum must be shorter by more than rounding


def two_groups(distance: Sequence[Sequence[float]]) -> Groups:
    """Return two halves of K ≥ 2 devices with the least distances inside, their members paired with near partners.

    This is a local search by swaps, from the neighbours of each device (Kernighan and Lin, 1970, swap pairs in the same
    manner). Where K is odd, the first group has one device more, and its last one has no partner.
    """
    devices = range(len(distance))
    half = (len(distance) + 1) // 2
    across = list(product(range(half), range(half, len(distance))))

    def inside(order: Sequence[int]) -> float:
        return sum(
            distance[a][b]
            for group in (order[:half], order[half:])
            for a, b in combinations(group, 2)
        )

    best = min(
        (_swapped(sorted(devices, key=row.__getitem__), across, inside) for row in distance),
        key=inside,
    )
    first, second = sorted(
        (sorted(best[:half]), sorted(best[half:])), key=lambda group: (-len(group), group)
    )
    pairs = list(combinations(range(len(second)), 2))
    return tuple(first), tuple(
        _swapped(second, pairs, lambda order: sum(distance[a][b] for a, b in zip(first, order)))
    )


def _swapped(
    order: List[int], pairs: Sequence[Tuple[int, int]], cost: Callable[[List[int]], float]
) -> List[int]:
    """Return the order after the best swap of two entries, as long as swaps make it cheaper."""
    while True:
        swaps = []
        for a, b in pairs:
            swaps.append(list(order))
            swaps[-1][a], swaps[-1][b] = order[b], order[a]
        best = min(swaps, key=cost, default=order)
        if cost(best) >= cost(order) * _GAIN:
            return order
        order = best
