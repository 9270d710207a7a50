"""Every decision about N columns, before the first op: which gradients travel together, and by which steps.

::

    columns ─► sizes ─► plan for the machine, or by the rule ─► chunks, each with a schedule and a name
"""

from __future__ import annotations

import hashlib
import logging
from functools import lru_cache
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import tensorflow as tf

from ..errors import HierAllreduceError
from ..formatting import count
from ..planning import Chunk, Gradient, Plan, Schedule, Strategy, chunks_of, plan_for, root_of
from ..planning.chunks import spread
from ..planning.plan import copies_in, sums_in
from ..planning.strategy import AUTO, THIS_MACHINE
from ..topology import Topology, this_machine
from .devices import all_on_cpu, device_numbers, gpu_numbers
from .matrix import Column
from .names import op_names

FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")

_log = logging.getLogger("hier_allreduce")
_logged: Set[str] = set()


class Layout(NamedTuple):
    """How N columns travel between K towers.

    Attributes:
        columns: N columns.
        devices: K devices.
        plan: its schedules and chunk size.
        chunks: C chunks; a range's ``number`` is that of its column.
        schedules: of each chunk.
        names: of each chunk, in op names.
        wire: the 16-bit dtype in which float32 chunks travel, if they do.
    """

    columns: Sequence[Column]
    devices: Tuple[Any, ...]
    plan: Plan
    chunks: List[Chunk]
    schedules: List[Schedule]
    names: List[str]
    wire: Optional[str] = None

    @property
    def fingerprint(self) -> str:
        """A text that differs between hosts with different plans."""
        digest = hashlib.sha256(repr((self.schedules, self.chunks, self.wire)).encode()).hexdigest()
        return f"{self.plan.algorithm}, {count(len(self.chunks), 'chunk')}, {digest[:12]}"

    def column(self, chunk: int) -> Column:
        """Return the first column in a chunk: all have one dtype, and a sparse one is alone."""
        return self.columns[self.chunks[chunk].ranges[0].number]

    def mains(self) -> Dict[int, int]:
        """Return the tower on which each variable is complete first; of a layout whose gradients are whole."""
        pairs = zip(self.chunks, map(root_of, self.schedules))
        return {part.number: root for chunk, root in pairs for part in chunk.ranges}

    def reduce_half(self) -> Layout:
        """Return the layout that ends when each chunk's root has the sum."""
        return self._replace(schedules=list(map(sums_in, self.schedules)))

    def copy_half(self) -> Layout:
        """Return the layout that begins there."""
        return self._replace(schedules=list(map(copies_in, self.schedules)), wire=None)


def lay_out(
    columns: Sequence[Column], devices: Tuple[Any, ...], strategy: Strategy, hosts: int = 1, whole: bool = False
) -> Layout:
    """Return the layout of N columns.

    Args:
        columns: of K gradients.
        devices: K devices.
        strategy: the user's choices.
        hosts: the number of hosts that have such columns.
        whole: whether each variable has one main: its gradient is not cut, and mains have equal bytes.

    Raises:
        HierAllreduceError: the groups, the main, the topology or the algorithm's steps do not fit K towers.
    """
    present = [number for number, column in enumerate(columns) if column.dtype]
    gradients = [_size(columns[number], strategy.wire_dtype) for number in present]
    on_cpu = all_on_cpu(devices)
    machine = _machine(strategy, devices, on_cpu)
    plan = plan_for(strategy, gradients, len(devices), machine, on_cpu)
    if len(devices) * hosts == 1:
        plan = plan._replace(chunk_bytes=0)  # nothing travels
    chunks = chunks_of(gradients, plan.chunk_bytes, plan.pack_below, whole or plan.whole)
    chunks = [
        chunk._replace(ranges=tuple(part._replace(number=present[part.number]) for part in chunk.ranges))
        for chunk in chunks
    ]
    schedules = spread(chunks, plan.schedules) if whole else [plan.schedule(chunk) for chunk in range(len(chunks))]
    if len(devices) > 1:
        _tell(plan, machine, len(chunks), sum(len(step.srcs) for schedule in schedules for step in schedule), on_cpu)
    return Layout(columns, devices, plan, chunks, schedules, _names(chunks, columns), strategy.wire_dtype)


def _size(column: Column, wire: Optional[str]) -> Gradient:
    """Return the size of a column's gradients as they travel."""
    is_known = all(getattr(grad, "shape", column.shape).is_fully_defined() for grad in column.grads if grad is not None)
    is_known = is_known and column.shape.is_fully_defined()
    elements = column.shape.num_elements() if is_known and not column.is_sparse else None
    packable = column.dtype in FLOATS and bool(elements)
    itemsize = 2 if wire and column.dtype == "float32" else int(tf.as_dtype(column.dtype).size)
    return Gradient(elements, itemsize, column.dtype, packable, is_flat=column.shape.ndims == 1)


def _machine(strategy: Strategy, devices: Sequence[Any], on_cpu: bool) -> Optional[Topology]:
    """Return the topology of the K devices, or None if there is nothing to plan for."""
    is_named = strategy.topology not in (None, THIS_MACHINE)
    if len(devices) == 1 or (on_cpu and not is_named):
        return None
    try:
        if is_named:
            machine = strategy.topology
            return (machine if isinstance(machine, Topology) else _loaded(machine)).subset(device_numbers(devices))
        if strategy.topology is None and strategy.algorithm != AUTO:
            return None
        gpus = gpu_numbers(devices)
        return this_machine(gpus) if gpus is not None else None
    except HierAllreduceError as error:
        if strategy.topology is not None:
            text = f"topology={strategy.topology!r} does not fit devices {list(devices)}: {error}"
            raise HierAllreduceError(text) from None
        _once(f"this machine is not planned for, since devices {list(devices)} are not those of nvidia-smi: {error}")
        return None


@lru_cache(maxsize=16)  # an eager program asks at every step
def _loaded(name: Any) -> Topology:
    return Topology.load(name)


def _names(chunks: Sequence[Chunk], columns: Sequence[Column]) -> List[str]:
    """Return the chunks' names, safe and unique: of their variable, or of the first one in a packed chunk."""
    names = []
    for chunk in chunks:
        name = columns[chunk.ranges[0].number].name
        names.append(f"{name}.packed" if len(chunk.ranges) > 1 else name)
    return op_names(names)


def _tell(plan: Plan, machine: Optional[Topology], chunks: int, copies: int, on_cpu: bool) -> None:
    """Log what is built; the same line once in a process."""
    where = machine.name if machine else "CPU devices" if on_cpu else "GPUs whose links are not known, by rule"
    _once(f"{where}, {plan.towers} towers: {plan.algorithm}, {count(chunks, 'chunk')}, {copies} copies")


def _once(line: str) -> None:
    if line not in _logged:
        _logged.add(line)
        _log.info(line)
