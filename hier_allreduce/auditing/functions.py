"""Functions of TensorFlow 2, such as that of Keras ``fit``: there is no session that returns partition graphs."""

from __future__ import annotations

from typing import Any, Callable, Sequence, Tuple

from ..errors import AuditError
from ..graph.record import recorded_graphs, recorded_in
from ..graph.tf import collected_graphs


def first_step(step: Callable[[], Any]) -> Tuple[Sequence[Any], str, Any]:
    """Run ``tf.function``s that have not run before: TensorFlow tells only then which nodes it executes.

    Returns:
        Of the function with most all-reduces, the partition graphs, the scope with which names begin there, the graph.

    Raises:
        AuditError: no function with an all-reduce ran for the first time.
    """
    before = recorded_graphs()
    with collected_graphs() as functions:
        step()
    new = [graph for graph in recorded_graphs() if all(graph is not other for other in before)]
    for graph in sorted(new, key=lambda graph: -len(recorded_in(graph))):
        for partitions in (function.partition_graphs for function in functions):
            for node in (node for part in partitions for node in part.node):
                prefix, found, _ = node.name.partition(recorded_in(graph)[0].scope)
                if found and (not prefix or prefix.endswith("/")):
                    return partitions, prefix, graph
    raise AuditError(
        "no tf.function with an all-reduce ran for the first time; audit the first step of a program, before any other"
        " call of its function. For a session, pass the RunMetadata of a step"
    )
