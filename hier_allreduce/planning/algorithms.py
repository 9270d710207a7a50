"""The algorithms, as plans: which device adds what, and in which order.

::

    reduce half   1→0  3→2  2→0         root 0 has the sum
    copy half     0→2  2→3  0→1         the same way back

Every algorithm is a *reduce half* that ends on one root for each chunk; the copy half is the same way back
(:func:`way_back`). A **turn** is the number by which an algorithm rotates its mains: chunk ``c`` takes its mains from
``turns[c]``. Turns 0, 1, 2 … spread the work over the devices; the same turn for all chunks keeps it on one.
:data:`BY_ROOT` has the same algorithms for given roots.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from ..errors import StrategyError
from .plan import Copy, Plan, Reduce, Step

Groups = Tuple[Tuple[int, ...], ...]
Hop = Tuple[Tuple[int, ...], int]  # (srcs, dst): dst ← dst + srcs
ReduceHalf = Tuple[Hop, ...]


def two_groups(devices: int) -> Groups:
    """Return ``⌈K/2⌉`` and ``⌊K/2⌋`` neighbours: the quads of a DGX-1 at K = 8. One device is one group."""
    half = (devices + 1) // 2
    return tuple(group for group in (tuple(range(half)), tuple(range(half, devices))) if group)


def check_groups(groups: Optional[Sequence[Sequence[int]]], devices: int) -> Groups:
    """Return ``groups`` as tuples, or two groups if None.

    Raises:
        StrategyError: the groups miss or repeat a device, or name an unknown one.
    """
    if groups is None:
        return two_groups(devices)
    example = f"for {devices} devices, for instance groups={two_groups(devices)}"
    try:
        checked = tuple(tuple(group) for group in groups)
    except TypeError:
        raise StrategyError(f"groups must be tuples of tower numbers ({example}), not {groups!r}") from None
    towers = [tower for group in checked for tower in group]
    unknown = [t for t in towers if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < devices]
    known = [t for t in towers if t not in unknown]
    missing = sorted(set(range(devices)) - set(known))
    repeated = sorted({t for t in known if known.count(t) > 1})
    lists = {"unknown": unknown, "missing": missing, "repeated": repeated}
    faults = [f"{fault} {numbers}" for fault, numbers in lists.items() if numbers]
    if () in checked:
        faults.append("an empty group")
    if faults:
        raise StrategyError(f"groups={checked} must hold each tower number once: {', '.join(faults)}. {example}")
    return checked


# ---- reduce halves: one chunk each -----------------------------------------------------------------


def reduce_inside(groups: Groups, mains: Sequence[int]) -> ReduceHalf:
    """Return the reductions inside the groups, each on its main."""
    return tuple((tuple(d for d in group if d != main), main) for group, main in zip(groups, mains) if len(group) > 1)


def reduce_across(mains: Sequence[int]) -> ReduceHalf:
    """Return the reduction of the mains' partial sums, on the last main."""
    return ((tuple(mains[:-1]), mains[-1]),) if len(mains) > 1 else ()


def over_mains(groups: Groups, place: int, last: int) -> ReduceHalf:
    """Return the reductions inside the groups, then across them, on the main of group ``last``.

    The main of each group is its member at ``place``, modulo the group's size.
    """
    mains = [group[place % len(group)] for group in groups]
    return reduce_inside(groups, mains) + reduce_across(mains[last + 1 :] + mains[: last + 1])


@lru_cache(maxsize=4096)
def hierarchical_half(devices: int, turn: int, groups: Groups) -> ReduceHalf:
    """Return the reductions inside the groups, then across their mains.

    With two quads this is tensorpack's ``allreduce_grads_hierarchical``: the quad that contains device ``turn mod 8``
    sends its partial sum to the main of the other quad, where the total is formed.
    """
    positions = [g for g, group in enumerate(groups) for _ in group]
    return over_mains(groups, turn, positions[turn % devices] - 1)


@lru_cache(maxsize=4096)
def hierarchical_half_to(root: int, groups: Groups) -> ReduceHalf:
    """Return the reductions inside the groups, then across their mains, that end on ``root``.

    Not every root is that of a turn: turns of uneven groups reach some devices more often than others, or never.
    """
    last = next(g for g, group in enumerate(groups) if root in group)
    return over_mains(groups, groups[last].index(root), last)


