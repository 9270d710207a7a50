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
from collections import defaultdict
from typing import Any, Dict, Iterable, List, Mapping, Sequence, Set, Tuple

import tensorflow as tf

from ..compat import add_control_edge, is_eager, is_resource, tensor_of, tf1
from ..graphs import needed_by, writes

# These take a handle without a read of its value.
_WITHOUT_VALUE = ("VariableShape", "VarIsInitializedOp")
_READ_ONLY = "_read_only_resource_inputs"  # numbers of inputs
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", *_WITHOUT_VALUE)
# A handle goes through these into the branches and loops of control flow 1.
_PASS_ON = ("Switch", "Enter", "Identity", "RefSwitch", "RefEnter", "RefIdentity")
# TensorFlow takes these apart before a step: an edge from one waits for the choice of its branch,
# and not for what is in it.
_TAKEN_APART = ("If", "StatelessIf", "Case", "StatelessCase")
# What some tower's reads are made of, and nothing that is computed of its batch.
WITHOUT_BATCH = (*_READS, *_PASS_ON, "VarHandleOp", "VariableV2", "Variable", "Const")
_MAKE = ("VarHandleOp", "Placeholder", "VariableV2", "Variable")  # in a function: a placeholder
# Of stateful ops whose types begin so a second one changes nothing. Each loop of control flow 1 has
# its own TensorArrays.
_WITHOUT_STATE = (*_READS, *_MAKE, "Assert", "Print", "CheckNumerics", "TensorArray")
# These give a value that was computed elsewhere: a checkpoint's, or that of var.load().
_ELSEWHERE = ("RestoreV2", "Placeholder", "PlaceholderWithDefault", "Const")

Uses = Mapping[Any, Sequence[Any]]  # ops, by the op that makes the variable


class Reads:
    """The reads of variables that K×N gradients need, in the graph that is being built."""

    def __init__(self, grads: Sequence[Sequence[Any]]):
        self._graph = tf1.get_default_graph()
        # A gradient of an outer graph needs no edge, because a function's ops run after it.
        ends = itertools.chain(*map(ops_of_gradients, grads))
        self._ends = [op for op in ends if op.graph is self._graph]
        self._needed = needed_by(self._ends)

    def of(self, var: Any) -> List[Any]:
        """Return the ops after which the gradients do not need the value of ``var`` any more."""
        here = self._graph._get_control_flow_context()
        users = _users(_handle(self._graph, var))
        reads = [op for op in users if op in self._needed and op.type not in _WITHOUT_VALUE]
        may_lead_here = (None, here)
        # The gradients stand for reads in a loop or branch, because no edge may lead out of it.
        inside = (op._get_control_flow_context() not in may_lead_here for op in reads)
        if any(inside) or any(op.type in _TAKEN_APART for op in reads):
            reads += self._ends
        reads = [op for op in reads if op._get_control_flow_context() in may_lead_here]
        return list(dict.fromkeys(reads))

    def hold_writes(self, variables: Iterable[Any], added: Set[Any], uses: Uses) -> None:
        """Let each of the ``added`` ops that may write one of ``variables`` wait for its reads."""
        here = self._graph._get_control_flow_context()
        for var in filter(is_resource, variables):
            reads = self.of(var)
            outside = [op for op in reads if op._get_control_flow_context() is None]
            # Ops that take the handle wait, because each leads to all writes in what it enters.
            users = _handle(self._graph, var).consumers()
            wait([op for op in users if op in added and op.type not in _READS], outside)
            # Reads in the branch that is being built hold only the writes in the same branch.
            if here is not None:
                inside = [op for op in reads if op not in outside]
                writers = writers_of(var, uses)
                wait([op for op in writers if op._get_control_flow_context() is here], inside)

    def new_value(self, var: Any, device: Any, uses: Uses, ends: Sequence[Any]) -> Any:
        """Return the value of ``var``, read on a device once an update has written it.

        Where a loop, a branch or a function may write it, nobody can tell which of the ops is the
        last to do so: then the value comes after the update's ``ends``.
        """
        here = self._graph._get_control_flow_context()
        writers = writers_of(var, uses)
        # The ends of the update come after all its writes, wherever these are.
        are_known = all(
            writes(op.type) and op._get_control_flow_context() is here for op in writers
        )
        after = writers if writers and are_known else ends
        with tf.control_dependencies(after), tf1.device(device):
            return var.read_value()

    def assign_copies(
        self,
        columns: Sequence[Sequence[Any]],
        owners: Mapping[int, int],
        copied: Sequence[Sequence[Any]],
        devices: Sequence[Any],
    ) -> List[Any]:
        """Return ops that give V columns K×V ``copied`` values, after the reads of the old ones.

        ``owners`` has, by the number of a column, the tower that has its new value already.
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


def wait(ops: Iterable[Any], before: Sequence[Any]) -> None:
    """Let ``ops`` wait for those ``before`` them."""
    for op in ops:
        for earlier in before:
            add_control_edge(earlier, op)


def ops_of_gradients(grads: Iterable[Any]) -> List[Any]:
    """Return the ops that compute a row of gradients."""
    ops: List[Any] = []
    for grad in grads:
        is_sparse = isinstance(grad, tf.IndexedSlices)
        parts = (grad.values, grad.indices) if is_sparse else (grad,)
        # The all-reduce names what is no tensor, because it knows the tower and the variable.
        ops += [part.op for part in parts if isinstance(part, tf.Tensor)]
    return ops


# ---- who uses which variable ---------------------------------------------------------------------


def outer_ops(graph: Any) -> Dict[Any, Any]:
    """Return for each op by which a function takes a tensor of outside the op that makes it."""
    found: Dict[Any, Any] = {}
    while hasattr(graph, "captures"):
        for outer, inner in graph.captures:
            if not is_eager(outer):
                found[inner.op] = outer.op
        graph = graph.outer_graph
    return found


def is_variable(tensor: Any) -> bool:
    """Return whether a tensor is a variable's handle, or its reference."""
    return bool(tensor.dtype == tf.resource or tensor.dtype._is_ref_dtype)


