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

import itertools
from typing import Any, Dict, Iterable, List, Sequence, Set

import tensorflow as tf

from ..compat import add_control_edge, is_resource, tf1
from ..graphs import needed_by

# These take a handle without a read of its value.
_WITHOUT_VALUE = ("VariableShape", "VarIsInitializedOp")
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", *_WITHOUT_VALUE)
# A handle goes through these into the branches and loops of control flow 1.
_PASS_ON = ("Switch", "Enter", "Identity")
# Each of these ops changes one variable, and has changed it when it ends.
_WRITES = (
    *("Assign", "ResourceApply", "ResourceSparseApply"),
    *("ResourceScatter", "ResourceStridedSlice"),
)


class Reads:
    """The reads of variables that K×N gradients need, in the graph that is being built."""

    def __init__(self, grads: Sequence[Sequence[Any]]):
        self._graph = tf1.get_default_graph()
        ends: List[Any] = []
        for grad in itertools.chain(*grads):
            is_sparse = isinstance(grad, tf.IndexedSlices)
            parts = (grad.values, grad.indices) if is_sparse else (grad,)
            # The all-reduce names what is no tensor, because it knows the tower and the variable.
            ends += [part.op for part in parts if isinstance(part, tf.Tensor)]
        # A gradient of an outer graph needs no edge, because a function's ops run after it.
        self._ends = [op for op in ends if op.graph is self._graph]
        self._needed = needed_by(self._ends)

    def of(self, var: Any) -> List[Any]:
        """Return the ops after which the gradients do not need the value of ``var`` any more."""
        if not is_resource(var):
            return []  # tensorpack's trainer warns of these
        here = self._graph._get_control_flow_context()
        users = _users(_handle(self._graph, var))
        reads = [op for op in users if op in self._needed and op.type not in _WITHOUT_VALUE]
        # The gradients stand for reads in a loop or branch, because no edge may lead out of it.
        if any(op._get_control_flow_context() not in (None, here) for op in reads):
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
            # Ops that take the handle wait, because each leads to all writes in what it enters.
            users = _handle(self._graph, var).consumers()
            _wait([op for op in users if op in added and op.type not in _READS], outside)
            # Reads in the branch that is being built hold only the writes in the same branch.
            if here is not None:
                inside = [op for op in reads if op not in outside]
                writers = writers_of(var, added)
                _wait([op for op in writers if op._get_control_flow_context() is here], inside)

    def new_value(self, var: Any, device: Any, added: Set[Any], ends: Sequence[Any]) -> Any:
        """Return the value of ``var`` once the ``added`` ops have written it.

        Args:
            var: a resource variable.
            device: the one on which it is read.
            added: the ops of an update.
            ends: what to wait for where a loop, a branch or a function may write the variable, so
                that nobody can tell which of the ops is the last to do so.
        """
        here = self._graph._get_control_flow_context()
        writers = writers_of(var, added)
        # The ends of the update come after all its writes, wherever these are.
        are_known = all(
            op.type.startswith(_WRITES) and op._get_control_flow_context() is here for op in writers
        )
        after = writers if writers and are_known else ends
        with tf.control_dependencies(after), tf1.device(device):
            return var.read_value()

    def assign_copies(
        self,
        columns: Sequence[Sequence[Any]],
        owners: Dict[int, int],
        copied: Sequence[Sequence[Any]],
        devices: Sequence[Any],
    ) -> List[Any]:
        """Return ops that give replicas their new values, after the reads of the old ones.

        Args:
            columns: V columns of K replicas.
            owners: by the number of a column the tower that has its new value already.
            copied: K×V new values, each on its tower.
            devices: K devices.
        """
        ops = []
        for tower, new_values in enumerate(copied):
            for n, owner in owners.items():
                if tower == owner:
                    continue
                var = columns[n][tower]
                with tf1.device(devices[tower]), tf.control_dependencies(self.of(var)):
                    ops.append(var.assign(new_values[n], read_value=False))
        return ops


def _wait(ops: Iterable[Any], reads: Sequence[Any]) -> None:
    for op in ops:
        for read in reads:
            add_control_edge(read, op)


def uses_of(var: Any, added: Set[Any]) -> List[Any]:
    """Return those of ``added`` ops that take the handle of ``var``, also in loops and branches."""
    if not is_resource(var):
        return []
    handle = _handle(tf1.get_default_graph(), var)
    return [op for op in _users(handle) if op in added]


def writers_of(var: Any, added: Set[Any]) -> List[Any]:
    """Return those of ``added`` ops that may write ``var``; a function counts as if it did."""
    return [op for op in uses_of(var, added) if op.type not in _READS]


def writes_among(ops: Iterable[Any]) -> List[Any]:
    """Return those of ``ops`` that write a variable, without initial values."""
    initializers = {var.initializer for var in tf1.global_variables() + tf1.local_variables()}
    return [op for op in ops if op.type.startswith(_WRITES) and op not in initializers]


def _users(handle: Any) -> List[Any]:
    users = []
    tensors = [handle]
    for tensor in tensors:  # the list grows while it is read
        for op in tensor.consumers():
            # What a branch or loop reads is the same variable under another handle.
            if op.type in _PASS_ON:
                tensors += op.outputs
            else:
                users.append(op)
    return users


def _handle(graph: Any, var: Any) -> Any:
    """Return the handle of ``var`` as the ops of a graph, or of a function's graph, take it."""
    handle = var.handle
    return handle if getattr(handle, "graph", None) is graph else graph.capture(handle)
