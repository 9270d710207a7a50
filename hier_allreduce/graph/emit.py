"""A layout and the towers' tensors in, TensorFlow ops out.

The one interpreter of plans, ``planning.run``, runs here with tensors on devices as values. Three ways of adding up
exist, in ``reductions`` and ``gather``::

    Dense    a chunk of any dtype        add
    Narrow   a chunk in 16 bits          cast to float32, add, cast back before each transfer
    Gather   rows of sparse gradients    concatenate
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Dict, List, Optional, Sequence, Tuple

import tensorflow as tf

from ..planning import Copy, Ops, Plan, Reduce, run
from ..topology import Topology
from .compat import tf1
from .copy_order import CopyOrder
from .gather import Gather, arrival_orders
from .gradients import NARROW_DTYPES
from .hosts import CrossHostReduce
from .lane_memory import lane_memory
from .layout import Layout, columns_in, first_unit
from .packing import Tensors
from .reductions import Context, Dense, DeviceReduction, Narrow
from .units import DENSE

# Gradients of this many bytes may make the memory of a logical CPU device short: 256 MiB, of which Grappler takes 80 %.
# It counts them several times: as they are, as they arrive, and as results.
_LARGE = 32 << 20

ByChunk = Sequence[Dict[int, Tensors]]  # K towers' tensors by chunk
Names = Tuple[Tuple[Optional[str], ...], ...]


@dataclass(frozen=True)
class Emitted:
    """The record of what one call added to a graph, which ``audit`` compares with the executed graph.

    Each part of a sparse gradient is a chunk here.

    Attributes:
        scope: the call's name scope. Every op of chunk c is named ``scope + names[c] + "/…"``.
        plan: the plan inside this host.
        devices: the plan's devices: K towers, then their lanes.
        names: C names of the chunks.
        hosts: the number of hosts.
        variables: the names of each chunk's variables.
        machine: the topology for which the plan was made, if it was made for one.
        lane_memory: the bytes that each of a tower's L lanes needs.
        gpus: the number of each tower's GPU in the machine; empty where its device's own number is that.
        contributions: the names of the K×C tensors that are added up.
        results: the names of the K×C results; None where one is not wanted.
    """

    scope: str
    plan: Plan
    devices: Tuple[Any, ...]
    names: Tuple[str, ...]
    hosts: int = 1
    variables: Tuple[Tuple[str, ...], ...] = ()
    machine: Optional[Topology] = None
    lane_memory: Tuple[int, ...] = ()
    gpus: Tuple[int, ...] = ()
    contributions: Names = ()
    results: Names = ()


_emitted: weakref.WeakKeyDictionary[Any, List[Emitted]] = weakref.WeakKeyDictionary()


def emitting_graphs() -> List[Any]:
    """Return the graphs in which all-reduces were built, those of functions too."""
    return list(_emitted)


def emitted_in(graph: Any) -> List[Emitted]:
    """Return the records of the all-reduces built in ``graph``, in building order."""
    return list(_emitted.get(graph, ()))


def lane_memory_in(graph: Any) -> Tuple[int, ...]:
    """Return the bytes that each of a tower's lanes needs for all all-reduces in ``graph`` together."""
    return tuple(map(sum, zip_longest(*(call.lane_memory for call in emitted_in(graph)), fillvalue=0)))


class _ByChunk(Ops[Any]):
    """The reductions of C chunks as one: each step is done by its chunk's reduction."""

    def __init__(self, reductions: Sequence[DeviceReduction]):
        self._reductions = reductions

    def reduce(self, step: Reduce, own: Any, others: List[Any]) -> Any:
        return self._reductions[step.chunk].reduce(step, own, others)

    def finish(self, chunk: int, root: int, total: Any) -> Any:
        return self._reductions[chunk].finish(chunk, root, total)

    def copy(self, step: Copy, value: Any) -> Any:
        return self._reductions[step.chunk].copy(step, value)


def _reductions(layout: Layout, average: bool, across: CrossHostReduce) -> List[DeviceReduction]:
    """Return the reductions of a layout's C chunks; those of one kind share one, and with it its constants."""
    is_ordered = layout.in_order and not tf.executing_eagerly()  # eager copies are made in the plan's order anyway
    order = CopyOrder(layout.plan_of_parts(), layout.places.devices) if is_ordered else None
    is_large = sum(chunk.bytes for chunk in layout.chunks) >= _LARGE
    context = Context(layout.places, average, across, layout.names, order, is_large)
    rows = {
        number: first_unit(chunk, layout.units)
        for number, (chunk, kind) in enumerate(zip(layout.chunks, layout.kinds))
        if kind not in (DENSE, *NARROW_DTYPES)
    }
    gather = Gather(context, rows, arrival_orders(layout.plan, rows))
    by_kind = {DENSE: Dense(context), **{wire: Narrow(context, wire) for wire in NARROW_DTYPES}}
    return [by_kind.get(kind, gather) for kind in layout.kinds]


def emit(layout: Layout, packed: ByChunk, average: bool, across: CrossHostReduce) -> ByChunk:
    """Add the ops of the layout's plan to the default graph (or run them, eagerly).

    Args:
        layout: C chunks and a verified plan.
        packed: the tensors of each tower by chunk; in the copy half of a plan, of the chunks with their root there.
        average: whether the mean is wanted.
        across: what adds up the sums of several hosts.

    Returns:
        The reduced tensors of each tower by chunk; after the reduce half of a plan, of the chunks whose root it is.
    """
    reductions = _reductions(layout, average, across)
    values = [
        [reduction.start(tower, own[chunk]) if chunk in own else None for chunk, reduction in enumerate(reductions)]
        for tower, own in enumerate(packed)
    ]
    reduced = run(layout.plan, values, _ByChunk(reductions))
    results: List[Dict[int, Tensors]] = [{} for _ in layout.places.towers]
    for tower, device in enumerate(layout.places.towers):
        with tf1.device(device):
            for chunk in layout.wanted(tower):
                dtype = first_unit(layout.chunks[chunk], layout.units).columns[0].dtype
                results[tower][chunk] = reductions[chunk].end(chunk, reduced[tower][chunk], dtype)
    return results


def record(scope: str, layout: Layout, packed: ByChunk, reduced: ByChunk, hosts: int) -> None:
    """Record a call for :func:`emitted_in`; nothing for eager ops."""
    if tf.executing_eagerly():
        return
    of_any_tower = {chunk: tensors for own in packed for chunk, tensors in own.items()}
    variables = [tuple(column.name for column in columns_in(chunk, layout.units)) for chunk in layout.chunks]
    call = Emitted(
        scope,
        layout.plan_of_parts(),
        layout.places.devices,
        tuple(name for names in layout.names for name in names),
        hosts,
        tuple(own for own, names in zip(variables, layout.names) for _ in names),
        layout.machine,
        lane_memory(layout),
        layout.places.gpus,
        tuple(_tensor_names(layout, {**of_any_tower, **own}) for own in packed),
        tuple(_tensor_names(layout, own) for own in reduced),
    )
    _emitted.setdefault(tf1.get_default_graph(), []).append(call)


def _tensor_names(layout: Layout, tensors: Dict[int, Tensors]) -> Tuple[Optional[str], ...]:
    """Return the names of one tower's tensors, part by part; None for chunks that it does not have."""
    parts = [tensors.get(chunk, [None] * len(names)) for chunk, names in enumerate(layout.names)]
    return tuple(None if tensor is None else tensor.name for own in parts for tensor in own)
