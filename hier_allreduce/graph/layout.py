"""Decisions before the first op: which gradients travel together, and by which moves.

::

    columns ─► sizes ─► plan ─► chunks, each with its schedule and a name
"""

from __future__ import annotations

import hashlib
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import tensorflow as tf

from ..compat import is_eager
from ..formatting import count
from ..needs import needed_by, sources
from ..planning.chunks import Chunk, GradientSize, OwnedBytes, chunks_of
from ..planning.plan import Plan, Schedule, is_direct
from ..planning.schedules import scheduled
from ..planning.strategy import Strategy, plan_for
from .columns import Column, bytes_of_row, itemsize_of, row_counts
from .devices import all_on_cpu
from .lead import takes_edges
from .names import op_names
from .substitution import Substitute

if TYPE_CHECKING:
    from ..cluster import Cluster

# Only these dtypes are packed, because concat has GPU kernels for them.
_PACKABLE = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
# A chunk of an update that is spread over the roots has at least so many bytes, because smaller
# ones would cost more than they save.
_LEAST_SHARE = 1 << 18


class Layout(NamedTuple):
    """The chunks of N columns on K towers.

    Attributes:
        columns: N columns.
        devices: K devices.
        plan: the schedules and the chunk size.
        sizes: N sizes of the columns' gradients, as they travel.
        chunks: C chunks; a range's ``number`` is that of its column.
        wire: the 16-bit dtype in which float32 chunks travel, if they do.
        has_edges: whether the towers' backward passes may wait for earlier sums.
        average: the mean instead of the sum.
        cluster: the hosts; None for one.
        substitute: what is built instead of it, in a program that is measured.
        description: a line about it for the log.
    """

    columns: Sequence[Column]
    devices: Tuple[Any, ...]
    plan: Plan
    sizes: Sequence[GradientSize]
    chunks: List[Chunk]
    wire: Optional[str] = None
    has_edges: bool = False
    average: bool = False
    cluster: Optional[Cluster] = None
    substitute: Substitute = Substitute()
    description: str = ""

    @property
    def fingerprint(self) -> str:
        """A text that differs between hosts with different plans; names do not count."""
        return f"{self.plan.algorithm}, {count(len(self.chunks), 'chunk')}, {self.digest}"

    @property
    def digest(self) -> str:
        """A text that differs between plans of other chunks, moves, dtypes or edges."""
        # Hosts compare the names one by one, so that an error can tell which of them differ.
        unnamed = [chunk._replace(name="") for chunk in self.chunks]
        decisions = repr((unnamed, self.wire, self.has_edges))
        return hashlib.sha256(decisions.encode()).hexdigest()[:12]

    @property
    def hosts(self) -> int:
        """H, the number of hosts."""
        return 1 if self.cluster is None else self.cluster.size

    def column_of(self, chunk: Chunk) -> Column:
        """Return the first column in a chunk: all have one dtype, and a sparse one is alone."""
        return self.columns[chunk.first]

    def wire_dtype(self, chunk: Chunk) -> str:
        """Return the dtype in which a chunk travels."""
        dtype = self.column_of(chunk).dtype
        return self.wire if self.wire and dtype == "float32" else dtype

    def roots(self) -> Dict[int, int]:
        """Return the tower that has each variable's sum first; all gradients must be whole."""
        return {span.gradient: chunk.root for chunk in self.chunks for span in chunk.ranges}

    def with_schedules(self, schedule_of: Callable[[Schedule], Schedule]) -> Layout:
        """Return a layout whose chunks take other schedules, which a function makes of theirs."""
        chunks = [chunk._replace(schedule=schedule_of(chunk.schedule)) for chunk in self.chunks]
        return self._replace(chunks=chunks)


