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

from collections import defaultdict
from itertools import chain
from typing import Any, Dict, Iterable, List, Mapping, Sequence, Set, Tuple

import tensorflow as tf

from ..compat import add_control_edge, is_eager, tf1
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

Uses = Mapping[Any, Sequence[Any]]  # ops, by the op that makes the variable


class Step:
    """A step that is being built: what its gradients read, and its update uses and writes.

    Args:
        grads: K×N gradients, and what else the update is computed from.
        added: the ops of the update.
        ends: the last of them, or their tensors.

    Attributes:
        uses: the update's ops that use a variable.
        first: those that take it where it is made.
        writers: those that may write it.
    """

    def __init__(self, grads: Sequence[Sequence[Any]], added: Set[Any], ends: Sequence[Any]):
        graph = tf1.get_default_graph()
        self._here = graph._get_control_flow_context()
        # A gradient of an outer graph needs no edge, because a function's ops run after it.
        ops = chain(*map(ops_of_gradients, grads))
        self._grads = [op for op in ops if op.graph is graph]
        self._reads = uses_by_variable(needed_by(self._grads))
        self.first = first_uses(added)
        self._ends = ends
        self.uses = uses_by_variable(added)
        self.writers = writers_by_variable(self.uses)

    def reads_of(self, var: Any) -> List[Any]:
        """Return the ops after which the gradients do not need the value of ``var`` any more."""
        reads = [op for op in self._reads.get(var.op, ()) if op.type not in _WITHOUT_VALUE]
        may_lead_here = (None, self._here)
        # The gradients stand for reads in a loop or branch, because no edge may lead out of it.
        inside = (op._get_control_flow_context() not in may_lead_here for op in reads)
        if any(inside) or any(op.type in _TAKEN_APART for op in reads):
            reads += self._grads
        return list({op for op in reads if op._get_control_flow_context() in may_lead_here})

    def hold_writes(self, var: Any) -> None:
        """Let the writes of ``var`` wait for its reads."""
        reads = self.reads_of(var)
        outside = [op for op in reads if op._get_control_flow_context() is None]
        # Ops that take the handle wait, because each leads to all writes in what it enters.
        wait(filter(may_write, self.first.get(var.op, ())), outside)
        # Reads in the branch that is being built hold only the writes in the same branch.
        inside = [op for op in reads if op not in outside]
        writers = self.writers.get(var.op, ())
        wait([op for op in writers if op._get_control_flow_context() is self._here], inside)

    def new_value(self, var: Any, device: Any) -> Any:
        """Return the value of ``var``, read on a device once the update has written it.

        Where a loop, a branch or a function may write it, nobody can tell which of the ops is the
        last to do so: then the value comes after the update's ends, which come after all its
        writes.
        """
        writers = self.writers.get(var.op, ())
        here = self._here
        are_known = (writes(op.type) and op._get_control_flow_context() is here for op in writers)
        after = writers if writers and all(are_known) else self._ends
        with tf.control_dependencies(after), tf1.device(device):
            return var.read_value()

    def assign(self, var: Any, value: Any, device: Any) -> Any:
        """Return an op that gives ``var`` a value after the reads of its old one."""
        with tf1.device(device), tf.control_dependencies(self.reads_of(var)):
            return var.assign(value, read_value=False)


def inputs_of(op: Any) -> List[Any]:
    """Return the ops whose values an op takes."""
    return [tensor.op for tensor in op.inputs]


def wait(ops: Iterable[Any], before: Sequence[Any]) -> None:
    """Let ``ops`` wait for those ``before`` them."""
    for op in ops:
        for earlier in before:
            add_control_edge(earlier, op)


def ops_of_gradients(grads: Iterable[Any]) -> List[Any]:
    """Return the ops that compute a row of gradients, also the values and indices of slices."""
    ops: List[Any] = []
    for grad in grads:
        # A dense_shape is not reduced, and that of one tower is right for an update of all.
        parts = (grad.values, grad.indices) if isinstance(grad, tf.IndexedSlices) else (grad,)
        ops += [part.op for part in parts if isinstance(part, tf.Tensor)]
    return ops


# ---- who uses which variable ---------------------------------------------------------------------


