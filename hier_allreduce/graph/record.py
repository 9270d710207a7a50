"""The record of each all-reduce in a graph, which ``audit`` compares with the executed nodes."""

from __future__ import annotations

import weakref
from typing import Any, List, NamedTuple, Sequence, Tuple

import tensorflow as tf

from ..compat import is_eager, tf1
from ..planning import Schedule, root_of
from ..planning.plan import sums_in
from .layout import Layout


class Recorded(NamedTuple):
    """One tensor that travels: a chunk, or the values or indices of a sparse gradient.

    Attributes:
        name: every op of it is named ``scope + name + "/…"``.
        variables: the names of the variables in it.
        schedule: its steps.
        copied: the op whose tensor is copied, if there are no sums; else "", as for an eager tensor.
    """

    name: str
    variables: Tuple[str, ...]
    schedule: Schedule
    copied: str


class Call(NamedTuple):
    """One all-reduce: its name scope, its plan's algorithm, K devices, the number of hosts, the tensors that travel."""

    scope: str
    algorithm: str
    devices: Tuple[Any, ...]
    hosts: int
    tensors: Tuple[Recorded, ...]


_calls: weakref.WeakKeyDictionary[Any, List[Call]] = weakref.WeakKeyDictionary()


def recorded_graphs() -> List[Any]:
    """Return the graphs, also of functions, in which all-reduces were built."""
    return list(_calls)


def recorded_in(graph: Any) -> List[Call]:
    """Return the all-reduces built in ``graph``, in building order."""
    return list(_calls.get(graph, ()))


def record(scope: str, layout: Layout, hosts: int, values: Sequence[Sequence[Any]]) -> None:
    """Record an all-reduce of K rows of C chunks for :func:`recorded_in`; nothing for eager ops."""
    if tf.executing_eagerly():
        return
    tensors = []
    for number, (chunk, schedule, name) in enumerate(
        zip(layout.chunks, layout.schedules, layout.names)
    ):
        variables = tuple(layout.columns[part.number].name for part in chunk.ranges)
        value = values[root_of(schedule)][number]
        is_sparse = isinstance(value, tf.IndexedSlices)
        parts = {".values": value.values, ".indices": value.indices} if is_sparse else {"": value}
        for part, tensor in parts.items():
            copied = "" if sums_in(schedule) or is_eager(tensor) else str(tensor.op.name)
            tensors.append(Recorded(name + part, variables, schedule, copied))
    call = Call(scope, layout.plan.algorithm, layout.devices, hosts, tuple(tensors))
    _calls.setdefault(tf1.get_default_graph(), []).append(call)
