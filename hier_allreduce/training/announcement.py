"""What hosts compare of an update before the first step, because all have to do the same.

::

    optimizer ─► its class and numbers ─────────────┐
    update ─► the ops that it needs ─► constants ───┼─► lines, equal on hosts with equal updates
                                   └─► a digest ────┘

Names, devices and the order of ops do not count, because a host may build more than another. Of the
branches and loops of TensorFlow 2, which are functions, only inputs and outputs count.
"""

from __future__ import annotations

import hashlib
from typing import Any, Dict, List, Set

import tensorflow as tf

from ..compat import tf1
from ..graph.record import all_reduces
from ..needs import needed_by


def announcement(optimizer: Any, update: Any, built_before: int) -> List[str]:
    """Return the lines about an update that hosts compare.

    Args:
        optimizer: the user's.
        update: the op that updates all towers.
        built_before: the number of ops that the graph had before the update was built.
    """
    lines = [f"optimizer: {type(optimizer).__name__}"]
    lines += [f"optimizer: {key}={setting}" for key, setting in numbers_of(optimizer).items()]
    # All-reduces are left out, because some of their ops know which host this is. Initial values
    # are, because no step needs them.
    all_reduces = tuple(built.scope for built in all_reduces(update.graph))
    needed = needed_by([update])
    digest_by_op: Dict[Any, str] = {}
    constants: Set[float] = set()
    for op in update.graph.get_operations()[built_before:]:
        if op not in needed or op.name.startswith(all_reduces):
            continue
        described = [_settings(op)]
        for tensor in op.inputs:
            source = tensor.op
            # What the update did not build may be anything, such as the loss. Only constants are
            # compared, such as a rate.
            outside: Any = (tensor.dtype.name, str(tensor.shape))
            is_const = source.type == "Const"
            if is_const:
                outside = _settings(source)
            if is_const and tensor.dtype.is_floating and tensor.shape.ndims == 0:
                constants.add(float(tf.get_static_value(tensor)))
            described.append((digest_by_op.get(source, outside), tensor.value_index))
        digest_by_op[op] = hashlib.sha256(repr(described).encode()).hexdigest()
    if constants:
        listed = ", ".join(f"{constant:.7g}" for constant in sorted(constants))
        lines.append(f"constants: {listed}")
    # Sorted digests are equal if the same ops were built in another order.
    digest = hashlib.sha256("".join(sorted(digest_by_op.values())).encode()).hexdigest()
    return [*lines, f"graph: {len(digest_by_op)} ops, {digest[:12]}"]


def numbers_of(optimizer: Any) -> Dict[str, Any]:
    """Return the numbers among the attributes of an optimizer, and of those in its attributes."""
    number_by_attribute: Dict[str, Any] = {}
    for attribute, state in vars(optimizer).items():
        if isinstance(state, tf1.train.Optimizer):
            for inner, setting in numbers_of(state).items():
                number_by_attribute[f"{attribute}.{inner}"] = setting
        elif isinstance(state, (bool, int, float)):
            number_by_attribute[attribute] = state
    return number_by_attribute


def _settings(op: Any) -> Any:
    """Return the type of an op and its attributes, but those that are names of anything."""
    settings: List[Any] = [op.type]
    for attribute, setting in sorted(op.node_def.attr.items()):
        field = setting.WhichOneof("value")
        is_named = attribute.startswith("_") or field in (None, "s", "func")
        if field == "list":
            is_named = is_named or bool(setting.list.s or setting.list.func)
        # Constant texts are parts of messages.
        if field == "tensor":
            is_named = is_named or setting.tensor.dtype == tf.string.as_datatype_enum
        if not is_named:
            settings.append((attribute, setting.SerializeToString()))
    return settings
