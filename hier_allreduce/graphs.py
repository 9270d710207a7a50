"""Graphs: what ops need, which ops write a variable, and all that is remembered of a graph.

::

    memory_of(graph) ─► what was built in it, and what hosts compare of it      in no collection
"""

from __future__ import annotations

import re
from typing import Any, Callable, Container, Dict, Iterable, List, Sequence, Set, Tuple
from weakref import WeakSet

# Each of these ops changes one variable, and has changed it when it ends.
_WRITES = re.compile(
    r"Assign|(Resource)?(Sparse)?Apply|(Resource)?StridedSliceAssign"
    r"|(Resource)?Scatter(Nd)?(Add|Sub|Mul|Div|Min|Max|Update)"
)


def sources(op: Any) -> List[Any]:
    """Return the ops that an op needs, by data or control edges."""
    return [*(tensor.op for tensor in op.inputs), *op.control_inputs]


def needed_by(
    ops: Iterable[Any],
    without: Container[Any] = (),
    sources_of: Callable[[Any], Iterable[Any]] = sources,
) -> Set[Any]:
    """Return ops and all that they need, but not those in ``without``, nor what these need."""
    needed: Set[Any] = set()
    waiting = list(ops)
    while waiting:
        op = waiting.pop()
        if op not in needed and op not in without:
            needed.add(op)
            waiting += sources_of(op)
    return needed


def writes(op_type: str) -> bool:
    """Return whether ops of a type change a variable."""
    return bool(_WRITES.match(op_type))


# ---- the memory of a graph -----------------------------------------------------------------------


class GraphMemory:
    """What this package remembers of one graph.

    The graph holds it, so that both are freed together. It is in no collection of the graph,
    because TensorFlow exports those.
    """

    def __init__(self) -> None:
        # What was built.
        self.all_reduces: List[Any] = []  # AllReduces, in building order
        self.shared_lines: List[str] = []  # about what is built for all hosts, which they compare
        # The tensor by which hosts compare a variable, by its name.
        self.compared: Dict[str, Any] = {}
        self.compares_hosts = True  # whether they do

        # Whose the variables are.
        self.devices: Tuple[Any, ...] = ()  # K, once there is an update
        # What tells towers apart in names, and whether a user gave it: scopes, or names of rows.
        self.scopes: Dict[Any, bool] = {}
        # The columns of K replicas that rows have, or updates write, by their names.
        self.columns: Dict[Tuple[str, ...], Sequence[Any]] = {}
        # The towers whose gradients read a variable, by the op that makes it, if not all do.
        self.read: Dict[Any, Set[int]] = {}
        self.flags: List[Any] = []  # those of all updates, by which towers are known to be equal
        self.initializers: List[Any] = []  # after these, towers may differ
        self.vouched: Set[Any] = set()  # the names of columns that are equal since init_op has run
        self.copies: Set[Any] = set()  # the ops that copy variables, which no program computes

        # Who updates them.
        # The towers that have slots of a variable, and the optimizer whose slots these are.
        self.owners: Dict[Any, Tuple[Tuple[int, ...], Any]] = {}


_graphs: Any = WeakSet()


def memory_of(graph: Any) -> GraphMemory:
    """Return the memory of a graph, which is the same at each call."""
    if graph not in _graphs:
        graph._hier_allreduce_memory = GraphMemory()
        _graphs.add(graph)
    memory: GraphMemory = graph._hier_allreduce_memory
    return memory


def graphs_with_all_reduces() -> List[Any]:
    """Return the graphs, also of functions, in which all-reduces were built."""
    return [graph for graph in _graphs if memory_of(graph).all_reduces]
