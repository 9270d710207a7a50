"""Effects of a tower's update: the variables that it writes, and ops that differ on every tower.

The graph shows both, whoever built the ops::

    AssignAddVariableOp ◄── Switch ◄── VarHandleOp "steps"       a write of "steps", in a condition of TensorFlow 1
    If ◄── VarHandleOp "steps"                                   one too, if a branch assigns to that argument
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Dict, Iterator, List, Mapping, Sequence

import tensorflow as tf

# patterns of op types
_WRITES = re.compile("(Resource)?(Sparse)?(Assign|Apply|Scatter|StridedSliceAssign)")
_RANDOM = re.compile("Random|Stateful(Uniform|Standard|Truncated|Random)|(Parameterized)?Truncated|Multinomial|Rng")
_PYTHON = re.compile("(Eager)?PyFunc")
_PASS_ON = ("Identity", "Switch", "Enter", "RefIdentity", "RefSwitch", "RefEnter")
# types of ops that run functions, with the number of inputs before the functions' arguments
_CALLS = {
    **{"If": 1, "StatelessIf": 1, "Case": 1, "StatelessCase": 1, "While": 0, "StatelessWhile": 0},
    **{"PartitionedCall": 0, "StatefulPartitionedCall": 0},
}


def written_by(ops: Sequence[Any]) -> Counter:
    """Count how often ``ops`` write each variable, by the name of its op; initial values do not count."""
    counts: Counter = Counter()
    functions = _functions(ops)
    for op in ops:
        for index in set(_written_inputs(op.node_def, functions)) if _may_write(op.type) else ():
            tensor = op.inputs[index]
            if tensor.dtype == tf.resource or tensor.dtype._is_ref_dtype:
                name = _variable_name(tensor.op)
                if op.name != f"{name}/Assign":
                    counts[name] += 1
    return counts


def unequal_ops(update: Any, ops: Sequence[Any]) -> Iterator[str]:
    """Yield a phrase for each op behind ``update`` that draws random numbers or calls Python.

    Args:
        update: an op, or its result.
        ops: all ops that were added with it.
    """
    functions, added, waiting = _functions(ops), set(ops), [getattr(update, "op", update)]
    while waiting:
        op = waiting.pop()
        if op not in added:  # it is older, and all towers read its one result; or it was seen
            continue
        added.remove(op)
        waiting += [*op.control_inputs, *(tensor.op for tensor in op.inputs)]
        for kind in _types(op.node_def, functions):
            if _RANDOM.match(kind):
                yield f"draws random numbers ({op.name!r}, {kind})"
            if _PYTHON.match(kind):
                yield f"calls a function in Python ({op.name!r}, {kind})"


def _functions(ops: Sequence[Any]) -> Dict[str, Any]:
    """Return the functions of the ops' graph by name, if any op runs one."""
    calls = any(op.type in _CALLS for op in ops)
    return {f.signature.name: f for f in ops[0].graph.as_graph_def().library.function} if calls else {}


def _called(node: Any, functions: Mapping[str, Any]) -> List[Any]:
    """Return the functions that an op, a NodeDef, runs."""
    names = [value.func.name for value in node.attr.values() if value.HasField("func")]
    names += [function.name for value in node.attr.values() for function in value.list.func]
    return [functions[name] for name in names if name in functions]


def _types(node: Any, functions: Mapping[str, Any]) -> Iterator[str]:
    """Yield the types of an op and of all ops in the functions that it runs."""
    yield str(node.op)
    for function in _called(node, functions) if node.op in _CALLS else ():
        for inner in function.node_def:
            yield from _types(inner, functions)


def _may_write(kind: str) -> bool:
    return kind in _CALLS or bool(_WRITES.match(kind))


def _variable_name(op: Any) -> str:
    while op.type in _PASS_ON:
        op = op.inputs[0].op
    return str(op.name)


def _written_inputs(node: Any, functions: Mapping[str, Any]) -> Iterator[int]:
    """Yield the numbers of the inputs that an op, a NodeDef, writes itself or in a function that it runs."""
    if node.op not in _CALLS:
        yield from [0] if _WRITES.match(node.op) else []
        return
    for function in _called(node, functions):
        arguments = {argument.name: index for index, argument in enumerate(function.signature.input_arg)}
        for inner in function.node_def:
            # the number of the argument that each input is; None if it is not an argument
            indices: List[Any] = [arguments.get(name.split(":")[0]) for name in inner.input if name[0] != "^"]
            if inner.op == "Identity" and indices[0] is not None:
                arguments[inner.name] = indices[0]
            written = (indices[n] for n in _written_inputs(inner, functions))
            yield from (_CALLS[node.op] + index for index in written if index is not None)
