"""Decisions before the first op, without any gradient: what travels together, by which moves.

::

    columns ─► plan ─► chunks, each with its schedule and a name
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..compat import is_eager
from ..graphs import needed_by, sources
from ..planning.chunks import Chunk, chunks_of
from ..planning.plan import Plan, Schedule
from ..planning.schedules import scheduled
from ..planning.strategy import plan_for
from .columns import Column
from .devices import hosts_of, types_of
from .names import op_names
from .substitution import Call, Substitute

if TYPE_CHECKING:
    from ..cluster import Cluster

# A chunk of an update that is spread over the roots has at least so many bytes, because smaller
# ones would cost more than they save.
_LEAST_SHARE = 1 << 18


class Layout(NamedTuple):
    """The chunks of N columns on K towers, and what becomes of their sums."""

    columns: Sequence[Column]  # N columns
    devices: Tuple[Any, ...]  # K devices
    average: bool  # the mean instead of the sum
    cluster: Optional[Cluster]  # the hosts; None for one
    plan: Plan  # the schedules and the chunk size
    chunks: List[Chunk]  # C chunks, whose ranges have the numbers of columns
    edges: bool  # whether the towers' backward passes shall wait for earlier sums
    substitute: Substitute = Substitute()  # what is built instead, in a program that is measured

    @property
    def digest(self) -> str:
        """A text that differs between plans of other chunks, moves or dtypes."""
        # Hosts compare the names one by one, so that an error can tell which of them differ.
        unnamed = [chunk._replace(name="") for chunk in self.chunks]
        wires = [column.wire for column in self.columns]
        return hashlib.sha256(repr((unnamed, wires)).encode()).hexdigest()[:12]

    def roots(self) -> Dict[int, int]:
        """Return the tower that has each variable's sum first; all gradients must be whole."""
        roots: Dict[int, int] = {}
        for chunk in self.chunks:
            roots.update((span.gradient, chunk.root) for span in chunk.ranges)
        return roots

    def with_schedules(self, schedule_of: Callable[[Schedule], Schedule]) -> Layout:
        """Return a layout whose chunks take other schedules, which a function makes of theirs."""
        chunks = [chunk._replace(schedule=schedule_of(chunk.schedule)) for chunk in self.chunks]
        return self._replace(chunks=chunks)


def lay_out(
    call: Call,
    columns: Sequence[Column],
    variable_bytes: Optional[Sequence[int]] = None,
    whole: bool = False,
) -> Layout:
    """Return the layout of the N columns of a call.

    With ``whole`` each variable has one root. With the bytes of N variables it has, too, and the
    roots have about equal bytes.

    Raises:
        HierAllreduceError: the groups, the main or the algorithm's moves do not fit K towers.
    """
    strategy = call.strategy
    sizes = [column.size for column in columns]  # N
    order = ready_order(call.rows)
    is_on_cpu = types_of(call.devices) == {"CPU"}
    plan = plan_for(strategy, len(call.devices), is_on_cpu)
    # On a lone tower nothing travels, so nothing is packed or cut.
    hosts = hosts_of(call.cluster)
    if len(call.devices) * hosts == 1:
        plan = plan._replace(chunk_bytes=0)
    # A small model would fit into one chunk, and all roots but one would have nothing to update.
    # So no chunk is larger than a root's share.
    if variable_bytes is not None and strategy.chunk_bytes is None:
        share = max(sum(variable_bytes) // len(call.devices), _LEAST_SHARE)
        plan = plan._replace(chunk_bytes=min(plan.chunk_bytes, share))
    plan = plan._replace(whole=plan.whole or whole or variable_bytes is not None)
    chunks = chunks_of(sizes, plan, order)
    chunks = [chunk for chunk in chunks if sizes[chunk.first].dtype]  # C

    # In op names a chunk is called after its variable, a packed one after its first.
    variables = []
    for chunk in chunks:
        ending = ".packed" if len(chunk.ranges) > 1 else ""
        variables.append(columns[chunk.first].name + ending)
    named = []
    for chunk, name in zip(scheduled(chunks, plan, variable_bytes), op_names(variables)):
        named.append(chunk._replace(name=name))

    # An edge needs a chunk between two others. Gradients that are not packed travel in the order of
    # their variables, and not in that in which the pass makes them.
    edges = strategy.edges and hosts == 1 and plan.chunk_bytes > 0 and len(named) > 2
    return Layout(columns, call.devices, call.average, call.cluster, plan, named, edges)


def ready_order(rows: Sequence[Sequence[Any]]) -> List[int]:
    """Return the numbers of N gradients of each tower, with that at the front that is ready first.

    It is the one with the shortest chain of ops behind it. Of several the last one comes first,
    because models list their variables in the order of the forward pass. Eager gradients are ready.
    """
    columns = list(zip(*rows))
    last_first = range(len(columns))[::-1]
    end_by_variable = {}
    for n in last_first:
        grad: Any = next((grad for grad in columns[n] if grad is not None), None)
        if not is_eager(grad):
            end_by_variable[n] = grad.op
    # Ops are numbered as they were made, behind all that they read. Only in loops is one made
    # earlier, and it goes on to an op that has its number.
    needed = needed_by(end_by_variable.values())
    length_by_op: Dict[Any, int] = {}
    for op in next((end.graph.get_operations() for end in end_by_variable.values()), []):
        if op in needed:
            length_by_op[op] = 1 + max((length_by_op.get(src, 0) for src in sources(op)), default=0)
    return sorted(last_first, key=lambda n: length_by_op.get(end_by_variable.get(n), 0))
