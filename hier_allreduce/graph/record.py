"""The record of each all-reduce in a graph, which ``audit`` compares with the executed nodes."""

from __future__ import annotations

import weakref
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from ..planning import Schedule
from .layout import Layout
from .sums import Sum
from .tf import is_eager, tf1


class Recorded(NamedTuple):
    """One tensor that travels: a chunk, or the values or indices of a sparse gradient.

    Attributes:
        name: every op of it is named ``scope + name + "/…"``.
        variables: the names of the variables in it.
        schedule: its steps.
        contributions: the names of the K tensors that are added up; None where TensorFlow gives none.
        results: the names of the K results; None where one is not wanted.
    """

    name: str
    variables: Tuple[str, ...]
    schedule: Schedule
    contributions: Tuple[Optional[str], ...]
    results: Tuple[Optional[str], ...]


class Call(NamedTuple):
    """One all-reduce.

    Attributes:
        scope: its name scope.
        algorithm: the name of its plan's algorithm.
        devices: K devices.
        hosts: the number of hosts.
        tensors: all that travel.
    """

    scope: str
    algorithm: str
    devices: Tuple[Any, ...]
    hosts: int
    tensors: Tuple[Recorded, ...]


_calls: weakref.WeakKeyDictionary[Any, List[Call]] = weakref.WeakKeyDictionary()


def recorded_graphs() -> List[Any]:
    """Return the graphs in which all-reduces were built, those of functions too."""
    return list(_calls)


def recorded_in(graph: Any) -> List[Call]:
    """Return the all-reduces built in ``graph``, in building order."""
    return list(_calls.get(graph, ()))


def record(
    scope: str, layout: Layout, sums: Sequence[Sum], values: Sequence[Sequence[Any]], reduced: Sequence[Sequence[Any]]
) -> None:
    """Record an all-reduce for :func:`recorded_in`; nothing for eager ops.

    Args:
        scope: its name scope.
        layout: of its C chunks.
        sums: of each chunk.
        values: K rows of C values that are added up; None where a tower has none.
        reduced: K rows of C values.
    """
    if tf.executing_eagerly():
        return
    tensors = []
    for chunk, chunk_sum in enumerate(sums):
        column = [row[chunk] for row in values]
        root = next(value for value in column if value is not None)  # the only one, where copies follow
        for number, part in enumerate(chunk_sum.parts):
            tensors.append(
                Recorded(
                    layout.names[chunk] + part,
                    tuple(layout.columns[part.number].name for part in layout.chunks[chunk].ranges),
                    layout.schedules[chunk],
                    tuple(_name(root if value is None else value, number) for value in column),
                    tuple(_name(row[chunk], number) for row in reduced),
                )
            )
    hosts = sums[0].shared.hosts if sums else 1
    call = Call(scope, layout.plan.algorithm, layout.devices, hosts, tuple(tensors))
    _calls.setdefault(tf1.get_default_graph(), []).append(call)


def _name(value: Any, part: int) -> Optional[str]:
    """Return the name of a value's tensor; of rows, that of the numbered part."""
    if isinstance(value, tf.IndexedSlices):
        value = (value.values, value.indices)
    tensor = value[part] if isinstance(value, tuple) else value
    return None if tensor is None or is_eager(tensor) else str(tensor.name)
