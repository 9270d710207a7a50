"""The record of each all-reduce in a graph, which ``audit`` compares with the executed nodes; and the log's line."""

from __future__ import annotations

import logging
import sys
import weakref
from functools import lru_cache
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from ..compat import is_eager, tf1
from ..formatting import amount, count
from ..planning import Schedule, root_of
from ..planning.plan import sums_in
from .devices import all_on_cpu
from .layout import Layout

_log = logging.getLogger("hier_allreduce")


class SentTensor(NamedTuple):
    """One tensor that towers send: a chunk, or the values or indices of a sparse gradient.

    Attributes:
        name: every op of it is named ``scope + name + "/…"``.
        variables: the names of the variables in it.
        schedule: its steps.
        elements: of one copy; None where the shape is known only when the step runs.
        copied: the op whose tensor is copied as it is, without a sum; else "", as for an eager tensor.
    """

    name: str
    variables: Tuple[str, ...]
    schedule: Schedule
    elements: Optional[int]
    copied: str


class AllReduce(NamedTuple):
    """One all-reduce, as it was built.

    Attributes:
        scope: the name scope of its ops.
        algorithm: its plan's.
        devices: of K towers.
        hosts: their number.
        tensors: that travel.
    """

    scope: str
    algorithm: str
    devices: Tuple[Any, ...]
    hosts: int
    tensors: Tuple[SentTensor, ...]


_all_reduces: weakref.WeakKeyDictionary[Any, List[AllReduce]] = weakref.WeakKeyDictionary()


def recorded_graphs() -> List[Any]:
    """Return the graphs, also of functions, in which all-reduces were built."""
    return list(_all_reduces)


def recorded_in(graph: Any) -> List[AllReduce]:
    """Return the all-reduces built in ``graph``, in building order."""
    return list(_all_reduces.get(graph, ()))


def record(scope: str, layout: Layout, hosts: int, values: Sequence[Sequence[Any]]) -> None:
    """Record an all-reduce of K rows of C chunks for :func:`recorded_in`; nothing for eager ops."""
    if tf.executing_eagerly():
        return
    tensors: List[SentTensor] = []
    for number, chunk in enumerate(layout.chunks):
        schedule, name = layout.schedules[number], layout.names[number]
        columns = [layout.columns[part.number] for part in chunk.ranges]
        root = root_of(schedule)
        value = values[root][number]
        # TensorFlow drops zeros from a sum: if all other towers have them, the root's tensor is copied
        is_lonely = all(
            column.grads[tower] is None
            for column in columns
            for tower in range(len(layout.devices))
            if tower != root
        )
        is_copied = is_lonely or not sums_in(schedule)
        for part, tensor in _parts(value).items():
            copied = str(tensor.op.name) if is_copied and not is_eager(tensor) else ""
            elements = None if part else tensor.shape.num_elements()
            variables = tuple(column.name for column in columns)
            tensors.append(SentTensor(name + part, variables, schedule, elements, copied))
    recorded = AllReduce(scope, layout.plan.algorithm, layout.devices, hosts, tuple(tensors))
    _all_reduces.setdefault(tf1.get_default_graph(), []).append(recorded)


def _parts(value: Any) -> Dict[str, Any]:
    """Return the tensors of a chunk by the ends of their names."""
    if isinstance(value, tf.IndexedSlices):
        return {".values": value.values, ".indices": value.indices}
    return {"": value}


def describe(layout: Layout) -> str:
    """Return a line about an all-reduce of K ≥ 2 towers.

    ::

        8 towers on GPUs: flat_tree, 13 chunks, 182 copies; each tower sends up to 178 MB in float32
    """
    towers = len(layout.devices)
    sent = [0] * towers
    for chunk, schedule in zip(layout.chunks, layout.schedules):
        for step in schedule:
            for src in step.srcs:
                sent[src] += chunk.bytes
    copies = sum(len(step.srcs) for schedule in layout.schedules for step in schedule)
    columns = [layout.columns[chunk.ranges[0].number] for chunk in layout.chunks]
    dtypes = dict.fromkeys(layout.wire_dtype(column) for column in columns)
    unknown = sum(not chunk.bytes for chunk in layout.chunks)
    where = "CPU devices" if all_on_cpu(layout.devices) else "GPUs"
    return (
        f"{towers} towers on {where}: {layout.plan.algorithm}, "
        f"{count(len(layout.chunks), 'chunk')}, {copies} copies; "
        f"each tower sends up to {amount(max(sent))} in {', '.join(dtypes)}"
        + (f", and {count(unknown, 'tensor')} of unknown size" if unknown else "")
    )


@lru_cache(maxsize=None)
def log_once(line: str) -> None:
    """Log a line, the same one once in a process; print it where the program has set up no logging."""
    if _log.hasHandlers():
        _log.info(line)
    else:  # nobody would see it
        print(f"hier_allreduce: {line}", file=sys.stderr)
