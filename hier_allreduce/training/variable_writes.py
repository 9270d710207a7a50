"""Which variables ops write. The graph says so, whoever built the ops.

::

    AssignAddVariableOp ◄── Switch ◄── VarHandleOp "steps"       a write of "steps", in a condition of TensorFlow 1
    If ◄── VarHandleOp "steps"                                   one too, if a branch assigns to that argument
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Iterator, List, Mapping, Sequence

import tensorflow as tf

_WRITES = re.compile("(Resource)?(Sparse)?(Assign|Apply|Scatter|StridedSliceAssign)")  # types of ops
_PASS_ON = ("Identity", "Switch", "Enter", "RefIdentity", "RefSwitch", "RefEnter")
# types of ops that run functions, with the number of inputs before the functions' arguments
_CALLS = {
    **{"If": 1, "StatelessIf": 1, "Case": 1, "StatelessCase": 1, "While": 0, "StatelessWhile": 0},
    **{"PartitionedCall": 0, "StatefulPartitionedCall": 0},
}


def written_by(ops: Sequence[Any]) -> Counter:
    """Count how often ``ops`` write each variable, by the name of its op; initial values do not count."""
    counts: Counter = Counter()
    calls = any(op.type in _CALLS for op in ops)
    functions = {f.signature.name: f for f in ops[0].graph.as_graph_def().library.function} if calls else {}
    for op in ops:
        if op.type in _CALLS or _WRITES.match(op.type):
            for place in set(_written_inputs(op.node_def, functions)):
                tensor = op.inputs[place]
                if tensor.dtype == tf.resource or tensor.dtype._is_ref_dtype:
                    name = _variable_name(tensor.op)
                    if op.name != f"{name}/Assign":
                        counts[name] += 1
    return counts


def _variable_name(op: Any) -> str:
    while op.type in _PASS_ON:
        op = op.inputs[0].op
    return str(op.name)


def _written_inputs(node: Any, functions: Mapping[str, Any]) -> Iterator[int]:
    """Yield the numbers of the inputs that an op writes, itself or in a function that it runs.

    Args:
        node: the op as a NodeDef.
        functions: the graph's functions by name.
    """
    if node.op not in _CALLS:
        yield from [0] if _WRITES.match(node.op) else []
        return
    called = [value.func.name for value in node.attr.values() if value.HasField("func")]
    called += [function.name for value in node.attr.values() for function in value.list.func]
    for function in (functions[name] for name in called if name in functions):
        arguments = {argument.name: place for place, argument in enumerate(function.signature.input_arg)}
        for inner in function.node_def:
            # the number of the argument that each input is; None if it is not an argument
            places: List[Any] = [arguments.get(name.split(":")[0]) for name in inner.input if name[0] != "^"]
            if inner.op == "Identity" and places[0] is not None:
                arguments[inner.name] = places[0]
            written = (places[n] for n in _written_inputs(inner, functions))
            yield from (_CALLS[node.op] + place for place in written if place is not None)
