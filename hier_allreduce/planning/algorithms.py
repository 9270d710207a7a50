"""Algorithms: each is a function from K towers and a chunk's number to the moves of that chunk.

One tower, the *root*, has the sum of a chunk first. The chunk's number picks the root, so that the
chunks 0, 1, 2 … have their sums on different towers and no tower works more than the others.

Two numbers describe an algorithm, as in Gloo's documentation. For K towers and a chunk of S bytes:

- *communication steps*: the copies one after another, from a tower to the root and back;
- *bytes on the wire*: the most that one tower sends. TensorFlow sends them one after another.

=====================  ========================  ====================
algorithm              communication steps       bytes on the wire
=====================  ========================  ====================
``flat``               2                         (K-1)·S
``tree``               2·⌈log₂ K⌉                ⌈log₂ K⌉·S
``hierarchical``       4                         ⌈K/2⌉·S
``flat_hierarchical``  3                         ⌈K/2⌉·S
=====================  ========================  ====================

These are upper bounds, and exact for K = 4, 8 and 16. For one chunk all towers together send
2·(K-1)·S, whatever the algorithm. Since the root rotates, each tower sends as much in K chunks.
A user's algorithm is a function like these. ``check`` leaves out sums that have nothing to add up,
such as those of one tower.
"""

from __future__ import annotations

from itertools import chain
from typing import Callable, Dict, Iterable, List, Tuple

from ..configs import refusal
from ..errors import HierAllreduceError
from .plan import Copy, Move, Reduce, Schedule, check, copies, reductions, root_of

Algorithm = Callable[[int, int], Iterable[Move]]
Groups = Tuple[Tuple[int, ...], ...]


# ---- the algorithms ------------------------------------------------------------------------------


def flat(towers: int, chunk: int) -> List[Move]:
    """Add up everything on the root, and copy the sum from there to all others.

    ::

        0 ◄─┬─ 1        0 ─┬─► 1
            ├─ 2           ├─► 2
            └─ 3           └─► 3

    The root is tower ``chunk mod K``. Source: the fallback of caffe2's muji, where it is tower 0.

    >>> flat(3, chunk=0)
    [Reduce(srcs=(1, 2), dst=0), Copy(src=0, dst=1), Copy(src=0, dst=2)]
    """
    root = chunk % towers
    others = _without(root, range(towers))
    return [Reduce(others, root), *(Copy(root, tower) for tower in others)]


def tree(towers: int, chunk: int) -> List[Move]:
    """Add up neighbours in pairs, then pairs of pairs, and copy back along the same binomial tree.

    ::

        0 ◄── 1                     0 ──────────► 2        0 ──► 1
        2 ◄── 3     0 ◄── 2                                2 ──► 3

    The root is tower ``chunk mod K``. Source: caffe2's muji, for chunk 0 and K = 2, 4 and 8.

    >>> tree(4, chunk=0)  # doctest: +NORMALIZE_WHITESPACE
    [Reduce(srcs=(1,), dst=0), Reduce(srcs=(3,), dst=2), Reduce(srcs=(2,), dst=0),
     Copy(src=0, dst=2), Copy(src=2, dst=3), Copy(src=0, dst=1)]
    """
    # Place the root at 0. Where exclusive or does that for all places, it maps pairs to pairs, so
    # that neighbours add up whatever the root is.
    root = chunk % towers
    tower_at = [place ^ root for place in range(towers)]
    if towers & (towers - 1):  # K is no power of two
        tower_at = [(place + root) % towers for place in range(towers)]

    # Join pairs, then pairs of pairs: each place goes to the one without its lowest bit, those with
    # the smallest such bit first. Copies go back along the same hops.
    hops: List[Tuple[int, int]] = []
    for place in sorted(range(1, towers), key=lambda place: place & -place):
        hops.append((tower_at[place], tower_at[place & (place - 1)]))
    sums: List[Move] = [Reduce((src,), dst) for src, dst in hops]
    return sums + [Copy(dst, src) for src, dst in reversed(hops)]