@lru_cache(maxsize=4096)
def tree_half(devices: int, turn: int) -> ReduceHalf:
    """Return the reductions of neighbours in pairs, then of pairs of pairs: a binomial tree.

    The root is ``turn mod K``. At turn 0 and K = 2, 4, 8 these are caffe2 muji's schedules.
    """
    root = turn % devices
    power_of_two = devices & (devices - 1) == 0
    # Exclusive or maps pairs to pairs and quads to quads; it needs a power of two. Other K are shifted.
    relabel = [d ^ root if power_of_two else (d + root) % devices for d in range(devices)]
    hops: List[Hop] = []
    stride = 1
    while stride < devices:
        hops += [((relabel[d + stride],), relabel[d]) for d in range(0, devices - stride, 2 * stride)]
        stride *= 2
    return tuple(hops)


@lru_cache(maxsize=4096)
def flat_half(devices: int, turn: int) -> ReduceHalf:
    """Return one reduction of everything, on device ``turn mod K``.

    Turn 0 for all chunks is muji's fallback without peer access.
    """
    root = turn % devices
    return ((tuple(d for d in range(devices) if d != root), root),) if devices > 1 else ()


# ---- plans -----------------------------------------------------------------------------------------


def way_back(half: ReduceHalf) -> Tuple[Tuple[int, int], ...]:
    """Return the copy half: the reduce half's hops in reverse order and direction, as ``(src, dst)``."""
    return tuple((dst, src) for srcs, dst in reversed(half) for src in srcs)


def plan_from_halves(
    devices: int, halves: Sequence[ReduceHalf], algorithm: str = "", backs: Sequence[ReduceHalf] = ()
) -> Plan:
    """Return a plan with one chunk for each reduce half: all its reductions, then all its copies.

    The copies go back along the reductions, or along ``backs``: other halves with the same roots.
    """
    steps: List[Step] = []
    for chunk, (half, back) in enumerate(zip(halves, backs or halves)):
        steps += [Reduce(chunk, srcs, dst) for srcs, dst in half]
        steps += [Copy(chunk, src, dst) for src, dst in way_back(back)]
    return Plan(devices, len(halves), tuple(steps), algorithm)


def hierarchical(devices: int, turns: Sequence[int], groups: Optional[Sequence[Sequence[int]]] = None) -> Plan:
    """Return a plan with groups of any number and sizes (two by default): see :func:`hierarchical_half`."""
    checked = check_groups(groups, devices)
    return plan_from_halves(devices, [hierarchical_half(devices, turn, checked) for turn in turns], "hierarchical")


def hierarchical_to(devices: int, roots: Sequence[int], groups: Optional[Sequence[Sequence[int]]] = None) -> Plan:
    """Return a hierarchical plan in which chunk ``c``'s sum is complete on ``roots[c]``."""
    checked = check_groups(groups, devices)
    return plan_from_halves(devices, [hierarchical_half_to(root, checked) for root in roots], "hierarchical")


def tree(devices: int, turns: Sequence[int], groups: None = None) -> Plan:
    """Return a plan of binomial trees: see :func:`tree_half`."""
    _no_groups("tree", groups)
    return plan_from_halves(devices, [tree_half(devices, turn) for turn in turns], "tree")


def flat(devices: int, turns: Sequence[int], groups: None = None) -> Plan:
    """Return a plan with one main for each chunk: see :func:`flat_half`."""
    _no_groups("flat", groups)
    return plan_from_halves(devices, [flat_half(devices, turn) for turn in turns], "flat")


def _no_groups(algorithm: str, groups: object) -> None:
    if groups is not None:
        raise StrategyError(f"groups={groups!r} goes with algorithm='hierarchical'; {algorithm!r} has none")


ALGORITHMS: Dict[str, Callable[..., Plan]] = {"hierarchical": hierarchical, "tree": tree, "flat": flat}
# These take a root for each chunk instead of a turn. For trees and flat plans both are the same number.
BY_ROOT: Dict[str, Callable[..., Plan]] = {**ALGORITHMS, "hierarchical": hierarchical_to}
