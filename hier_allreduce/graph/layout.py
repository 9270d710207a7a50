"""Every decision about N columns, before the first op: which gradients travel together, and by which steps.

::

    columns ─► sizes ─► plan ─► chunks, each with a schedule and a name
"""

from __future__ import annotations

import hashlib
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from ..formatting import count
from ..planning import Chunk, Gradient, Plan, Schedule, Strategy, chunks_of, plan_for, root_of
from ..planning.chunks import Load, spread
from .devices import all_on_cpu
from .matrix import Column, static_shape
from .names import op_names

_PACKED = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)  # concat has a GPU kernel for these

_LEAST_SHARE = (
    1 << 18
)  # bytes of variables on a main, for which smaller chunks would cost more than they save


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

    def mains(self) -> Dict[int, int]:
        """Return the tower on which each variable is complete first; of a layout whose gradients are whole."""
        pairs = zip(self.chunks, map(root_of, self.schedules))
        return {part.number: root for chunk, root in pairs for part in chunk.ranges}


def lay_out(
    columns: Sequence[Column],
    devices: Sequence[Any],
    strategy: Strategy,
    hosts: int = 1,
    load: Optional[Load] = None,
) -> Layout:
    """Return the layout of N columns; with a ``load``, each variable has one main, and mains about equal bytes.

    Raises:
        HierAllreduceError: the groups, the main or the algorithm's steps do not fit K towers.
    """
    gradients = [size_of(column, strategy.wire_dtype) for column in columns]
    on_cpu = all_on_cpu(devices)
    added = [size for size in gradients if size.dtype]
    plan = plan_for(strategy, added, len(devices), on_cpu)
    if len(devices) * hosts == 1:
        plan = plan._replace(chunk_bytes=0)  # nothing travels
    share = sum(load.variables) // len(devices) if load else 0
    if share and strategy.chunk_bytes is None:
        # one chunk with all variables of a small model would leave the other mains without any
        plan = plan._replace(chunk_bytes=min(plan.chunk_bytes, max(share, _LEAST_SHARE)))
    chunks = chunks_of(gradients, plan.chunk_bytes, plan.pack_below, bool(load) or plan.whole)
    chunks = [chunk for chunk in chunks if gradients[chunk.ranges[0].number].dtype]
    schedules = (
        spread(chunks, plan.schedules, load)
        if load
        else [plan.schedule(chunk) for chunk in range(len(chunks))]
    )
    names = [
        columns[chunk.ranges[0].number].name + ".packed" * (len(chunk.ranges) > 1)
        for chunk in chunks
    ]
    return Layout(
        columns, tuple(devices), plan, chunks, schedules, op_names(names), strategy.wire_dtype
    )


def size_of(column: Column, wire: Optional[str] = None) -> Gradient:
    """Return the size of a column's gradients as they travel: float32 ones in the 16-bit dtype ``wire``, if any."""
    shapes = [column.shape, *(static_shape(grad) for grad in column.grads if grad is not None)]
    is_known = not column.is_sparse and all(shape.is_fully_defined() for shape in shapes)
    elements = column.shape.num_elements() if is_known else None
    itemsize = (
        2 if wire and column.dtype == "float32" else tf.as_dtype(column.dtype or "float32").size
    )
    packable = column.dtype in _PACKED and bool(elements)
    return Gradient(elements, itemsize, column.dtype, packable, is_flat=column.shape.ndims == 1)