def all_variables() -> List[Any]:
    """Return the variables of the graph's collections, each once."""
    found = tf1.global_variables() + tf1.local_variables()
    return list({var.op: var for var in found}.values())


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


def identity(maker: Any) -> Tuple[str, str]:
    """Return what is equal for all handles of a variable, by the op that makes one of them."""
    shared_name = maker.node_def.attr["shared_name"].s  # empty, where it has none
    return shared_name.decode() or maker.name, maker.device


def uses_by_variable(ops: Iterable[Any]) -> Dict[Any, List[Any]]:
    """Return those of ``ops`` that use a variable, by the op that makes its handle or reference."""
    outside = outer_ops(tf1.get_default_graph())
    uses: Dict[Any, List[Any]] = defaultdict(list)
    for op in ops:
        for tensor in filter(is_variable, () if op.type in _PASS_ON else op.inputs):
            uses[_maker_of(tensor, outside)].append(op)
    return uses


def first_uses(ops: Set[Any]) -> Dict[Any, List[Any]]:
    """Return, by variable, those of ``ops`` that take it where it is made, before any other use.

    Reads count, too, because an update computes from its state.
    """
    outside = outer_ops(tf1.get_default_graph())
    first: Dict[Any, List[Any]] = defaultdict(list)
    # The initial value of a variable that the update creates must not wait for a step.
    for op in ops - initial_ops():
        for tensor in filter(is_variable, op.inputs):
            if tensor.op.type in _MAKE and op.type not in _WITHOUT_VALUE:
                first[_maker_of(tensor, outside)].append(op)
    return first


def _maker_of(tensor: Any, outside: Mapping[Any, Any]) -> Any:
    """Return the op that makes the variable whose handle or reference a tensor is."""
    maker = tensor.op
    while maker in outside or maker.type in _PASS_ON:
        maker = outside[maker] if maker in outside else maker.inputs[0].op
    return maker


def writers_by_variable(uses: Uses) -> Dict[Any, List[Any]]:
    """Return the ops that may write a variable, of those that use it; a function counts as if."""
    writers = {maker: list(filter(may_write, ops)) for maker, ops in uses.items()}
    return {maker: ops for maker, ops in writers.items() if ops}


def may_write(op: Any) -> bool:
    """Return whether an op that uses a variable may write it."""
    if any(tensor.dtype._is_ref_dtype for tensor in op.inputs):
        return writes(op.type)
    # TensorFlow notes which variables a branch, a loop or a function only reads.
    if _READ_ONLY in op.node_def.attr:
        handles = {n for n, tensor in enumerate(op.inputs) if tensor.dtype == tf.resource}
        return not handles.issubset(op.get_attr(_READ_ONLY))
    return op.type not in _READS


def is_computed(var: Any, writers: Uses) -> bool:
    """Return whether the graph computes values of ``var`` from variables, queues, or at random.

    What needs none of them was computed elsewhere, such as a checkpoint's, or a layer that another
    framework saved the other way round.
    """
    for op in set(writers.get(var.op, ())) - {var.initializer}:
        # An op that changes its variable has that as the first input.
        values = op.inputs[1:] if writes(op.type) else op.inputs
        for source in needed_by((tensor.op for tensor in values), (), inputs_of):
            if any(map(is_variable, source.outputs)) or "seed" in source.node_def.attr:
                return True
    return False


def initial_ops() -> Set[Any]:
    """Return the ops that give variables their initial values."""
    initializers = [var.initializer for var in all_variables()]
    return needed_by(op for op in initializers if op is not None)


def has_state(op: Any) -> bool:
    """Return whether a second op like this one would be another; a branch, if one in it would."""
    if op.op_def is None or not op.op_def.is_stateful or op.type.startswith(_WITHOUT_STATE):
        return False
    attributes = list(op.node_def.attr.values())
    called = [attr.func for attr in attributes]
    called += chain(*(attr.list.func for attr in attributes))
    functions = [op.graph._get_function(function.name) for function in called if function.name]
    bodies: List[Any] = [getattr(function, "graph", None) for function in functions]
    if not bodies or None in bodies:
        return True
    return any(has_state(inside) for body in bodies for inside in body.get_operations())
