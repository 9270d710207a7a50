"""Effects of a tower's update: the variables that it writes, and what no two towers do alike.

The graph shows both, whoever built the ops::

    AssignAddVariableOp ◄── Switch ◄── VarHandleOp "steps"   a write, in TensorFlow 1's condition
    If ◄── VarHandleOp "steps"                               one too, unless its branches only read
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Dict, Iterator, List, Sequence, Set, Tuple

import tensorflow as tf

from ..compat import has_gpu_kernel
from ..graph.devices import device_fields

# patterns of op types
_WRITES = re.compile("(Resource)?(Sparse)?(Assign|Apply|Scatter|StridedSliceAssign)")
_UNEQUAL = {
    "draws random numbers": (
        "Random|Stateful(?!Partitioned)|(Parameterized)?Truncated|Multinomial|Rng"
    ),
    "calls a function in Python": "(Eager)?PyFunc",
    "reads the clock": "Timestamp",
}
_SCALES = ("Mul", "RealDiv", "Add", "AddV2", "Sub")
_IDENTITIES = ("Identity", "StopGradient", "PreventGradient", "Snapshot")
_PASS_ON = ("Identity", "Switch", "Enter", "RefIdentity", "RefSwitch", "RefEnter")


def written_by(ops: Sequence[Any]) -> Counter:
    """Count how often ``ops`` write each variable, by its op's name."""
    return Counter(name for _, name in _writes(ops))


def _writes(ops: Sequence[Any]) -> Iterator[Tuple[Any, str]]:
    """Yield each op that writes a variable, and the variable's name."""
    for op in ops:
        for name in {_variable_name(tensor.op) for tensor in _written_inputs(op)}:
            yield op, name


class Expressions:
    """What a tower's ops compute, as numbers that are equal for towers that compute alike.

    ::

        tower 0   AssignSub(w, Mul(0.1, gradient of w))   ─► a number
        tower 1   AssignSub(w, Mul(0.1, gradient of w))   ─► the same
        tower 2   AssignSub(w, gradient of w)             ─► another one

    They see types of ops, constants, and names that towers share. They do not see attributes,
    control inputs and the bodies of functions.

    Args:
        names: that towers share, of gradients by their tensors' names, and of the tower's own
            variables by their ops' names.
    """

    def __init__(self, names: Dict[str, str]):
        self._names = names
        self._numbers: Dict[str, int] = {}  # by the op's name

    def written_by(self, ops: Sequence[Any]) -> Dict[str, Counter]:
        """Return the expressions that ``ops`` write to each variable."""
        written: Dict[str, Counter] = {}
        for op, name in _writes(ops):
            written.setdefault(name, Counter())[self._number(op)] += 1
        return written

    def _number(self, last: Any) -> int:
        """Return the number of an op, after those of all ops before it."""
        stack = [last]
        while stack:
            op = stack[-1]
            before = [t.op for t in op.inputs if t.name not in self._names]
            missing = [each for each in before if each.name not in self._numbers]
            if missing and op.name not in self._numbers:
                self._numbers[op.name] = 0  # a loop leads back to it
                stack += missing
                continue
            self._numbers[op.name] = hash((op.type, self._own(op), *map(self._input, op.inputs)))
            stack.pop()
        return self._numbers[last.name]

    def _own(self, op: Any) -> Any:
        """Return what an op without inputs is."""
        if op.type == "Const":
            return op.get_attr("value").SerializeToString()
        return "" if op.inputs else self._names.get(op.name, op.name)

    def _input(self, tensor: Any) -> Any:
        own = self._names.get(tensor.name)
        return own or (self._numbers[tensor.op.name], tensor.value_index)


def without_gpu_kernel(ops: Sequence[Any]) -> Dict[str, List[str]]:
    """Return the variables on GPUs whose update has no GPU kernel, by the type of its op."""
    found: Dict[str, List[str]] = {}
    for op in ops:
        names = [_variable_name(tensor.op) for tensor in _written_inputs(op)]
        if names and device_fields(op.device)[3] == "GPU" and not has_gpu_kernel(op):
            found.setdefault(op.type, []).extend(names)
    return found


