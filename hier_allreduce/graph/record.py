"""The record of each all-reduce in a graph, and a line about it for the log.

``audit`` compares the records with the nodes that TensorFlow executed.
"""

from __future__ import annotations

import logging
import sys
import weakref
from functools import lru_cache
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from ..compat import is_eager, tf1
from ..formatting import amount, count
from ..planning import Schedule, root_of
from ..planning.chunks import chunks_of_last
from ..planning.plan import sums_in
from .columns import Column
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
        copied: the op whose tensor is copied as it is, without a sum; "" if there is none.
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
    for number, schedule in enumerate(layout.schedules):
        value = values[root_of(schedule)][number]
        tensors += _sent_tensors(layout, number, value)
    recorded = AllReduce(scope, layout.plan.algorithm, layout.devices, hosts, tuple(tensors))
    _all_reduces.setdefault(tf1.get_default_graph(), []).append(recorded)


def _sent_tensors(layout: Layout, number: int, value: Any) -> Iterator[SentTensor]:
    """Yield the tensors of one chunk, whose ``value`` is that of its root."""
    schedule = layout.schedules[number]
    columns = [layout.columns[part.number] for part in layout.chunks[number].ranges]
    variables = tuple(column.name for column in columns)
    # TensorFlow drops zeros from a sum. If all other towers have them, the root's tensor is copied
    # as it is.
    is_copied = not sums_in(schedule) or _is_only_on(root_of(schedule), columns)
    for part, tensor in _parts(value).items():
        copied = str(tensor.op.name) if is_copied and not is_eager(tensor) else ""
        elements = None if part else tensor.shape.num_elements()
        yield SentTensor(layout.names[number] + part, variables, schedule, elements, copied)


def _is_only_on(root: int, columns: Sequence[Column]) -> bool:
    """Return whether no other tower has a gradient in these columns."""
    for column in columns:
        for tower, grad in enumerate(column.grads):
            if tower != root and grad is not None:
                return False
    return True


def _parts(value: Any) -> Dict[str, Any]:
    """Return the tensors of a chunk by the ends of their names."""
    if isinstance(value, tf.IndexedSlices):
        return {".values": value.values, ".indices": value.indices}
    return {"": value}


def describe(layout: Layout) -> str:
    """Return a line about an all-reduce of K ≥ 2 towers.

    ::

        2 towers on GPUs: flat, 1 chunk, 2 copies; each tower sends up to 4 MB in float32
    """
    towers = len(layout.devices)
    sent = [0] * towers
    copies = 0
    for chunk, schedule in zip(layout.chunks, layout.schedules):
        for step in schedule:
            copies += len(step.srcs)
            for src in step.srcs:
                sent[src] += chunk.bytes
    algorithm = layout.plan.algorithm
    if layout.plan.algorithm_of_last and chunks_of_last(layout.chunks, layout.plan.chunk_bytes):
        algorithm += f" ({layout.plan.algorithm_of_last} for the last gradient)"
    where = "CPU devices" if all_on_cpu(layout.devices) else "GPUs"
    chunks = count(len(layout.chunks), "chunk")
    columns = [layout.columns[chunk.ranges[0].number] for chunk in layout.chunks]
    dtypes = ", ".join(dict.fromkeys(map(layout.wire_dtype, columns)))
    unknown = sum(not chunk.bytes for chunk in layout.chunks)
    sizes = [f"up to {amount(max(sent))}"] if any(sent) else []
    sizes += [f"{count(unknown, 'tensor')} of unknown size"] if unknown else []
    return (
        f"{towers} towers on {where}: {algorithm}, {chunks}, {copies} copies; each tower"
        f" sends {' and '.join(sizes)} in {dtypes}"
    )


@lru_cache(maxsize=None)
def log_once(line: str) -> None:
    """Log a line, the same one once in a process.

    Where the program has set up no logging it is printed, because nobody would see it otherwise.
    """
    if _log.hasHandlers():
        _log.info(line)
    else:
        print(f"hier_allreduce: {line}", file=sys.stderr)
