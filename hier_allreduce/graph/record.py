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
from ..planning import Chunk, Schedule
from ..planning.plan import sums_in
from .columns import Column, has_rows_only
from .devices import all_on_cpu
from .layout import Layout, size_of

_log = logging.getLogger("hier_allreduce")


class SentTensor(NamedTuple):
    """One tensor that towers send: a chunk, or the values or indices of a sparse gradient.

    Attributes:
        name: every op of it is named ``scope + name + "/…"``.
        variables: the names of the variables in it.
        schedule: its steps.
        elements: of one copy; None where the shape is known only when the step runs.
        is_rows: whether it is of a sparse gradient, and has as many ``elements`` at most.
        copied: the op whose tensor is copied as it is, without a sum; "" if there is none.
    """

    name: str
    variables: Tuple[str, ...]
    schedule: Schedule
    elements: Optional[int]
    is_rows: bool
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
        tensors += _sent_tensors(layout, chunk, values[chunk.root][number])
    recorded = AllReduce(scope, layout.plan.algorithm, layout.devices, hosts, tuple(tensors))
    _all_reduces.setdefault(tf1.get_default_graph(), []).append(recorded)


def _sent_tensors(layout: Layout, chunk: Chunk, value: Any) -> Iterator[SentTensor]:
    """Yield the tensors of one chunk, whose ``value`` is that of its root."""
    columns = [layout.columns[part.number] for part in chunk.ranges]
    variables = tuple(column.name for column in columns)
    # TensorFlow drops zeros from a sum. If all other towers have them, the root's tensor is copied
    # as it is.
    is_copied = not sums_in(chunk.steps) or _is_only_on(chunk.root, columns)
    for part, tensor in _parts(value).items():
        copied = str(tensor.op.name) if is_copied and not is_eager(tensor) else ""
        elements = tensor.shape.num_elements()
        if columns[0].is_sparse:
            rows = size_of(columns[0]).elements
            elements = None if rows is None else rows * tensor.shape[1:].num_elements()
        name = chunk.name + part
        yield SentTensor(name, variables, chunk.steps, elements, columns[0].is_sparse, copied)


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
    sent_by_kind: Dict[bool, List[int]] = {}  # bytes from each tower: rows (True), others (False)
    unknown = copies = 0
    for chunk in layout.chunks:
        column = layout.column_of(chunk)
        sources = [src for step in chunk.steps for src in step.srcs]
        copies += len(sources)
        if size_of(column).elements is None:
            unknown += 1
            continue
        sent = sent_by_kind.setdefault(column.is_sparse, [0] * towers)
        for src in sources:
            sent[src] += chunk.bytes
    algorithm = layout.plan.algorithm
    if any(chunk.steps not in layout.plan.schedules for chunk in layout.chunks):
        algorithm += f" ({layout.plan.algorithm_of_last} for the last gradient)"
    where = "CPU devices" if all_on_cpu(layout.devices) else "GPUs"
    where += " with control edges" if layout.has_edges else ""
    chunks = count(len(layout.chunks), "chunk")
    dtypes = ", ".join(dict.fromkeys(map(layout.wire_dtype, layout.chunks)))
    sizes = [f"up to {amount(max(sent_by_kind[False]))}"] if False in sent_by_kind else []
    sizes += [f"≤ {amount(max(sent_by_kind[True]))} of rows"] if True in sent_by_kind else []
    sizes += [f"{count(unknown, 'tensor')} of unknown size"] if unknown else []
    return (
        f"{towers} towers on {where}: {algorithm}, {chunks}, {copies} copies; each tower"
        f" sends {' and '.join(sizes)} in {dtypes}{_sent_dense(layout)}"
    )


def _sent_dense(layout: Layout) -> str:
    """Return a clause about the sparse gradients that are made dense; empty if there are none."""
    columns = [c for c in layout.columns if has_rows_only(c) and not c.is_sparse]
    if not columns:
        return ""
    dense = [size_of(column, layout.wire) for column in columns]
    rows = [size_of(column._replace(is_sparse=True), layout.wire) for column in columns]
    clause = f"; {count(len(columns), 'sparse gradient')} made dense"
    if any(size.elements is None for size in (*dense, *rows)):
        return clause
    sizes = [amount(sum(size.bytes for size in kind)) for kind in (dense, rows)]
    return f"{clause}, {sizes[0]} instead of ≤ {sizes[1]} of rows"


@lru_cache(maxsize=None)
def log_once(line: str) -> None:
    """Log a line, the same one once in a process.

    Where the program has set up no logging it is printed, because nobody would see it otherwise.
    """
    if _log.hasHandlers():
        _log.info(line)
    else:
        print(f"hier_allreduce: {line}", file=sys.stderr)
