"""What ops of a graph need."""

from __future__ import annotations

from typing import Any, Callable, Container, Iterable, List, Set


def sources(op: Any) -> List[Any]:
    """Return the ops that an op needs, by data or control edges."""
    return [*(tensor.op for tensor in op.inputs), *op.control_inputs]


def needed_by(
    ops: Iterable[Any],
    without: Container[Any] = (),
    sources_of: Callable[[Any], Iterable[Any]] = sources,
) -> Set[Any]:
    """Return ops and all that they need, but not those in ``without``, nor what these need."""
    needed: Set[Any] = set()
    waiting = list(ops)
    while waiting:
        op = waiting.pop()
        if op not in needed and op not in without:
            needed.add(op)
            waiting += sources_of(op)
    return needed