def used_by(ops: Sequence[Any]) -> Set[str]:
    """Return the names of all variables that ``ops``, or functions that they run, read or write."""
    names: Set[str] = set()
    for op in ops:
        variables = filter(_is_variable, op.inputs)
        names.update(_variable_name(tensor.op) for tensor in variables)
    return names


def _is_variable(tensor: Any) -> bool:
    return bool(tensor.dtype == tf.resource or tensor.dtype._is_ref_dtype)


def let_writes_wait(ops: Sequence[Any], pairs: Sequence[Tuple[Any, Any]]) -> None:
    """Let each of ``ops`` that writes a variable of N pairs wait for the variable's gradient.

    AdamW, say, decays a variable before it applies the gradient. Without this, the decay could run
    while the forward pass still reads the variable.
    """
    gradient_ops: Dict[str, Set[Any]] = {}
    for grad, var in pairs:
        tensors = [grad.values, grad.indices] if isinstance(grad, tf.IndexedSlices) else [grad]
        found = gradient_ops.setdefault(var.op.name, set())
        for tensor in tensors if grad is not None else ():
            found.update(_ops_that_make(tensor))
    for op in ops:
        # An edge into a loop is not allowed, and none into a condition is needed: it waits itself.
        if op._get_control_flow_context() is not None:
            continue
        for written in _written_inputs(op):
            needed = gradient_ops.get(_variable_name(written.op), set())
            # an edge for an input of the op itself would tell nothing new
            missing = needed.difference(tensor.op for tensor in op.inputs)
            op._add_control_inputs(list(missing))


def _ops_that_make(tensor: Any) -> Iterator[Any]:
    """Yield a tensor's op, and the ops before it on its device that it only scales or passes on.

    Grappler joins two products with constants, such as a mean and a wrapper's scaling. The op of
    the inner product is then a constant, and who waits for it waits for nothing.
    """
    op = tensor.op
    yield op
    is_scaled = op.type in _SCALES and any(tf.get_static_value(t) is not None for t in op.inputs)
    if is_scaled or op.type in _IDENTITIES:
        for before in op.inputs:
            if before.op.device == op.device:
                yield from _ops_that_make(before)


def unequal_ops(ops: Sequence[Any]) -> Iterator[str]:
    """Yield a phrase for each op that draws random numbers, calls Python or reads the clock."""
    for op in ops:
        if "/Initializer" in op.name:
            continue  # init_op copies tower 0's initial values
        for kind in _types(op.node_def, op.graph):
            matching = [does for does, kinds in _UNEQUAL.items() if re.match(kinds, kind)]
            yield from (f"{does} ({op.name!r}, {kind})" for does in matching)


def _written_inputs(op: Any) -> List[Any]:
    """Return the variables among an op's inputs that it, or a function that it runs, writes."""
    if _WRITES.match(op.type):
        return list(filter(_is_variable, op.inputs[:1]))
    resources = [(index, t) for index, t in enumerate(op.inputs) if t.dtype == tf.resource]
    if not resources or not _functions(op.node_def):
        return []
    # TensorFlow 2 finds these; 1.15 does not
    read_only = op.node_def.attr["_read_only_resource_inputs"].list.i
    return [t for index, t in resources if index not in read_only]


def _variable_name(op: Any) -> str:
    while op.type in _PASS_ON:
        op = op.inputs[0].op
    return str(op.name)


def _types(node: Any, graph: Any) -> Iterator[str]:
    """Yield the types of an op, a NodeDef, and of all ops in the functions that it runs."""
    yield str(node.op)
    for name in _functions(node):
        for inner in graph._get_function(name).definition.node_def:
            yield from _types(inner, graph)


def _functions(node: Any) -> List[str]:
    """Return the names of the functions that an op, a NodeDef, runs."""
    names = []
    for value in node.attr.values():
        names += [function.name for function in value.list.func]
        if value.HasField("func"):
            names.append(value.func.name)
    return names
