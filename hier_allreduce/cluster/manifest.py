"""What a host builds in its graphs, as JSON: hosts compare it before the first step.

::

    {"all-reduce 0 (hier_allreduce)": {"gradients": {"w": "float32 [5, 7]"}, "strategy": …, "collectives before": 0},
     "broadcast 0": {"variables": {"tower0/w": "float32 [5, 7]"}, "collectives before": 3}}

A collective meets those of the other hosts by its number. So hosts whose graphs differ would wait for ever.
"""

from __future__ import annotations

import weakref
from typing import Any, Dict, Mapping, Sequence

from ..errors import ClusterError, HierAllreduceError
from ..graph import Matrix, in_current_graph, is_sparse, op_names, static_shape, tf1
from .collectives import can_cross

ALL_REDUCE = "all-reduce"
BROADCAST = "broadcast"


class Manifest:
    """The all-reduces and broadcasts that this host has built, by graph."""

    def __init__(self) -> None:
        self._entries: weakref.WeakKeyDictionary[Any, Dict[str, Any]] = weakref.WeakKeyDictionary()

    def entries(self, graph: Any) -> Dict[str, Any]:
        """Return what has been built in a graph."""
        return self._entries.setdefault(graph, {})

    def add(self, graph: Any, kind: str, facts: Mapping[str, Any], collectives_before: int, name: str = "") -> None:
        """Note what is about to be built.

        Args:
            graph: where.
            kind: ``ALL_REDUCE`` or ``BROADCAST``.
            facts: what must be equal on all hosts.
            collectives_before: number of collectives that this process has built before, in all graphs.
            name: of an all-reduce.
        """
        entries = self.entries(graph)
        number = sum(key.startswith(kind) for key in entries)
        key = f"{kind} {number} ({name})" if name else f"{kind} {number}"
        entries[key] = {**facts, "collectives before": collectives_before}

    def lacks_broadcast(self, graph: Any) -> bool:
        """Whether a graph has all-reduces and trainable variables but no broadcast of their initial values."""
        kinds = {key.split()[0] for key in self.entries(graph)}
        return kinds == {ALL_REDUCE} and bool(graph.get_collection(tf1.GraphKeys.TRAINABLE_VARIABLES))


def gradient_facts(grads: Matrix) -> Dict[str, str]:
    """Return the dtype and shape of each variable's gradient, by the variable's name.

    Raises:
        HierAllreduceError: no collective can add up a gradient's dtype.
    """
    facts: Dict[str, str] = {}
    for name, column in zip(op_names(grads.names), grads.columns):
        grad = next(iter(column.present), None)
        if grad is not None and not can_cross(grad.dtype.base_dtype):
            raise HierAllreduceError(
                f"variable {column.variable} ({column.name!r}): {grad.dtype.name} cannot be added up across hosts;"
                " cast it to float32 or int64"
            )
        facts[name] = _dtype_and_shape(grad)
    return facts


def variable_facts(variables: Sequence[Any]) -> Dict[str, str]:
    """Return the dtype and shape of each variable, by its name, in alphabetical order.

    Raises:
        ClusterError: something is not a variable of the current graph, or has a dtype or shape that cannot be sent.
    """
    facts: Dict[str, str] = {}
    for variable in variables:
        if not (in_current_graph(variable) and hasattr(variable, "assign")):
            raise ClusterError(f"{variable!r} is not a variable of the graph being built, and cannot be sent")
        text = _dtype_and_shape(variable)
        if not can_cross(variable.dtype) or not variable.shape.is_fully_defined():
            raise ClusterError(
                f"variable {variable.op.name!r} is {text}: only numbers of known shape can be sent to other hosts;"
                " leave it out of the variables"
            )
        facts[variable.op.name] = text
    return dict(sorted(facts.items()))


def _dtype_and_shape(tensor: Any) -> str:
    """Return ``"float32 [5, 7]"``, ``"float32 ? sparse"`` or, for None, ``"None"``."""
    if tensor is None:
        return "None"
    shape = static_shape(tensor)
    sizes = shape.as_list() if shape.ndims is not None else "?"
    sparse = " sparse" if is_sparse(tensor) else ""
    return f"{tensor.dtype.base_dtype.name} {sizes}{sparse}"