def hierarchical(towers: int, chunk: int, groups: Groups = ()) -> List[Move]:
    """Add up in each group, then over the groups, and copy back the same way.

    ::

        0 ◄─┬─ 1                     0 ──► 2        0 ─┬─► 1
            └─ …     0 ◄── 2                           └─► …
        2 ◄─┬─ 3                                    2 ─┬─► 3
            └─ …                                       └─► …

    In each group one tower adds up: the root, and in other groups the tower at the same place,
    counted in a circle if the group is smaller. Without ``groups`` these are two groups of ⌈K/2⌉
    and ⌊K/2⌋ neighbours, and the root is tower ``(⌈K/2⌉ + chunk) mod K``. Source: tensorpack's
    ``allreduce_grads_hierarchical``, K = 8.

    >>> hierarchical(6, chunk=3)  # doctest: +NORMALIZE_WHITESPACE
    [Reduce(srcs=(1, 2), dst=0), Reduce(srcs=(4, 5), dst=3), Reduce(srcs=(3,), dst=0),
     Copy(src=0, dst=3), Copy(src=3, dst=4), Copy(src=3, dst=5), Copy(src=0, dst=1),
     Copy(src=0, dst=2)]

    Raises:
        HierAllreduceError: the groups do not hold each tower once.
    """
    half = (towers + 1) // 2
    groups = groups or (tuple(range(half)), tuple(range(half, towers)))
    if sorted(chain(*groups)) != list(range(towers)):
        raise refusal(groups, "groups", f"each of towers 0 to {towers - 1} once")
    # Chunk 0 has its root in the second half, because tensorpack's has.
    root = (chunk + half) % towers
    # In each group one tower adds up. A lone tower leaves the second half empty.
    members = [group for group in groups if group]
    place = next(group.index(root) for group in members if root in group)
    adders = [group[place % len(group)] for group in members]
    moves: List[Move] = []
    for group, adder in zip(members, adders):
        moves.append(Reduce(_without(adder, group), adder))

    # The root adds up the other adders' sums: of those behind it first, as around a circle.
    middle = adders.index(root)
    others = (*adders[middle + 1 :], *adders[:middle])
    moves.append(Reduce(others, root))

    # Copies go the same way back, so groups come in reverse.
    moves += [Copy(root, adder) for adder in others]
    for group, adder in reversed(list(zip(members, adders))):
        moves += [Copy(adder, tower) for tower in _without(adder, group)]
    return moves


def flat_hierarchical(towers: int, chunk: int, groups: Groups = ()) -> List[Move]:
    """Add up everything on the root, as ``flat``, and copy back through the groups.

    ::

        0 ◄─┬─ 1        0 ──► 2        0 ──► 1
            ├─ 2                       2 ──► 3
            └─ 3

    Groups and roots are those of ``hierarchical``.

    >>> flat_hierarchical(6, chunk=3)  # doctest: +NORMALIZE_WHITESPACE
    [Reduce(srcs=(1, 2, 3, 4, 5), dst=0), Copy(src=0, dst=3), Copy(src=3, dst=4),
     Copy(src=3, dst=5), Copy(src=0, dst=1), Copy(src=0, dst=2)]

    Raises:
        HierAllreduceError: the groups do not hold each tower once.
    """
    through_groups = tuple(hierarchical(towers, chunk, groups))
    all_to_root = tuple(flat(towers, chunk=root_of(through_groups)))
    return [*reductions(all_to_root), *copies(through_groups)]


BY_NAME: Dict[str, Callable[..., List[Move]]] = {
    "flat": flat,
    "tree": tree,
    "hierarchical": hierarchical,
    "flat_hierarchical": flat_hierarchical,
}


# ---- their parts ---------------------------------------------------------------------------------


def _without(tower: int, group: Iterable[int]) -> Tuple[int, ...]:
    """Return the towers of a group without one of them."""
    return tuple(member for member in group if member != tower)


# ---- algorithms for a plan -----------------------------------------------------------------------


def name_of(algorithm: Algorithm) -> str:
    """Return the name of a function, or of the class of another algorithm."""
    return str(getattr(algorithm, "__name__", type(algorithm).__name__))


def schedules_of(
    algorithm: Callable[..., Iterable[Move]], towers: int, **options: Groups
) -> Tuple[Schedule, ...]:
    """Return the K schedules of chunks 0 to K-1, checked; ``options`` are further arguments.

    >>> schedules_of(flat, towers=2)  # doctest: +NORMALIZE_WHITESPACE
    ((Reduce(srcs=(1,), dst=0), Copy(src=0, dst=1)),
     (Reduce(srcs=(0,), dst=1), Copy(src=1, dst=0)))

    Raises:
        HierAllreduceError: the function raises an error, or returns wrong moves. The message names
            the function and the chunk.
    """
    schedules: List[Schedule] = []
    for chunk in range(towers):
        # A user's function may raise anything, and its users shall learn which call failed.
        try:
            schedules.append(check(algorithm(towers, chunk, **options), towers))
        except Exception as cause:
            is_ours = isinstance(cause, HierAllreduceError)
            error = "" if is_ours else f"{type(cause).__name__}: "
            call = f"{name_of(algorithm)}({towers}, {chunk})"
            raise HierAllreduceError(f"{call}: {error}{cause}") from cause
    return tuple(schedules)
