"""What was built: the record of each all-reduce in a graph, and a line about it for the log.

``audit`` compares the records with the nodes that TensorFlow executed.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from ..compat import is_eager, tf1
from ..formatting import amount, count
from ..graphs import memory_of
from ..planning.chunks import Chunk
from ..planning.plan import Schedule, reductions, root_of
from .columns import have_rows_only
from .devices import all_on_cpu, session_with, tower_at
from .layout import Layout
from .lead import Edge
from .op_names import is_of_sum

_log = logging.getLogger("hier_allreduce")


class SentTensor(NamedTuple):
    """One tensor that towers send: a chunk, or the values or indices of a sparse gradient.

    ::

        sent = hier_allreduce.all_reduces()[0].tensors[0]
        sent.bytes, sent.root, sent.variables      # 4000000, 0, ("conv1/W", "conv1/b")
    """

    name: str  # its ops are named scope + name + "/…"
    variables: Tuple[str, ...]  # the names of the variables in it
    schedule: Schedule  # the moves by which it travels: sums to its root, copies from there
    elements: Optional[int]  # of one copy; None where only the training step knows
    dtype: str  # in which it travels
    is_rows: bool  # whether it is of a sparse gradient, and has as many elements at most
    copied: str  # the op whose tensor is copied as it is, without a sum; "" if there is none
    held: Tuple[str, ...] = ()  # the name of its tensor on each of K towers; "" where it is none

    @property
    def root(self) -> int:
        """The tower that has its sum first."""
        return root_of(self.schedule)

    @property
    def bytes(self) -> Optional[int]:
        """The size of one copy; None where only the training step knows."""
        return None if self.elements is None else self.elements * tf.as_dtype(self.dtype).size

    def __str__(self) -> str:
        variables = ", ".join(self.variables[:3]) + (", …" if len(self.variables) > 3 else "")
        size = "unknown size" if self.bytes is None else amount(self.bytes)
        at_most = "≤ " if self.is_rows else ""
        return f"{self.name}: {at_most}{size} in {self.dtype} on tower {self.root}: {variables}"


class AllReduce(NamedTuple):
    """One all-reduce, as it was built; ``print`` it.

    ::

        built = hier_allreduce.all_reduces()[0]
        built.algorithm, len(built.tensors)        # "flat", 3
    """

    scope: str  # the name scope of its ops
    algorithm: str  # the name of the plan's algorithm
    devices: Tuple[Any, ...]  # of K towers
    hosts: int  # the number of hosts
    tensors: Tuple[SentTensor, ...]  # that travel, in the order of their chunks
    description: str  # the line of the log
    edges: Tuple[Edge, ...]  # control edges: the op of a sum, and one of the pass that waits for it
    plan: str  # a digest that all-reduces with the same chunks and schedules share

    def tower_at(self, device: str) -> Optional[int]:
        """Return the first tower on an executed op's device; None if there is none."""
        return tower_at(device, self.devices)

    @staticmethod
    def is_of_sum(op_name: str) -> bool:
        """Return whether an op in the scope takes part in a sum, or in its mean."""
        return is_of_sum(op_name)

    def __str__(self) -> str:
        return "\n  ".join([f"{self.scope} {self.description}", *map(str, self.tensors)])


def all_reduces(graph: Optional[Any] = None) -> List[AllReduce]:
    """Return what was built in a graph: each all-reduce, in building order.

    ::

        for built in hier_allreduce.all_reduces(session.graph):
            print(built)              # its algorithm, chunks and bytes, and each chunk

    Args:
        graph: a ``tf.Graph``, or that of a function; by default the current one. Eager calls build
            nothing.
    """
    return list(memory_of(tf1.get_default_graph() if graph is None else graph).all_reduces)


def _sent_of(
    layout: Layout, chunk: Chunk, at_root: Any, totals: Sequence[Any]
) -> Iterator[SentTensor]:
    """Yield the tensors of a chunk: rows and their indices travel as two, called by the endings.

    ``at_root`` is what its root adds to the sum; ``totals`` are K sums.
    """
    columns = [layout.columns[span.gradient] for span in chunk.ranges]
    # TensorFlow drops zeros from a sum. If all other towers have them, the root's tensor is copied
    # as it is.
    elsewhere: List[Any] = []
    for column in columns:
        elsewhere += column.grads[: chunk.root] + column.grads[chunk.root + 1 :]
    is_copied = not reductions(chunk.schedule) or all(grad is None for grad in elsewhere)
    is_sparse = isinstance(at_root, tf.IndexedSlices)
    for ending, tensor in _parts(at_root).items():
        held = [_name_of(None if total is None else _parts(total)[ending]) for total in totals]
        elements = tensor.shape.num_elements()
        # The sum may have the rows of all towers, and not only those of the root.
        if is_sparse:
            height = columns[0].size.elements
            shape = tensor.shape if ending == ".indices" else columns[0].shape
            width = shape[1:].num_elements()
            elements = None if None in (height, width) else height * width
        yield SentTensor(
            name=chunk.name + ending,
            variables=tuple(column.name for column in columns),
            schedule=chunk.schedule,
            elements=elements,
            dtype=tensor.dtype.name if ending == ".indices" else columns[0].wire,
            is_rows=is_sparse,
            copied=str(tensor.op.name) if is_copied and not is_eager(tensor) else "",
            held=tuple(held),
        )


