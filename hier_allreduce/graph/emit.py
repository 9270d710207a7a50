"""A plan and tensors in, TensorFlow ops out.

The one interpreter of plans, ``planning.run``, runs here with tensors on devices as values. Three ways of adding up
exist, in ``reductions`` and ``gather``::

    Dense    a chunk of any dtype        add
    Narrow   a chunk in 16 bits          cast to float32, add, cast back before each transfer
    Gather   rows of sparse gradients    concatenate
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import tensorflow as tf

from ..planning import Copy, Ops, Plan, Reduce, run
from ..topology import Topology
from .compat import forget_colocation, tf1
from .copy_order import CopyOrder
from .devices import Places
from .entries import COUNTS, INDICES, VALUES
from .gather import Count, Gather, GatherIndices, OnRoots
from .gradients import NARROW_DTYPES
from .hosts import CrossHostReduce
from .lane_memory import lane_memory
from .layout import Layout
from .reductions import Dense, DeviceReduction, Narrow

# Gradients of this many bytes may make the memory of a logical CPU device short: 256 MiB, of which Grappler takes 80 %.
# It counts them several times: as they are, as they arrive, and as results.
_LARGE = 32 << 20

Tensors = Sequence[Sequence[Any]]  # K×C
Names = Tuple[Tuple[Optional[str], ...], ...]  # of them


@dataclass(frozen=True)
class Emitted:
    """The record of what one call added to a graph, which ``audit`` compares with the executed graph.

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


def reductions_of(
    layout: Layout, places: Places, average: bool, across: Optional[CrossHostReduce] = None
) -> List[DeviceReduction]:
    """Return the reductions of a layout's C chunks; those of one kind share one, and with it its constants.

    Args:
        layout: the chunks, their names, and how each is added up.
        places: the towers' devices and their lanes.
        average: whether the mean is wanted.
        across: what adds up the sums of several hosts.
    """
    rows, on_roots, names = layout.sparse_rows(), OnRoots(), layout.names

    def reduction(kind: str) -> DeviceReduction:
        if kind in NARROW_DTYPES:
            return Narrow(places, average, names, kind, across)
        if kind == VALUES:
            return Gather(places, average, names, rows, on_roots)
        if kind in (INDICES, COUNTS):
            return {INDICES: GatherIndices, COUNTS: Count}[kind](places, names, rows, on_roots)
        return Dense(places, average, names, across)

    by_kind = {kind: reduction(kind) for kind in dict.fromkeys(layout.kinds)}
    is_large = sum(chunk.bytes for chunk in layout.chunks) >= _LARGE
    for made in by_kind.values():
        made.is_large = is_large
    return [by_kind[kind] for kind in layout.kinds]


def emit(
    plan: Plan,
    tensors: Sequence[Sequence[Any]],
    places: Places,
    reductions: Sequence[DeviceReduction],
    only_roots: bool = False,
    in_order: bool = False,
) -> List[List[Any]]:
    """Add the plan's ops to the default graph (or run them, eagerly).

    Args:
        plan: a verified plan of K towers and C chunks, with as many lanes as ``places``.
        tensors: ``tensors[tower][chunk]``, K×C.
        places: the towers' devices and their lanes.
        reductions: C reductions, one for each chunk.
        only_roots: whether only each chunk's result on its root is wanted, as after the reduce half of a plan.
        in_order: whether each sender's copies of a bucket leave in the plan's order: see :class:`.CopyOrder`. If not,
            TensorFlow chooses an order. Eager copies are made in the plan's order anyway.

    Returns:
        K×C tensors, entry (k, c) on the device of tower k; None where it is not wanted.
    """
    order = CopyOrder(plan, places.devices) if in_order and not tf.executing_eagerly() else None
    for reduction in reductions:
        reduction.order = order
    values = [
        [reductions[chunk].start(tower, tensor) for chunk, tensor in enumerate(row)]
        for tower, row in enumerate(tensors)
    ]
    reduced = run(plan, values, _ByChunk(reductions))
    results: List[List[Any]] = [[None] * plan.chunks for _ in places.towers]
    for tower, device in enumerate(places.towers):
        with tf1.device(device):
            for chunk, root in enumerate(plan.roots):
                if tower == root or not only_roots:
                    dtype = tensors[tower][chunk].dtype
                    results[tower][chunk] = reductions[chunk].end(chunk, reduced[tower][chunk], dtype)
    return results


@contextlib.contextmanager
def record_call(
    name: str, layout: Layout, places: Places, hosts: int = 1
) -> Iterator[Callable[[Tensors, Tensors], None]]:
    """Open the name scope of one call, free of outer colocation, and record the call for ``audit``.

    Yields:
        a function that takes the K×C tensors that are added up, and the K×C results.
    """
    moved: List[Tensors] = []
    with forget_colocation(), tf1.name_scope(name) as scope:
        yield lambda contributions, results: moved.extend((contributions, results))
    if not tf.executing_eagerly():
        contributions, results = (tuple(tuple(map(_tensor_name, row)) for row in rows) for rows in moved)
        record = Emitted(
            scope,
            layout.plan,
            places.devices,
            tuple(layout.names),
            hosts=hosts,
            variables=tuple(layout.variables),
            machine=layout.machine,
            lane_memory=lane_memory(layout),
            gpus=layout.lanes.gpus,
            contributions=contributions,
            results=results,
        )
        _emitted.setdefault(tf1.get_default_graph(), []).append(record)


def _tensor_name(tensor: Optional[Any]) -> Optional[str]:
    return None if tensor is None else tensor.name
