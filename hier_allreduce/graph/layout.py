"""Decisions before the first op: which gradients travel together, and by which steps.

::

    columns ─► sizes ─► plan ─► chunks, each with a schedule and a name
"""

from __future__ import annotations

import hashlib
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from ..formatting import count
from ..planning import Chunk, GradientSize, Plan, Schedule, Strategy, chunks_of, plan_for, root_of
from ..planning.algorithms import BY_NAME, schedules_of
from ..planning.chunks import Load, chunks_of_last, spread
from .columns import Column, bytes_of_row, row_counts, static_shape
from .devices import all_on_cpu
from .names import op_names

# concat has a GPU kernel for these
_PACKED = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
_LEAST_SHARE = 1 << 18  # bytes: below it, smaller chunks would cost more than they save


class Layout(NamedTuple):
    """The chunks of N columns on K towers, and their schedules.

    Attributes:
        columns: N columns.
        devices: K devices.
        plan: its schedules and chunk size.
        chunks: C chunks; a range's ``number`` is that of its column.
        schedules: of each chunk.
        names: of each chunk, in op names: of its variable, or of the first one in a packed chunk.
        wire: the 16-bit dtype in which float32 chunks travel, if they do.
    """

    columns: Sequence[Column]
    devices: Tuple[Any, ...]
    plan: Plan
    chunks: List[Chunk]
    schedules: Sequence[Schedule]
    names: List[str]
    wire: Optional[str] = None

    @property
    def fingerprint(self) -> str:
        """A text that differs between hosts with different plans."""
        digest = hashlib.sha256(repr((self.schedules, self.chunks, self.wire)).encode()).hexdigest()
        return f"{self.plan.algorithm}, {count(len(self.chunks), 'chunk')}, {digest[:12]}"

    def wire_dtype(self, column: Column) -> str:
        """Return the dtype in which a column's gradients travel."""
        return self.wire if self.wire and column.dtype == "float32" else column.dtype

    def roots(self) -> Dict[int, int]:
        """Return the tower that has each variable's sum first; all gradients must be whole."""
        roots = {}
        for chunk, schedule in zip(self.chunks, self.schedules):
            for part in chunk.ranges:
                roots[part.number] = root_of(schedule)
        return roots


def lay_out(
    columns: Sequence[Column],
    devices: Sequence[Any],
    strategy: Strategy,
    hosts: int = 1,
    load: Optional[Load] = None,
) -> Layout:
    """Return the layout of N columns.

    With a ``load`` each variable has one root, and the roots have about equal bytes.

    Raises:
        HierAllreduceError: the groups, the main or the algorithm's steps do not fit K towers.
    """
    sizes = [size_of(column, strategy.wire_dtype) for column in columns]  # N
    present = [size for size in sizes if size.dtype]
    plan = plan_for(strategy, present, len(devices), all_on_cpu(devices))
    if len(devices) * hosts == 1:
        plan = plan._replace(chunk_bytes=0)  # nothing travels
    share = sum(load.variables) // len(devices) if load else 0
    if share and strategy.chunk_bytes is None:
        # one chunk with all variables of a small model would leave the other roots without any
        plan = plan._replace(chunk_bytes=min(plan.chunk_bytes, max(share, _LEAST_SHARE)))
    are_whole = plan.whole or load is not None
    chunks = []  # C
    for chunk in chunks_of(sizes, plan.chunk_bytes, plan.pack_below, are_whole):
        if sizes[chunk.ranges[0].number].dtype:
            chunks.append(chunk)
    schedules = _schedules(plan, chunks, load)  # C
    names = []
    for chunk in chunks:
        ending = ".packed" if len(chunk.ranges) > 1 else ""
        names.append(columns[chunk.ranges[0].number].name + ending)
    return Layout(
        columns, tuple(devices), plan, chunks, schedules, op_names(names), strategy.wire_dtype
    )


def _schedules(plan: Plan, chunks: Sequence[Chunk], load: Optional[Load]) -> Sequence[Schedule]:
    """Return the schedule of each of C chunks."""
    if load is not None:
        return spread(chunks, plan.schedules, load)
    schedules = [plan.schedule(number) for number in range(len(chunks))]
    if plan.algorithm_of_last:
        of_last = schedules_of(BY_NAME[plan.algorithm_of_last], plan.towers)
        for number in chunks_of_last(chunks, plan.chunk_bytes):
            schedules[number] = of_last[number % len(of_last)]
    return schedules


def size_of(column: Column, wire: Optional[str] = None) -> GradientSize:
    """Return the size of a column's gradients as they travel; of sparse ones at most.

    float32 gradients travel in the 16-bit dtype ``wire``, if there is one.
    """
    is_narrowed = wire and column.dtype == "float32"
    itemsize = 2 if is_narrowed else tf.as_dtype(column.dtype or "float32").size
    if column.is_sparse:
        return _size_of_rows(column, itemsize)
    present = [grad for grad in column.grads if grad is not None]
    are_known = all(static_shape(grad).is_fully_defined() for grad in present)
    elements = None
    if are_known and column.shape.is_fully_defined():
        elements = column.shape.num_elements()
    packable = column.dtype in _PACKED and bool(elements)
    return GradientSize(elements, itemsize, column.dtype, packable)


def _size_of_rows(column: Column, itemsize: int) -> GradientSize:
    """Return the size of the rows of all towers: a sum has no more, and fewer if some are equal."""
    counts = [count for count in row_counts(column) if count is not None]
    are_known = len(counts) == len(row_counts(column)) and column.shape[1:].is_fully_defined()
    if not are_known:
        return GradientSize(None, itemsize, column.dtype, packable=False)
    row = bytes_of_row(column, itemsize)
    return GradientSize(sum(counts), row, column.dtype, packable=False)
