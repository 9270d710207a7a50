"""Links that look unlike their peers: a card in another slot, a missing bridge, a link that is down.

A matrix that was read correctly may show a machine that was assembled incorrectly. These are warnings: nothing is
changed.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Dict, Sequence, Tuple

from .matrix import PCIE, Kinds, distance, nvlinks

_ENOUGH = 6  # with fewer GPUs, most of them may look alike by chance

Pair = Tuple[int, int]


def odd_links(labels: Sequence[str], kinds: Kinds) -> Tuple[str, ...]:
    """Return a warning for each link that breaks PCIe's tree, or that looks unlike its peers."""
    if len(labels) < 3:
        return ()
    expected = {} if _part_of_a_mesh(kinds) else {**_unlike_peers(kinds), **_narrow_bridges(kinds)}
    return _broken_tree(labels, kinds) or tuple(
        _unlike_warning(labels, kinds, pair, expected[pair]) for pair in sorted(expected)
    )


def _broken_tree(labels: Sequence[str], kinds: Kinds) -> Tuple[str, ...]:
    """Return a warning if PCIe's links are not a tree.

    If a–b and b–c are near, a–c cannot be farther than both. The link that most of the impossible triangles share is
    named.
    """
    triangles = [
        sorted(corners, key=lambda pair: distance(kinds[pair[0]][pair[1]]))
        for corners in ([(a, b), (a, c), (b, c)] for a, b, c in combinations(range(len(labels)), 3))
    ]
    suspects = [list(pairs) for pairs in triangles if _breaks_tree([kinds[i][j] for i, j in pairs])]
    if not suspects:
        return ()
    if len(suspects) == 1:  # the farthest link, or also the nearest if the two near ones differ
        nearest, middle, farthest = suspects[0]
        near_alike = kinds[nearest[0]][nearest[1]] == kinds[middle[0]][middle[1]]
        suspects = [[farthest] if near_alike else [nearest, farthest]]
    blame = Counter(pair for pairs in suspects for pair in pairs)
    most = max(blame.values())
    odd = [f"{labels[i]}–{labels[j]} is {kinds[i][j]}" for (i, j), count in sorted(blame.items()) if count == most]
    return (
        f"{', '.join(odd)}, which does not fit the links around it: PCIe is a tree, and a link cannot be farther than "
        "a path around it",
    )


def _breaks_tree(near_to_far: Sequence[str]) -> bool:
    """Return whether three PCIe links between three devices have a single farthest one."""
    return set(near_to_far) <= set(PCIE) and distance(near_to_far[1]) < distance(near_to_far[2])


def _part_of_a_mesh(kinds: Kinds) -> bool:
    """Return whether these may be some GPUs of a mesh of eight V100s, in which links look unlike peers."""
    return len(kinds) < 8 and {"NV1", "NV2"} <= {kind for row in kinds for kind in row}


def _narrow_bridges(kinds: Kinds) -> Dict[Pair, str]:
    """Return the bridges that are narrower than the widest one, if NVLink joins pairs only.

    All bridges of a machine are alike: a link can be down, but none can be added.
    """
    if any(sum(nvlinks(kind) > 0 for kind in row) > 1 for row in kinds):
        return {}
    bridges = [(i, j) for i, j in combinations(range(len(kinds)), 2) if nvlinks(kinds[i][j])]
    widest = max((kinds[i][j] for i, j in bridges), key=nvlinks, default="")
    return {(i, j): f"{widest}, as the widest bridge is" for i, j in bridges if kinds[i][j] != widest}


def _unlike_peers(kinds: Kinds) -> Dict[Pair, str]:
    """Return the pairs whose kind is unlike the others', with what was expected of them.

    In most machines every GPU sees the same set of links (a switch, a mesh, pairs).
    """
    count = len(kinds)
    views = [tuple(sorted(row)) for row in kinds]
    if count < 4 or len(set(views)) == 1:  # a square of NV2 with NV1 across; three GPUs of a mesh show no pattern
        return {}
    return _unlike_most_pairs(kinds) or (_unlike_most_gpus(kinds, views) if count >= _ENOUGH else {})


def _unlike_most_pairs(kinds: Kinds) -> Dict[Pair, str]:
    """Return the few other pairs, if nearly all pairs have the same NVLinks."""
    count = len(kinds)
    pairs = list(combinations(range(count), 2))
    kind, most = Counter(kinds[i][j] for i, j in pairs).most_common(1)[0]
    few = count if count >= _ENOUGH else 2
    if nvlinks(kind) and most > 0.6 * len(pairs) and len(pairs) - most < few:
        return {(i, j): f"{kind}, as the other pairs are" for i, j in pairs if kinds[i][j] != kind}
    return {}


def _unlike_most_gpus(kinds: Kinds, views: Sequence[Tuple[str, ...]]) -> Dict[Pair, str]:
    """Return the links that explain why some GPUs see other links than most GPUs do.

    Each such link joins two GPUs that miss the same kind. At most one GPU may remain unexplained.
    """
    (usual, most), *others = Counter(views).most_common(2)
    if others and others[0][1] == most:
        return {}
    unusual = [device for device, view in enumerate(views) if view != usual]
    odd = {}
    for i, j in combinations(unusual, 2):
        missing = Counter(usual) - Counter(views[i])
        surplus = Counter(views[i]) - Counter(usual)
        if missing and surplus[kinds[i][j]] and missing == Counter(usual) - Counter(views[j]):
            odd[i, j] = f"{'/'.join(sorted(missing))}, which most GPUs have"
    explained = {device for pair in odd for device in pair}
    return odd if len(explained) == 2 * len(odd) >= len(unusual) - 1 else {}


def _unlike_warning(labels: Sequence[str], kinds: Kinds, pair: Pair, expected: str) -> str:
    i, j = pair
    usual = expected.split(",")[0].split("/")
    if kinds[i][j] in PCIE and set(usual) <= set(PCIE):
        guess = "are the cards in other slots than their peers?"
    elif distance(kinds[i][j]) < min(map(distance, usual)):
        guess = "is a bridge missing elsewhere?"
    else:
        guess = "is a link down or a bridge missing?"
    return f"{labels[i]}–{labels[j]} is {kinds[i][j]}, not {expected}: {guess}"
