"""Updates wait for reads: a variable keeps its value until the step's gradients have read it.

::

    forward pass ─► read of a ─► … ─► gradient of b
                        │ control edge
                    write of a            though the gradient of a itself was ready long before

TensorFlow orders a read and a write of one variable only if the program does. On one device the
gradient of a variable nearly always comes after all reads of it, on K towers the reduced gradient
comes when its own chunk is there.
"""

from __future__ import annotations

from typing import Any, Iterable, List, Sequence, Set

import tensorflow as tf

from ..compat import add_control_edge, is_resource, tf1

_WITHOUT_VALUE = ("VariableShape", "VarIsInitializedOp")  # they take a handle, but read no value
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", *_WITHOUT_VALUE)
# into the branches and loops of control flow 1 a handle goes through these
_PASS_ON = ("Switch", "Enter", "Identity")
# each of these ops changes one variable, and has changed it when it ends
_WRITES = (
    *("Assign", "ResourceApply", "ResourceSparseApply"),
    *("ResourceScatter", "ResourceStridedSlice"),
)


class Reads:
    """The reads of variables that K×N gradients need, in the graph that is being built."""

    def __init__(self, grads: Sequence[Sequence[Any]]):
        self._graph = tf1.get_default_graph()
        ends: List[Any] = []
        for row in grads:
            for grad in row:
                ends += _ops_of(grad)
        # a gradient of an outer graph is complete before a function's ops run
        self._ends = [op for op in ends if op.graph is self._graph]
        self._needed = ops_before(self._ends)

    def of(self, var: Any) -> List[Any]:
        """Return the ops after which the gradients do not need the value of ``var`` any more."""
        if not is_resource(var):
            return []  # tensorpack's trainer warns of these
        here = self._graph._get_control_flow_context()
        users = _users(_handle(self._graph, var))
        reads = [op for op in users if op in self._needed and op.type not in _WITHOUT_VALUE]
        if any(op._get_control_flow_context() not in (None, here) for op in reads):
            # no edge may leave a loop or a branch, but all that is in it precedes the gradients
            reads += self._ends
        may_lead_here = (None, here)
        reads = [op for op in reads if op._get_control_flow_context() in may_lead_here]
        return list(dict.fromkeys(reads))

    def hold_writes(self, variables: Iterable[Any], added: Set[Any]) -> None:
        """Let each of the ``added`` ops that may write one of ``variables`` wait for its reads."""
        here = self._graph._get_control_flow_context()
        for var in filter(is_resource, variables):
            reads = self.of(var)
            outside = [op for op in reads if op._get_control_flow_context() is None]
            # these write, or lead to a write in a function, a branch or a loop
            entrances = [op for op in _handle(self._graph, var).consumers() if op in added]
            for op in entrances:
                if op.type not in _READS:
                    _wait(op, outside)
            if here is not None:
                inside = [op for op in reads if op not in outside]
                for op in writers_of(var, added):
                    if op._get_control_flow_context() is here:
                        _wait(op, inside)


def _wait(op: Any, reads: Iterable[Any]) -> None:
    for read in reads:
        add_control_edge(read, op)


def ops_before(ends: Iterable[Any]) -> Set[Any]:
    """Return ops and all that they need, by data or control edges."""
    needed: Set[Any] = set()
    waiting = list(ends)
    while waiting:
        op = waiting.pop()
        if op not in needed:
            needed.add(op)
            waiting.extend(tensor.op for tensor in op.inputs)
            waiting.extend(op.control_inputs)
    return needed


def uses_of(var: Any, added: Set[Any]) -> List[Any]:
    """Return those of ``added`` ops that take the handle of ``var``, also in loops and branches."""
    if not is_resource(var):
        return []
    handle = _handle(tf1.get_default_graph(), var)
    return [op for op in _users(handle) if op in added]


def writers_of(var: Any, added: Set[Any]) -> List[Any]:
    """Return those of ``added`` ops that may write ``var``; a function counts as if it did."""
    return [op for op in uses_of(var, added) if op.type not in _READS]


def last_writes(var: Any, added: Set[Any]) -> List[Any]:
    """Return the ops after which ``var`` has its new value; none if that cannot be told.

    It can if no loop, branch or function among the ``added`` ops may write the variable.
    """
    here = tf1.get_default_graph()._get_control_flow_context()
    writers = writers_of(var, added)
    for op in writers:
        if not op.type.startswith(_WRITES) or op._get_control_flow_context() is not here:
            return []
    return writers


def _users(handle: Any) -> List[Any]:
    users = []
    tensors = [handle]
    for tensor in tensors:  # the list grows while it is read
        for op in tensor.consumers():
            if op.type in _PASS_ON:
                tensors += op.outputs
            else:
                users.append(op)
    return users


def _handle(graph: Any, var: Any) -> Any:
    """Return the handle of ``var`` as the ops of a graph, or of a function's graph, take it."""
    handle = var.handle
    return handle if getattr(handle, "graph", None) is graph else graph.capture(handle)


def _ops_of(grad: Any) -> List[Any]:
    if isinstance(grad, tf.IndexedSlices):
        return [grad.values.op, grad.indices.op]
    return [] if grad is None else [grad.op]
