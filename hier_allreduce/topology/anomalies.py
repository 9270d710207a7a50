"""Links that differ from what their peers' look like: a card in another slot, a bridge or a link that is missing.

A table that is read right may still show a machine that was put together wrong. Nothing is mended: these are warnings.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Dict, Sequence, Tuple

from .matrix import PCIE, Kinds, distance, nvlinks

_FEW = 6  # with fewer GPUs, what most of them have says little


def odd_links(labels: Sequence[str], kinds: Kinds) -> Tuple[str, ...]:
    """Warnings for links that differ from what their peers' links look like: no tree, a narrow bridge, an odd pair."""
    if len(labels) < 3:
        return ()
    expected = {} if _part_of_a_mesh(kinds) else {**_unlike_peers(kinds), **_narrow_bridges(kinds)}
    return _no_tree(labels, kinds) or tuple(_odd(labels, kinds, i, j, expected[i, j]) for i, j in sorted(expected))


def _no_tree(labels: Sequence[str], kinds: Kinds) -> Tuple[str, ...]:
    """PCIe is a tree: if a–b and b–c are near, a–c cannot be farther than both. The link in all such threes is odd."""
    broken = []
    for a, b, c in combinations(range(len(labels)), 3):
        corners = sorted([(a, b), (a, c), (b, c)], key=lambda pair: distance(kinds[pair[0]][pair[1]]))
        near, middle, far = (kinds[i][j] for i, j in corners)
        if {near, middle, far} <= set(PCIE) and distance(middle) < distance(far):
            broken.append(corners)
    if not broken:
        return ()
    if len(broken) == 1:  # the farthest; or the nearest, where the two near ones differ
        first, second, last = broken[0]
        broken = [[last] if kinds[first[0]][first[1]] == kinds[second[0]][second[1]] else [first, last]]
    blamed = Counter(pair for corners in broken for pair in corners)
    worst = max(blamed.values())
    odd = [f"{labels[i]}–{labels[j]} is {kinds[i][j]}" for (i, j), count in sorted(blamed.items()) if count == worst]
    return (
        f"{', '.join(odd)}, which does not fit the links around it: PCIe is a tree, and a link cannot be farther than "
        "a way around",
    )


def _part_of_a_mesh(kinds: Kinds) -> bool:
    """Some of a mesh of eight V100s, of which each has single and double links: they look unlike each other."""
    return len(kinds) < 8 and {"NV1", "NV2"} <= {kind for row in kinds for kind in row}


def _narrow_bridges(kinds: Kinds) -> Dict[Tuple[int, int], str]:
    """Where NVLink only joins pairs, all of its bridges are alike; a link can be down, but none can be added."""
    if any(sum(map(bool, map(nvlinks, row))) > 1 for row in kinds):
        return {}
    bridges = [(i, j) for i, j in combinations(range(len(kinds)), 2) if nvlinks(kinds[i][j])]
    widest = max((kinds[i][j] for i, j in bridges), key=nvlinks, default="")
    return {(i, j): f"{widest}, as the widest bridge is" for i, j in bridges if kinds[i][j] != widest}


def _unlike_peers(kinds: Kinds) -> Dict[Tuple[int, int], str]:
    """In most machines every GPU sees the same set of links (a switch, a mesh, pairs).

    Where most of the GPUs do, links between two of the others each are odd that explain their differences, but for one
    GPU's. Where nearly all pairs are alike, any other is. Of few GPUs most may agree by chance.
    """
    count = len(kinds)
    pairs = list(combinations(range(count), 2))
    views = [tuple(sorted(row)) for row in kinds]
    (view, alike), (_, next_alike) = (Counter(views).most_common(2) + [(views[0], 0)])[:2]
    if alike == count or count < 4:  # a square of NV2 with NV1 across; three of a mesh tell nothing
        return {}
    kind, most = Counter(kinds[i][j] for i, j in pairs).most_common(1)[0]
    if nvlinks(kind) and most > 0.6 * len(pairs) and len(pairs) - most < (count if count >= _FEW else 2):
        return {(i, j): f"{kind}, as the other pairs are" for i, j in pairs if kinds[i][j] != kind}
    if count < _FEW or alike == next_alike:
        return {}
    others = [i for i in range(count) if views[i] != view]
    odd = {}
    for i, j in combinations(others, 2):
        missing = Counter(view) - Counter(views[i])
        surplus = Counter(views[i]) - Counter(view)
        if missing and surplus[kinds[i][j]] and missing == Counter(view) - Counter(views[j]):
            odd[i, j] = f"{'/'.join(sorted(missing))}, which most GPUs have"
    explained = {device for pair in odd for device in pair}
    return odd if len(explained) == 2 * len(odd) >= len(others) - 1 else {}


def _odd(labels: Sequence[str], kinds: Kinds, i: int, j: int, expected: str) -> str:
    others = expected.split(",")[0].split("/")
    if kinds[i][j] in PCIE and set(others) <= set(PCIE):
        guess = "are the cards in other slots than their peers?"
    elif distance(kinds[i][j]) < min(map(distance, others)):
        guess = "is a bridge missing elsewhere?"
    else:
        guess = "is a link down or a bridge missing?"
    return f"{labels[i]}–{labels[j]} is {kinds[i][j]}, not {expected}: {guess}"