def identity(maker: Any) -> Tuple[str, bytes, str]:
    """Return what is equal for all handles of a variable, by the op that makes one of them."""
    attributes = maker.node_def.attr  # one that is not there is empty
    name = attributes["shared_name"].s.decode() or maker.name
    return name, attributes["container"].s, maker.device


def uses_by_variable(ops: Iterable[Any]) -> Dict[Any, List[Any]]:
    """Return those of ``ops`` that use a variable, by the op that makes its handle or reference."""
    outside = outer_ops(tf1.get_default_graph())
    uses: Dict[Any, List[Any]] = defaultdict(list)
    for op in ops:
        for tensor in filter(is_variable, () if op.type in _PASS_ON else op.inputs):
            maker = tensor.op
            while maker in outside or maker.type in _PASS_ON:
                maker = outside[maker] if maker in outside else maker.inputs[0].op
            uses[maker].append(op)
    return uses


def writers_of(var: Any, uses: Uses) -> List[Any]:
    """Return the ops that may write ``var``, of those that use it; a function counts as if."""
    return [op for op in uses.get(tensor_of(var).op, ()) if may_write(op)]


def may_write(op: Any) -> bool:
    """Return whether an op that uses a variable may write it."""
    if any(tensor.dtype._is_ref_dtype for tensor in op.inputs):
        return writes(op.type)
    # TensorFlow notes which variables a branch, a loop or a function only reads.
    if _READ_ONLY in op.node_def.attr:
        handles = {n for n, tensor in enumerate(op.inputs) if tensor.dtype == tf.resource}
        return not handles.issubset(op.get_attr(_READ_ONLY))
    return op.type not in _READS


def is_computed(var: Any, uses: Uses) -> bool:
    """Return whether the graph gives ``var`` values that it computes, beside the initial one."""
    sources = set()
    # The initial value stays one if the program replaces it, as init_from_checkpoint does.
    for op in set(writers_of(var, uses)) - {var.initializer}:
        source = op.inputs[1].op if op.type.startswith("Assign") else op
        while source.type in ("Identity", "Reshape", "Cast"):
            source = source.inputs[0].op
        sources.update([] if op.name == f"{var.op.name}/Assign" else [source.type])
    return not sources.issubset(_ELSEWHERE)


def first_uses(ops: Set[Any]) -> List[Any]:
    """Return those of ``ops`` that take a variable where it is made, before any other use of it.

    Reads count, too, because an update computes from its state.
    """
    first = []
    # The initial value of a variable that the update creates must not wait for a step.
    for op in ops - _initial_ops():
        made = [tensor for tensor in op.inputs if tensor.op.type in _MAKE]
        if any(map(is_variable, made)) and op.type not in _WITHOUT_VALUE:
            first.append(op)
    return first


def _initial_ops() -> Set[Any]:
    """Return the ops that give variables their initial values."""
    initializers = [var.initializer for var in tf1.global_variables() + tf1.local_variables()]
    return needed_by(op for op in initializers if op is not None)


def states_among(ops: Set[Any]) -> List[str]:
    """Return the names of ``ops`` of which a second one is another: writes, random numbers."""
    return sorted(op.name for op in ops - _initial_ops() if _has_state(op))


def _has_state(op: Any) -> bool:
    """Return whether a second op like this one would be another; a branch, if one in it would."""
    if op.op_def is None or not op.op_def.is_stateful or op.type.startswith(_WITHOUT_STATE):
        return False
    attributes = list(op.node_def.attr.values())
    called = [attr.func for attr in attributes]
    called += itertools.chain(*(attr.list.func for attr in attributes))
    functions = [op.graph._get_function(function.name) for function in called if function.name]
    bodies: List[Any] = [getattr(function, "graph", None) for function in functions]
    if not bodies or None in bodies:
        return True
    return any(_has_state(inside) for body in bodies for inside in body.get_operations())


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