def record(
    scope: str,
    layout: Layout,
    packed: Sequence[Sequence[Any]],
    moved: Sequence[Sequence[Any]],
    description: str,
    edges: Sequence[Edge] = (),
) -> None:
    """Record a collective for :func:`all_reduces`; nothing for eager ops.

    ``packed`` has K rows of the C chunks that are moved; ``moved`` is C×K, None where a schedule
    brings nothing.
    """
    if tf.executing_eagerly():
        return
    sent: List[SentTensor] = []
    for chunk, at_towers, totals in zip(layout.chunks, zip(*packed), moved):
        sent += _sent_of(layout, chunk, at_towers[chunk.root], totals)
    built = AllReduce(
        scope=scope,
        algorithm=layout.plan.algorithm,
        devices=layout.devices,
        hosts=layout.hosts,
        tensors=tuple(sent),
        description=description,
        edges=tuple(edges),
        plan=layout.digest,
    )
    memory_of(tf1.get_default_graph()).all_reduces.append(built)


def _parts(chunk: Any) -> Dict[str, Any]:
    """Return the tensors of a chunk by the ends of their names: of rows, values and indices."""
    if isinstance(chunk, tf.IndexedSlices):
        return {".values": chunk.values, ".indices": chunk.indices}
    return {"": chunk}


def _name_of(tensor: Any) -> str:
    return "" if tensor is None or is_eager(tensor) else str(tensor.name)


def describe(layout: Layout) -> str:
    """Return a line about an all-reduce, or a part of one.

    ::

        2 towers on GPUs: flat, 1 chunk, 2 copies; each tower sends up to 4 MB in float32
    """
    # Count the bytes that each tower sends. Those of rows (True) are counted apart, because they
    # are only a bound.
    towers = len(layout.devices)
    sent_by_sparse: Dict[bool, List[int]] = {}
    unknown = copies = 0
    for chunk in layout.chunks:
        sources = [src for move in chunk.schedule for src in move.srcs]
        copies += len(sources)
        column = layout.column_of(chunk)
        if column.size.elements is None:
            unknown += 1
            continue
        sent = sent_by_sparse.setdefault(column.is_sparse, [0] * towers)
        for src in sources:
            sent[src] += chunk.bytes

    # Put the line together from what the user can change: devices, algorithm, chunks, dtypes.
    devices = "CPU devices" if all_on_cpu(layout.devices) else "GPUs"
    # TensorFlow's own error about a session without these devices has a hundred lines.
    session = session_with(layout.devices, layout.hosts)
    devices += f" of {session}" if session else ""
    chunks = count(len(layout.chunks), "chunk")
    line = f"{count(towers, 'tower')} on {devices}: {layout.plan.algorithm}, {chunks}"
    if not copies:
        return line
    dtypes = ", ".join(dict.fromkeys(layout.column_of(chunk).wire for chunk in layout.chunks))
    sizes = [f"up to {amount(max(sent_by_sparse[False]))}"] if False in sent_by_sparse else []
    sizes += [f"≤ {amount(max(sent_by_sparse[True]))} of rows"] if True in sent_by_sparse else []
    sizes += [f"{count(unknown, 'tensor')} of unknown size"] if unknown else []
    copied = f"{copies} copies" if copies > 1 else "1 copy"
    return (
        f"{line}, {copied}; each tower sends {' and '.join(sizes)} in {dtypes}{_sent_dense(layout)}"
    )


def _sent_dense(layout: Layout) -> str:
    """Return a clause about the sparse gradients that are made dense; empty if there are none."""
    made_dense = 0
    for column in layout.columns:
        made_dense += have_rows_only(column.present) and not column.is_sparse
    return f"; {count(made_dense, 'sparse gradient')} made dense" if made_dense else ""


@lru_cache(maxsize=None)
def log_once(line: str) -> None:
    """Log a line, the same one once in a process."""
    _log.info(line)
