"""The memory that a layout needs on lanes, whose size is fixed before TensorFlow starts.

::

    a chunk of 4 MB on a lane        arrives from its tower   4 MB
                                     arrives from a lane      4 MB ─► their sum takes the place of one of them
                                     the total arrives        4 MB

What a step allocates on a lane is counted as if nothing were freed before its end, so that the sum does not depend on
the order in which TensorFlow runs it.
"""

from __future__ import annotations

from collections import Counter
from typing import Iterator, NamedTuple, Tuple

from ..errors import HierAllreduceError
from ..formatting import amount
from ..planning import Reduce
from .gradients import NARROW_DTYPES
from .layout import Layout, first_unit
from .units import DENSE

_ROUNDING = 256  # bytes: TensorFlow's allocator rounds every tensor up


class _Sizes(NamedTuple):
    """Bytes of one chunk: as its tower holds it, as it travels, and as float32 if it is cast to be added up, else 0."""

    held: int
    sent: int
    added: int


def lane_memory(layout: Layout) -> Tuple[int, ...]:
    """Return the bytes that each of a tower's L lanes needs: the most of all towers.

    Chunks whose shape is known only when the step runs count as empty.
    """
    plan = layout.plan
    if not plan.lanes:
        return ()
    needed: Counter = Counter()
    for device, size in allocations(layout):
        needed[device] += -(-size // _ROUNDING) * _ROUNDING
    return tuple(max(needed[plan.lane(tower, lane)] for tower in range(plan.towers)) for lane in range(plan.lanes))


def _sizes(layout: Layout) -> Iterator[_Sizes]:
    """Yield the sizes of each chunk; each part of a sparse gradient is one."""
    for chunk, kind in zip(layout.chunks, layout.kinds):
        unit = first_unit(chunk, layout.units)
        if kind in NARROW_DTYPES:
            itemsize = unit.spec.itemsize
            yield _Sizes(chunk.bytes, chunk.bytes * 2 // itemsize, chunk.bytes * 4 // itemsize)
        elif kind == DENSE:
            yield _Sizes(chunk.bytes, chunk.bytes, 0)
        else:
            sizes = [unit.part_spec(part).bytes for part in unit.parts]
            yield from (_Sizes(size, size, 0) for size in sizes)


def allocations(layout: Layout) -> Iterator[Tuple[int, int]]:
    """Yield (device, bytes) of the tensors of one step; sums and means are formed in the memory of what is added."""
    plan, sizes = layout.plan_of_parts(), list(_sizes(layout))
    for step in plan.steps:
        size = sizes[step.chunk]
        if not isinstance(step, Reduce):
            yield step.dst, size.sent
            continue
        for src in step.srcs:
            enters = plan.tower(src) == plan.tower(step.dst)
            yield step.dst, size.held if enters else size.sent
            if size.added and not (enters and size.held == size.added):
                yield step.dst, size.added
            if size.added and not enters:
                yield src, size.sent
    for chunk, root in enumerate(plan.roots):
        if sizes[chunk].added:
            yield root, sizes[chunk].sent


def check_lane_memory(layout: Layout) -> None:
    """Check that the lanes have the memory that the layout needs, where it is known how much they have.

    Raises:
        HierAllreduceError: a lane has less; the message says how much each lane needs.
    """
    needed = lane_memory(layout)
    for lane, (needs, has) in enumerate(zip(needed, [lane.memory for lane in layout.places.lanes])):
        if 0 < has < needs:
            limits = [max(1, size) for size in needed]
            raise HierAllreduceError(
                f"lane {lane} of each tower has {amount(has, binary=True)} of memory, and this all-reduce needs"
                f" {amount(needs, binary=True)} there; use gpu_lanes(…, memory_limit={limits}), or fewer bytes in one"
                " all-reduce"
            )
