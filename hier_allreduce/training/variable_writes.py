"""Which variables ops write: found in the graph, whatever wrote it down there.

::

    AssignAddVariableOp ◄── Switch ◄── VarHandleOp "steps"       a write of "steps", in a condition of TensorFlow 1
    If ◄── VarHandleOp "steps"                                   one too, where a branch assigns what it is given there
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Iterator, List, Mapping, Sequence

import tensorflow as tf

_WRITES = re.compile("(Resource)?(Sparse)?(Assign|Apply|Scatter|StridedSliceAssign)")  # types of ops
_PASS_ON = ("Identity", "Switch", "Enter", "RefIdentity", "RefSwitch", "RefEnter")
# types of ops that run functions, with the number of inputs before those that the functions are given
_CALLS = {
    **{"If": 1, "StatelessIf": 1, "Case": 1, "StatelessCase": 1, "While": 0, "StatelessWhile": 0},
    **{"PartitionedCall": 0, "StatefulPartitionedCall": 0},
}


def written_by(ops: Sequence[Any]) -> Counter:
    """How often ``ops`` write each variable, by the name of its op; what it starts from does not count."""
    found: Counter = Counter()
    calls = any(op.type in _CALLS for op in ops)
    functions = {one.signature.name: one for one in ops[0].graph.as_graph_def().library.function} if calls else {}
    for op in ops:
        if op.type in _CALLS or _WRITES.match(op.type):
            for place in set(_written(op.node_def, functions)):
                given = op.inputs[place]
                if given.dtype == tf.resource or given.dtype._is_ref_dtype:
                    name = _variable(given.op)
                    found[name] += op.name != f"{name}/Assign"
    return +found


def _variable(op: Any) -> str:
    while op.type in _PASS_ON:
        op = op.inputs[0].op
    return str(op.name)


def _written(node: Any, functions: Mapping[str, Any]) -> Iterator[int]:
    """The numbers of the inputs that an op writes, itself or in a function that it runs.

    Args:
        node: the op as a NodeDef.
        functions: of the graph, by their names.
    """
    if node.op not in _CALLS:
        yield from [0] if _WRITES.match(node.op) else []
        return
    called = [value.func.name for value in node.attr.values() if value.HasField("func")]
    called += [function.name for value in node.attr.values() for function in value.list.func]
    for function in (functions[name] for name in called if name in functions):
        arguments = {argument.name: place for place, argument in enumerate(function.signature.input_arg)}
        for inner in function.node_def:
            given: List[Any] = [arguments.get(name.split(":")[0]) for name in inner.input if name[0] != "^"]
            if inner.op == "Identity" and given[0] is not None:
                arguments[inner.name] = given[0]
            yield from (_CALLS[node.op] + given[n] for n in _written(inner, functions) if given[n] is not None)
