"""Plans: an all-reduce as data, the one interpreter that runs it, and the check by counting.

::

    schedule 0          schedule 1          chunk c takes schedule c mod S, so the roots rotate
    0 ← 0 + 1           1 ← 1 + 0
    copy 0 → 1          copy 1 → 0          at the end every tower has the sum of all

A plan does not know the gradients: it fits any number of chunks.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from operator import index
from typing import Callable, Iterable, List, NamedTuple, Optional, Sequence, Tuple, TypeVar, Union

from ..errors import HierAllreduceError

V = TypeVar("V")


class Reduce(NamedTuple):
    """A move: ``dst`` ← ``dst`` + the sum over ``srcs``.

    ::

        Reduce(srcs=(1, 2), dst=0)      0 ← 0 + 1 + 2
    """

    srcs: Tuple[int, ...]
    dst: int


class Copy(NamedTuple):
    """A move: ``dst`` ← ``src``.

    ::

        Copy(src=0, dst=1)              1 ← 0
    """

    src: int
    dst: int

    @property
    def srcs(self) -> Tuple[int, ...]:
        """The source, as of a :class:`Reduce`."""
        return (self.src,)


Move = Union[Reduce, Copy]
# The schedule of one chunk: sums to a root, then copies from it.
Schedule = Tuple[Move, ...]


class Plan(NamedTuple):
    """Schedules, and which gradients share a chunk.

    Attributes:
        schedules: S schedules; chunk c takes schedule c mod S.
        chunk_bytes: the size of chunks; 0 leaves each gradient alone and whole.
        algorithm: the algorithm's name, for reports.
        pack_below: bytes below which gradients are packed, up to ``chunk_bytes``.
        whole: whether gradients above ``chunk_bytes`` are not cut.
        tapers: whether the last packed chunks are smaller.
        chunks: the number of equal chunks that hold all gradients of a pack.
    """

    schedules: Tuple[Schedule, ...]
    chunk_bytes: int
    algorithm: str
    pack_below: int
    whole: bool = False
    tapers: bool = False
    chunks: int = 1


# ---- parts of a schedule -------------------------------------------------------------------------


def reductions(schedule: Schedule) -> Tuple[Reduce, ...]:
    """Return the reductions of a schedule; after them its root has the sum of all towers."""
    return tuple(move for move in schedule if isinstance(move, Reduce))


def copies(schedule: Schedule) -> Tuple[Copy, ...]:
    """Return the copies of a schedule; they bring its root's value to all towers."""
    return tuple(move for move in schedule if isinstance(move, Copy))


def moves_to(schedule: Schedule, tower: int) -> Schedule:
    """Return the sums of a schedule, and those of its copies that bring the sum to one tower.

    >>> moves_to((Reduce((0, 2), 1), Copy(1, 0), Copy(0, 2)), 0)
    (Reduce(srcs=(0, 2), dst=1), Copy(src=1, dst=0))
    """
    # Go back from the tower to the root, because each tower has its value from one other.
    copy_by_dst = {copy.dst: copy for copy in copies(schedule)}
    way: List[Copy] = []
    while tower != root_of(schedule):
        way.insert(0, copy_by_dst[tower])
        tower = copy_by_dst[tower].src
    return (*reductions(schedule), *way)


def root_of(schedule: Schedule) -> int:
    """Return the tower that has the sum first: the destination of the last sum.

    >>> root_of((Reduce((0,), 1), Copy(1, 0)))
    1
    """
    sums = reductions(schedule)
    if sums:
        return sums[-1].dst
    # Without sums the root is where the first copy leaves; a lone tower is its own root.
    return schedule[0].srcs[0] if schedule else 0


# ---- the interpreter -----------------------------------------------------------------------------


def run(
    schedule: Schedule,
    chunk: Sequence[V],
    reduce: Callable[[Reduce, V, List[V]], V],
    at_root: Callable[[int, V], V] = lambda root, total: total,
    copy: Callable[[Copy, V], V] = lambda move, at_src: at_src,
) -> List[Optional[V]]:
    """Run a schedule on one chunk: K values in, K sums out; None where it brings no sum.

    Args:
        schedule: the moves.
        chunk: the value of each tower: tensors, numbers, counts of gradients.
        reduce: returns the sum of the destination's value and of those of the sources.
        at_root: returns what a complete sum becomes before it is copied: the mean.
        copy: returns the source's value on the destination.
    """
    held = list(chunk)
    for move in reductions(schedule):
        received = [held[src] for src in move.srcs]
        held[move.dst] = reduce(move, held[move.dst], received)
    # The mean is taken once, before the copies, so that all towers hold the same bits.
    root = root_of(schedule)
    held[root] = at_root(root, held[root])
    complete = {root}
    for move_back in copies(schedule):
        held[move_back.dst] = copy(move_back, held[move_back.src])
        complete.add(move_back.dst)
    return [total if tower in complete else None for tower, total in enumerate(held)]


# ---- the check -----------------------------------------------------------------------------------


def check(moves: Iterable[Move], towers: int) -> Schedule:
    """Check that after a chunk's moves each tower has the gradient of each tower exactly once.

    ::

        check([Reduce((1, 2), 0), Copy(0, 1), Copy(0, 2)], towers=3)

    Returns:
        The moves, as a tuple: sums first, then copies. A sum over no sources is left out.

    Raises:
        HierAllreduceError: a move names a tower that does not exist; or a tower does not get the
            sum, or some gradient twice, or several copies. The message names the move, or the
            towers.
    """
    schedule: Schedule = ()
    # These are more than can be right. A user's generator may have no end.
    for move in islice(moves, 2 * towers):
        # A user may give NumPy's numbers, and hosts compare their plans as texts.
        srcs = tuple(map(index, move.srcs))
        dst = index(move.dst)
        if not {*srcs, dst} <= set(range(towers)):
            raise HierAllreduceError(f"{move}: expected towers from 0 to {towers - 1}")
        if srcs:
            schedule += (Reduce(srcs, dst) if isinstance(move, Reduce) else Copy(srcs[0], dst),)
    # Run the schedule on counts of gradients, because they tell how often each is in a sum.
    alone = [Counter([tower]) for tower in range(towers)]
    counted = run(schedule, alone, lambda move, here, received: sum(received, here))
    without = [tower for tower, added in enumerate(counted) if added != Counter(range(towers))]
    if without:
        raise HierAllreduceError(f"in the end towers {without} do not have the sum of all towers")
    # A second copy to a tower costs time and brings nothing; two may even go in a circle.
    number = len(copies(schedule))
    if number >= towers:
        raise HierAllreduceError(f"{number} copies; {towers} towers need {towers - 1}")
    return (*reductions(schedule), *copies(schedule))
