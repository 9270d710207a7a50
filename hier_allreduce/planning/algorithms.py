"""The algorithms: which device adds what, and in which order, as plans.

Every algorithm is a *reduce half* that ends on one root for each chunk; the copy half is the same
way back (:func:`way_back`). A **turn** is the number by which an algorithm rotates its mains: chunk
``c`` takes its mains from ``turns[c]``. Turns 0, 1, 2 … spread the work over the devices; the same turn
for all chunks keeps it on one. Where the roots themselves are chosen, :data:`BY_ROOT` has the same algorithms.
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
    """``⌈K/2⌉`` and ``⌊K/2⌋`` neighbours: the quads of a DGX-1 at K = 8. One device is one group."""
    half = (devices + 1) // 2
    return tuple(group for group in (tuple(range(half)), tuple(range(half, devices))) if group)


def check_groups(groups: Optional[Sequence[Sequence[int]]], devices: int) -> Groups:
    """``groups`` as tuples, or two groups if None.

    Raises:
        StrategyError: the groups miss or repeat a device, or name one that is not there.
    """
    if groups is None:
        return two_groups(devices)
    example = f"for {devices} devices, for instance groups={two_groups(devices)}"
    try:
        given = tuple(tuple(group) for group in groups)
    except TypeError:
        raise StrategyError(f"groups must be tuples of tower numbers ({example}), not {groups!r}") from None
    flat_list = [tower for group in given for tower in group]
    strange = [t for t in flat_list if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < devices]
    missing = sorted(set(range(devices)) - {t for t in flat_list if t not in strange})
    repeated = sorted({t for t in flat_list if t not in strange and flat_list.count(t) > 1})
    faults = [
        f"{fault} {towers}"
        for fault, towers in (("unknown", strange), ("missing", missing), ("repeated", repeated))
        if towers
    ] + ["an empty group"] * (() in given)
    if faults:
        raise StrategyError(f"groups={given} must hold each tower number once: {', '.join(faults)}. {example}")
    return given


# ---- reduce halves: one chunk each -----------------------------------------------------------------


def reduce_inside(groups: Groups, mains: Sequence[int]) -> ReduceHalf:
    """Every group adds up on its main."""
    return tuple((tuple(d for d in group if d != main), main) for group, main in zip(groups, mains) if len(group) > 1)


def reduce_across(mains: Sequence[int]) -> ReduceHalf:
    """The mains' partial sums are added on the last of them."""
    return ((tuple(mains[:-1]), mains[-1]),) if len(mains) > 1 else ()


def over_mains(groups: Groups, place: int, last: int) -> ReduceHalf:
    """Inside the groups, on the member at ``place`` of each (counted round and round); then across, on the last's."""
    mains = [group[place % len(group)] for group in groups]
    return reduce_inside(groups, mains) + reduce_across(mains[last + 1 :] + mains[: last + 1])


@lru_cache(maxsize=4096)
def hierarchical_half(devices: int, turn: int, groups: Groups) -> ReduceHalf:
    """Inside the groups, then across their mains.

    With two quads this is tensorpack's ``allreduce_grads_hierarchical``: the quad in which main number ``turn mod 8``
    falls sends its partial sum to the main of the other, where the total is formed.
    """
    positions = [g for g, group in enumerate(groups) for _ in group]
    return over_mains(groups, turn, positions[turn % devices] - 1)


@lru_cache(maxsize=4096)
def hierarchical_half_to(root: int, groups: Groups) -> ReduceHalf:
    """The same, ending on ``root``. Uneven groups rotate to some devices more often than to others, or never."""
    last = next(g for g, group in enumerate(groups) if root in group)
    return over_mains(groups, groups[last].index(root), last)


@lru_cache(maxsize=4096)
def tree_half(devices: int, turn: int) -> ReduceHalf:
    """Neighbours add in pairs, then pairs of pairs (a binomial tree); device ``turn mod K`` is the root.

    At turn 0 and K = 2, 4, 8 these are caffe2 muji's schedules. At powers of two the root rotates by exclusive or,
    which maps pairs to pairs and quads to quads; at any other K the numbering is shifted.
    """
    root = turn % devices
    power_of_two = devices & (devices - 1) == 0
    name = [d ^ root if power_of_two else (d + root) % devices for d in range(devices)]
    hops: List[Hop] = []
    stride = 1
    while stride < devices:
        hops += [((name[d + stride],), name[d]) for d in range(0, devices - stride, 2 * stride)]
        stride *= 2
    return tuple(hops)


@lru_cache(maxsize=4096)
def flat_half(devices: int, turn: int) -> ReduceHalf:
    """Everything is added on device ``turn mod K``; always at turn 0, muji's fallback without peer access."""
    root = turn % devices
    return ((tuple(d for d in range(devices) if d != root), root),) if devices > 1 else ()


# ---- plans -----------------------------------------------------------------------------------------


def way_back(half: ReduceHalf) -> Tuple[Tuple[int, int], ...]:
    """The copy half: the reduce half's hops in reverse order and direction, as ``(src, dst)``."""
    return tuple((dst, src) for srcs, dst in reversed(half) for src in srcs)


def plan_from_halves(
    devices: int, halves: Sequence[ReduceHalf], algorithm: str = "", backs: Sequence[ReduceHalf] = ()
) -> Plan:
    """One chunk for each reduce half: all its reductions, then all its copies.

    The copies go the way of the reductions back, or that of ``backs``: other halves with the same roots.
    """
    steps: List[Step] = []
    for chunk, (half, back) in enumerate(zip(halves, backs or halves)):
        steps += [Reduce(chunk, srcs, dst) for srcs, dst in half]
        steps += [Copy(chunk, src, dst) for src, dst in way_back(back)]
    return Plan(devices, len(halves), tuple(steps), algorithm)


def hierarchical(devices: int, turns: Sequence[int], groups: Optional[Sequence[Sequence[int]]] = None) -> Plan:
    """Groups of any number and sizes (two by default), mains rotating inside each: see :func:`hierarchical_half`."""
    checked = check_groups(groups, devices)
    return plan_from_halves(devices, [hierarchical_half(devices, turn, checked) for turn in turns], "hierarchical")


def hierarchical_to(devices: int, roots: Sequence[int], groups: Optional[Sequence[Sequence[int]]] = None) -> Plan:
    """The same with chunk ``c``'s sum complete on ``roots[c]``: see :func:`hierarchical_half_to`."""
    checked = check_groups(groups, devices)
    return plan_from_halves(devices, [hierarchical_half_to(root, checked) for root in roots], "hierarchical")


def tree(devices: int, turns: Sequence[int], groups: None = None) -> Plan:
    """A binomial tree: see :func:`tree_half`."""
    _no_groups("tree", groups)
    return plan_from_halves(devices, [tree_half(devices, turn) for turn in turns], "tree")


def flat(devices: int, turns: Sequence[int], groups: None = None) -> Plan:
    """One main for each chunk: see :func:`flat_half`."""
    _no_groups("flat", groups)
    return plan_from_halves(devices, [flat_half(devices, turn) for turn in turns], "flat")


def _no_groups(algorithm: str, groups: object) -> None:
    if groups is not None:
        raise StrategyError(f"groups={groups!r} goes with algorithm='hierarchical'; {algorithm!r} has none")


ALGORITHMS: Dict[str, Callable[..., Plan]] = {"hierarchical": hierarchical, "tree": tree, "flat": flat}
# given a root for each chunk in place of a turn; with the others a turn is the root's number
BY_ROOT: Dict[str, Callable[..., Plan]] = {**ALGORITHMS, "hierarchical": hierarchical_to}
