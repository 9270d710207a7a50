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
from .devices import hosts_of, tower_at, types_of
from .layout import Layout
from .lead import Edge
from .op_names import is_of_sum

_INDICES = ".indices"
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
    is_sparse: bool  # whether it is of a sparse gradient, and has as many elements at most
    copied: str  # the op whose tensor is copied as it is, without a sum; "" if there is none
    held: Dict[int, str]  # the names of its tensor on the towers that have the sum

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
        at_most = "≤ " if self.is_sparse else ""
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


def record(
    layout: Layout,
    scope: str,
    packed: Sequence[Sequence[Any]],
    moved: Sequence[Sequence[Any]],
    edges: Optional[Sequence[Edge]],
) -> None:
    """Record a collective for :func:`all_reduces`, but not eager ops; log a line about its sums.

    ``packed`` has K rows of the C chunks that are moved; ``moved`` is C×K, None where a schedule
    brings nothing. ``edges`` are those of :func:`.lead.limit_lead`.
    """
    description = describe(layout, edges)
    if any(reductions(chunk.schedule) for chunk in layout.chunks):
        log_once(description)
    if tf.executing_eagerly():
        return
    sent: List[SentTensor] = []
    for chunk, at_towers, totals in zip(layout.chunks, zip(*packed), moved):
        sent += _sent_of(layout, chunk, at_towers[chunk.root], totals)
    built = AllReduce(
        scope=scope,
        algorithm=layout.plan.algorithm,
        devices=layout.devices,
        hosts=hosts_of(layout.cluster),
        tensors=tuple(sent),
        description=description,
        edges=tuple(edges or ()),
    )
    memory_of(tf1.get_default_graph()).all_reduces.append(built)


def describe(layout: Layout, edges: Optional[Sequence[Edge]]) -> str:
    """Return a line about an all-reduce, or a part of one.

    ::

        8 towers on GPUs: flat_hierarchical, 41 chunks in float32; 52 control edges
    """
    # The line has what the user can change: devices, algorithm, chunks, dtypes.
    towers = count(len(layout.devices), "tower")
    types = types_of(layout.devices)
    if types == {"CPU"}:
        towers += " on CPU devices"
    elif types == {"GPU"}:
        towers += " on GPUs"
    chunks = count(len(layout.chunks), "chunk")
    wires = [layout.columns[chunk.first].wire for chunk in layout.chunks]
    dtypes = ", ".join(dict.fromkeys(wires))
    held = "no edges: all gradients are ready together"
    if edges is not None:
        held = count(len(edges), "control edge")
    return f"{towers}: {layout.plan.algorithm}, {chunks} in {dtypes}; {held}"


def _sent_of(
    layout: Layout, chunk: Chunk, at_root: Any, totals: Sequence[Any]
) -> Iterator[SentTensor]:
    """Yield the tensors of a chunk: values and indices of slices travel as two.

    ``at_root`` is what its root adds to the sum; ``totals`` are K sums.
    """
    columns = [layout.columns[span.gradient] for span in chunk.ranges]
    # TensorFlow drops zeros from a sum. Where all other towers have them, the root's tensor is
    # copied as it is.
    is_alone = all({*column.towers} <= {chunk.root} for column in columns)
    is_copied = is_alone or not reductions(chunk.schedule)
    arrived = {tower: total for tower, total in enumerate(totals) if total is not None}
    for ending, tensor in _parts(at_root).items():
        is_index = ending == _INDICES
        shape = tensor.shape
        # The sum may have the slices of all towers, and not only those of the root.
        if ending:
            rest = [] if is_index else columns[0].shape[1:]
            shape = tf.TensorShape([columns[0].size.elements]).concatenate(rest)
        yield SentTensor(
            name=chunk.name + ending,
            variables=tuple(column.name for column in columns),
            schedule=chunk.schedule,
            elements=shape.num_elements(),
            dtype=tensor.dtype.name if is_index else columns[0].wire,
            is_sparse=bool(ending),
            copied=str(tensor.op.name) if is_copied and not is_eager(tensor) else "",
            held={tower: _parts(total)[ending].name for tower, total in arrived.items()},
        )


def _parts(chunk: Any) -> Dict[str, Any]:
    """Return the tensors of a chunk by the ends of their names: of slices, values and indices."""
    if isinstance(chunk, tf.IndexedSlices):
        return {".values": chunk.values, _INDICES: chunk.indices}
    return {"": chunk}


@lru_cache(maxsize=None)
def log_once(line: str) -> None:
    """Log a line, the same one once in a process."""
    _log.info(line)