def lay_out(
    columns: Sequence[Column],
    devices: Sequence[Any],
    strategy: Strategy,
    hosts: int = 1,
    owned: Optional[OwnedBytes] = None,
) -> Layout:
    """Return the layout of N columns.

    With ``owned`` each variable has one root, and the roots have about equal bytes.

    Raises:
        HierAllreduceError: the groups, the main or the algorithm's moves do not fit K towers.
    """
    sizes = [size_of(column, strategy.wire_dtype) for column in columns]  # N
    plan = plan_for(strategy, len(devices), all_on_cpu(devices))
    # On a lone tower nothing travels, so nothing is packed or cut.
    if len(devices) * hosts == 1:
        plan = plan._replace(chunk_bytes=0)
    # A small model would fit into one chunk, and all roots but one would have nothing to update.
    # So no chunk is larger than a root's share.
    share = sum(owned.variables) // len(devices) if owned else 0
    if share and strategy.chunk_bytes is None:
        plan = plan._replace(chunk_bytes=min(plan.chunk_bytes, max(share, _LEAST_SHARE)))
    plan = plan._replace(whole=plan.whole or owned is not None)
    chunks = chunks_of(sizes, plan, ready_order(columns))
    chunks = [chunk for chunk in chunks if sizes[chunk.first].dtype]  # C

    # In op names a chunk is called after its variable, a packed one after its first.
    variables = []
    for chunk in chunks:
        ending = ".packed" if len(chunk.ranges) > 1 else ""
        variables.append(columns[chunk.first].name + ending)
    named = []
    for chunk, name in zip(scheduled(chunks, plan, owned), op_names(variables)):
        named.append(chunk._replace(name=name))

    # A sum of sums comes too late for the pass, and an edge needs a chunk between two others.
    are_direct = [is_direct(chunk.schedule) for chunk in named]
    may_have_edges = strategy.edges and hosts == 1 and len(named) > 2 and any(are_direct)
    has_edges = may_have_edges and takes_edges(columns, devices)
    return Layout(columns, tuple(devices), plan, sizes, named, strategy.wire_dtype, has_edges)


def ready_order(columns: Sequence[Column]) -> List[int]:
    """Return the numbers of N columns, with that at the front whose gradient is ready first.

    It is the one with the shortest chain of ops behind it. Of several the last one comes first,
    because models list their variables in the order of the forward pass. Eager gradients are ready.
    """
    last_first = list(range(len(columns)))[::-1]
    end_by_column = {}
    for n in last_first:
        grad = next((grad for grad in columns[n].grads if grad is not None), None)
        tensor = grad.values if isinstance(grad, tf.IndexedSlices) else grad
        if tensor is not None and not is_eager(tensor):
            end_by_column[n] = tensor.op
    # Ops are numbered as they were made, behind all that they read. Only in loops is one made
    # earlier, and it goes on to an op that has its number.
    needed = needed_by(end_by_column.values())
    length_by_op: Dict[Any, int] = {}
    for op in next((end.graph.get_operations() for end in end_by_column.values()), []):
        if op in needed:
            length_by_op[op] = 1 + max((length_by_op.get(src, 0) for src in sources(op)), default=0)
    return sorted(last_first, key=lambda n: length_by_op.get(end_by_column.get(n), 0))


def size_of(column: Column, wire: Optional[str] = None) -> GradientSize:
    """Return the size of a column's gradients as they travel; of sparse ones at most.

    float32 gradients travel in the 16-bit dtype ``wire``, if there is one.
    """
    itemsize = itemsize_of(column.dtype or "float32", wire)
    if column.is_sparse:
        # A sum has the rows of all towers at most, and fewer if towers have the same index.
        counts = row_counts(column)
        known = [count for count in counts if count is not None]
        if len(known) < len(counts) or not column.shape[1:].is_fully_defined():
            return GradientSize(None, itemsize, column.dtype, packable=False)
        row_bytes = bytes_of_row(column, itemsize)
        return GradientSize(sum(known), row_bytes, column.dtype, packable=False)
    elements = None
    if column.is_known and column.shape.is_fully_defined():
        elements = column.shape.num_elements()
    return GradientSize(elements, itemsize, column.dtype, column.dtype in _PACKABLE)
