"""Plans: an all-reduce as data, the one interpreter that runs it, and the check by counting.

::

    schedule 0          schedule 1          chunk c takes schedule c mod S, so the work rotates over the towers
    0 ← 0 + 1           1 ← 1 + 0
    copy 0 → 1          copy 1 → 0          at the end every tower has the sum of all

A plan does not know the gradients: it fits any number of chunks.
"""

from __future__ import annotations

from itertools import islice
from operator import index
from typing import (
    Any,
    FrozenSet,
    Generic,
    Iterable,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
    TypeVar,
    Union,
)

from ..errors import HierAllreduceError

V = TypeVar("V")


class Reduce(NamedTuple):
    """A step: ``dst`` ← ``dst`` + the sum over ``srcs``.

    ::

        Reduce(srcs=(1, 2), dst=0)      0 ← 0 + 1 + 2
    """

    srcs: Tuple[int, ...]
    dst: int


class Copy(NamedTuple):
    """A step: ``dst`` ← ``src``.

    ::

        Copy(src=0, dst=1)              1 ← 0
    """

    src: int
    dst: int

    @property
    def srcs(self) -> Tuple[int, ...]:
        """The source, as of a :class:`Reduce`."""
        return (self.src,)


Step = Union[Reduce, Copy]
Schedule = Tuple[Step, ...]  # of one chunk: sums to a root, then copies from it


class Plan(NamedTuple):
    """Schedules and a chunk size.

    Attributes:
        towers: K.
        schedules: S schedules; chunk c takes schedule c mod S.
        chunk_bytes: the size of chunks; 0 leaves each gradient alone and whole.
        algorithm: its name, for reports.
        pack_below: bytes below which gradients are packed; None: the usual share of ``chunk_bytes``.
        whole: whether gradients above ``chunk_bytes`` are not cut.
    """

    towers: int
    schedules: Tuple[Schedule, ...]
    chunk_bytes: int
    algorithm: str
    pack_below: Optional[int] = None
    whole: bool = False

    def schedule(self, chunk: int) -> Schedule:
        """Return the schedule of a chunk."""
        return self.schedules[chunk % len(self.schedules)]


def root_of(schedule: Schedule) -> int:
    """Return the tower that has the sum first: the destination of the last sum."""
    sums = sums_in(schedule)
    return sums[-1].dst if sums else (schedule[0].srcs[0] if schedule else 0)


def sums_in(schedule: Schedule) -> Tuple[Reduce, ...]:
    """Return the first half of a schedule: afterwards its root has the sum."""
    return tuple(step for step in schedule if isinstance(step, Reduce))


def copies_in(schedule: Schedule) -> Tuple[Copy, ...]:
    """Return the second half of a schedule: its root's value goes to all towers."""
    return tuple(step for step in schedule if isinstance(step, Copy))


def complete_on(schedule: Schedule) -> Set[int]:
    """Return the towers that have the sum in the end: the root, and those to which it is copied."""
    return {root_of(schedule), *(step.dst for step in copies_in(schedule))}


class Ops(Generic[V]):
    """The operations of a schedule on one kind of value: tensors, arrays, sets of towers."""

    def reduce(self, step: Reduce, here: V, others: List[V]) -> V:
        """Return the sum of the destination's value and of those of the sources."""
        raise NotImplementedError

    def finish(self, root: int, total: V) -> V:
        """Return the value that a complete sum becomes before it is copied: the mean."""
        return total

    def copy(self, step: Copy, value: V) -> V:
        """Return the source's value on the destination."""
        return value


def run(schedule: Schedule, values: Sequence[V], ops: Ops[V]) -> List[V]:
    """Run a schedule on one chunk: K values in, K values out."""
    held, root = list(values), root_of(schedule)
    for step in sums_in(schedule):
        held[step.dst] = ops.reduce(step, held[step.dst], [held[src] for src in step.srcs])
    held[root] = ops.finish(root, held[root])
    for copy in copies_in(schedule):
        held[copy.dst] = ops.copy(copy, held[copy.src])
    return held


class _Counting(Ops[FrozenSet[int]]):
    """Counts contributions: a value is the set of towers in it, with -1 once it is the finished sum."""

    def __init__(self, towers: int):
        self._all = frozenset(range(towers))

    def reduce(
        self, step: Reduce, here: FrozenSet[int], others: List[FrozenSet[int]]
    ) -> FrozenSet[int]:
        total = here
        for added in others:
            if total & added:
                raise HierAllreduceError(f"{step} adds tower {min(total & added)} a second time")
            total |= added
        return total

    def finish(self, root: int, total: FrozenSet[int]) -> FrozenSet[int]:
        if total != self._all:
            raise HierAllreduceError(
                f"the last sum, on tower {root}, misses towers {sorted(self._all - total)}"
            )
        return total | {-1}

    def copy(self, step: Copy, value: FrozenSet[int]) -> FrozenSet[int]:
        if -1 not in value:
            raise HierAllreduceError(
                f"{step} copies the sum of towers {sorted(value)} only; copy the complete sum"
            )
        return value


def check(steps: Iterable[Step], towers: int) -> Schedule:
    """Return a schedule of one chunk, after which each tower has the contribution of each tower exactly once.

    ::

        check([Reduce((1, 2), 0), Copy(0, 1), Copy(0, 2)], towers=3)

    Raises:
        HierAllreduceError: a step is no step, names a tower that does not exist, or adds or copies something else; or
            a tower does not get the sum. The message names the step, or the towers.
    """
    most = 2 * towers * towers
    schedule = [
        _read(step, towers) for step in islice(steps, most + 1)
    ]  # a user's generator may have no end
    if len(schedule) > most:
        raise HierAllreduceError(f"more than {most} steps; {towers} towers need {2 * towers - 2}")
    for step, following in zip(schedule, schedule[1:]):
        if isinstance(step, Copy) and isinstance(following, Reduce):
            raise HierAllreduceError(
                f"{step} comes before a sum, {following}; copy the complete sum"
            )
    counted = run(
        tuple(schedule), [frozenset([tower]) for tower in range(towers)], _Counting(towers)
    )
    without = [tower for tower, value in enumerate(counted) if -1 not in value]
    if without:
        raise HierAllreduceError(
            f"in the end towers {without} do not have the sum; copy it to them"
        )
    return tuple(schedule)


def _read(step: Any, towers: int) -> Step:
    """Return a step with plain whole numbers."""
    if not isinstance(step, (Reduce, Copy)):
        raise HierAllreduceError(f"{step!r}: expected a Reduce(srcs, dst) or a Copy(src, dst)")
    try:
        sources, dst = tuple(map(index, step.srcs)), index(step.dst)
    except TypeError:
        raise HierAllreduceError(
            f"{step}: expected numbers of towers, in srcs a tuple of them"
        ) from None
    if not sources or dst in sources or not {*sources, dst} <= set(range(towers)):
        expected = f"one destination and other towers as sources, from 0 to {towers - 1}"
        raise HierAllreduceError(f"{step}: expected {expected}")
    return Reduce(sources, dst) if isinstance(step, Reduce) else Copy(sources[0], dst)
