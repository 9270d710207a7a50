"""The audit of ``tf.function``s, such as that of Keras ``fit``: there is no session that returns partition graphs.

::

    step() ─► TensorFlow's partition graphs of each function that runs for the first time
                 outer/sgd/hier_allreduce/… ──without the name of its caller──► sgd/hier_allreduce/…  ─► audit
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import tensorflow as tf

from ..errors import AuditError
from ..graph import collected_graphs, emitted_in, emitting_graphs
from .auditing import Audit, audit


def audit_first_step(step: Callable[[], Any]) -> Audit:
    """Run a program's first training step, and compare what TensorFlow executed with the plans, as :func:`audit` does.

    ::

        print(audit_first_step(lambda: model.fit(dataset, steps_per_epoch=1)))    # before any other fit

    Args:
        step: runs one step of ``tf.function``s that have not run before: TensorFlow tells then only what it executes.

    Returns:
        The copies of the function with the most all-reduces; ``print`` it.

    Raises:
        AuditError: as :func:`audit`; or no function with an all-reduce ran for the first time.
    """
    before = emitting_graphs()
    with collected_graphs() as functions:
        step()
    new = [graph for graph in emitting_graphs() if all(graph is not other for other in before)]
    for graph in sorted(new, key=lambda graph: -len(emitted_in(graph))):
        for function in functions:
            prefix = _prefix(graph, function)
            if prefix is not None:
                return audit(_without(prefix, function), graph)
    raise AuditError(
        "no tf.function with an all-reduce ran for the first time; audit the first step of a program, before any other"
        " call of its function"
    )


def _prefix(graph: Any, function: Any) -> Optional[str]:
    """Return what stands before the names of a graph's ops in an executed function; None if it has none of them."""
    scope = emitted_in(graph)[0].scope
    for part in function.partition_graphs:
        for node in part.node:
            before, found, _ = node.name.partition(scope)
            if found and (not before or before.endswith("/")):
                return before
    return None


def _without(prefix: str, function: Any) -> Any:
    """Return a function's partition graphs, in RunMetadata, with the names that its ops had when they were built."""
    metadata = tf.compat.v1.RunMetadata()
    metadata.partition_graphs.extend(function.partition_graphs)
    if prefix:
        for node in (node for part in metadata.partition_graphs for node in part.node):
            node.name = _stripped(node.name, prefix)
            node.input[:] = [_stripped(name, prefix) for name in node.input]
            if "tensor_name" in node.attr:
                node.attr["tensor_name"].s = node.attr["tensor_name"].s.replace(prefix.encode(), b"", 1)
    return metadata


def _stripped(name: str, prefix: str) -> str:
    """Return a name, or an input with its mark ``^``, without the prefix."""
    mark = "^" if name.startswith("^") else ""
    rest = name[len(mark) :]
    return mark + (rest[len(prefix) :] if rest.startswith(prefix) else rest)
