"""Which graphs take control edges from sums to backward passes, and what ops of a graph need."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Sequence, Set

from ..compat import takes_control_edges
from .columns import Column
from .devices import any_on_gpu

# A sum of two towers waits for one copy only, and edges then cost more than they gain.
FEWEST_TOWERS = 3
REFERENCE_VARIABLES = ("Variable", "VariableV2")


def takes_edges(columns: Sequence[Column], devices: Sequence[Any]) -> bool:
    """Return whether the backward passes of K towers of one host can wait for sums.

    Four kinds of graphs are left alone: those of a ``tf.function``, which orders the effects of its
    ops later, and in its own way; those that a session may know, because it does not follow edges
    that it has not seen; those with reference variables; and loops and branches.
    """
    if len(devices) < FEWEST_TOWERS or not any_on_gpu(devices) or not takes_control_edges():
        return False
    # An update may overwrite a reference variable before an op that waits has read it.
    return not any(op.type in REFERENCE_VARIABLES for op in first_needs([ends_of(columns)]))


def ends_of(columns: Sequence[Column]) -> Set[Any]:
    """Return the ops of all gradients. The pass does not go on there, so they need not wait."""
    return {grad.op for column in columns for grad in column.grads if grad is not None}


def first_needs(ends: Iterable[Iterable[Any]]) -> Dict[Any, int]:
    """Return ``{op: the number of the first end that needs it}``, for all ops that ends need."""
    needed_by: Dict[Any, int] = {}
    for end, ops in enumerate(ends):
        waiting = list(ops)
        while waiting:
            op = waiting.pop()
            if op not in needed_by:
                needed_by[op] = end
                waiting.extend(sources(op))
    return needed_by


def sources(op: Any) -> List[Any]:
    """Return the ops that an op needs, by data or control edges."""
    return [*(tensor.op for tensor in op.inputs), *op.control_inputs]
