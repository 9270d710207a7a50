"""Algorithms: functions from a number of devices and a chunk's number to the steps of that chunk.

::

    def flat(devices, chunk):                        flat(3, chunk=0)
        root = chunk % devices                       Reduce((1, 2), 0)     0 ← 0 + 1 + 2
        …                                            Copy(0, 1)            1 ← 0
                                                     Copy(0, 2)            2 ← 0

The chunk's number rotates the work: chunks 0, 1, 2 … have their sums on different devices. A user's function is the
same.
"""

from __future__ import annotations

from functools import partial
from typing import Callable, Dict, Iterable, List, Sequence, Tuple, Union

from ..errors import HierAllreduceError
from .plan import Copy, Reduce, Schedule, Step, check, root_of

Algorithm = Callable[[int, int], Iterable[Step]]
Groups = Tuple[Tuple[int, ...], ...]
_Hop = Tuple[Tuple[int, ...], int]  # (srcs, dst): dst ← dst + srcs; without srcs no step


def _there_and_back(hops: Sequence[_Hop]) -> List[Step]:
    """Return sums along ``hops``, and copies back along them."""
    sums: List[Step] = [Reduce(srcs, dst) for srcs, dst in hops if srcs]
    return sums + [Copy(dst, src) for srcs, dst in reversed(hops) for src in srcs]


def flat(devices: int, chunk: int) -> List[Step]:
    """Add up everything on device ``chunk mod K``. At chunk 0 this is caffe2 muji's fallback."""
    root = chunk % devices
    return _there_and_back([(tuple(device for device in range(devices) if device != root), root)])


def tree(devices: int, chunk: int) -> List[Step]:
    """Add up neighbours in pairs, then pairs of pairs: a binomial tree with root ``chunk mod K``.

    At chunk 0 and K = 2, 4, 8 these are caffe2 muji's schedules.
    """
    root = chunk % devices
    power_of_two = devices & (devices - 1) == 0
    # Exclusive or maps pairs to pairs and quads to quads; it needs a power of two. Other K are shifted.
    label = [
        device ^ root if power_of_two else (device + root) % devices for device in range(devices)
    ]
    strides = [1 << level for level in range((devices - 1).bit_length())]
    return _there_and_back(
        [((label[d + s],), label[d]) for s in strides for d in range(0, devices - s, 2 * s)]
    )


def ring(devices: int, chunk: int) -> List[Step]:
    """Add up from device to device around a ring, and copy back around it; the sum is on ``chunk - 1 mod K``."""
    path = [(chunk + step) % devices for step in range(devices)]
    return _there_and_back([((src,), dst) for src, dst in zip(path, path[1:])])


def hierarchical(
    devices: int, chunk: int, groups: Groups = (), roots: Sequence[int] = ()
) -> List[Step]:
    """Add up inside each group on its main, then over the mains.

    Without ``groups`` they are the halves ⌈K/2⌉ and ⌊K/2⌋. The sums end on ``roots`` in rotation, by default on
    ``⌈K/2⌉``, ``⌈K/2⌉ + 1``, … Source: tensorpack's ``allreduce_grads_hierarchical``, which has K = 8.
    """
    groups = groups or halves(devices)
    if (
        sorted(repr(d) for group in groups for d in group) != sorted(map(repr, range(devices)))
        or () in groups
    ):
        expected = f"each of towers 0 to {devices - 1} once, for instance {halves(devices)}"
        raise HierAllreduceError(f"groups={groups}: expected {expected}")
    root = roots[chunk % len(roots)] if roots else (chunk + (devices + 1) // 2) % devices
    last = next(number for number, group in enumerate(groups) if root in group)
    member = groups[last].index(root)
    mains = [group[member % len(group)] for group in groups]
    inside = [(tuple(d for d in group if d != main), main) for group, main in zip(groups, mains)]
    return _there_and_back([*inside, (tuple(mains[last + 1 :] + mains[:last]), mains[last])])


def in_groups(groups: Groups, roots: Sequence[int] = ()) -> Algorithm:
    """Return the algorithm :func:`hierarchical` with these groups and roots."""
    return partial(hierarchical, groups=groups, roots=roots)


def halves(devices: int) -> Groups:
    """Return ``⌈K/2⌉`` and ``⌊K/2⌋`` neighbours: the quads of a DGX-1 at K = 8. One device is one group."""
    middle = (devices + 1) // 2
    return tuple(group for group in (tuple(range(middle)), tuple(range(middle, devices))) if group)


BY_NAME: Dict[str, Algorithm] = {
    "flat": flat,
    "tree": tree,
    "hierarchical": hierarchical,
    "ring": ring,
}


def name_of(algorithm: Union[str, Algorithm]) -> str:
    """Return the name of an algorithm; for a function that of the function, or of its class."""
    function = getattr(algorithm, "func", algorithm)  # a partial has one
    return (
        algorithm
        if isinstance(algorithm, str)
        else getattr(function, "__name__", type(function).__name__)
    )


def schedules_of(algorithm: Algorithm, devices: int) -> Tuple[Schedule, ...]:
    """Return the schedules of chunks 0 to K-1, checked; equal ones once.

    Raises:
        HierAllreduceError: the function raises an error, or returns wrong steps. The message names the function and the
            chunk.
    """
    schedules: Dict[Schedule, None] = {}
    for chunk in range(devices):
        try:
            schedules[check(algorithm(devices, chunk), devices)] = None
        except Exception as cause:  # a user's function may raise anything
            kind = "" if isinstance(cause, HierAllreduceError) else f"{type(cause).__name__}: "
            raise HierAllreduceError(
                f"{name_of(algorithm)}({devices}, {chunk}): {kind}{cause}"
            ) from cause
    return tuple(schedules)


def with_root(schedules: Sequence[Schedule], main: int, name: str) -> Tuple[Schedule, ...]:
    """Return the first schedule whose root is tower ``main``; an error names the roots that there are."""
    by_root = {root_of(schedule): schedule for schedule in reversed(schedules)}
    if main not in by_root:
        roots = ", ".join(map(str, sorted(by_root)))
        raise HierAllreduceError(
            f"main={main}: the sums of {name} are on towers {roots}; take one of these"
        )
    return (by_root[main],)
