"""The graph of a program that ``hier-allreduce tune`` measures: another strategy, and one clock op. Else nothing.

The first all-reduce of a graph has the clock, so that it runs once a step: in a session or function because a reduced
gradient waits for it, and eagerly with every call.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, List, Sequence, Tuple

import tensorflow as tf

from ..compat import tf1
from ..errors import ClusterError
from ..planning import Strategy
from ..planning.strategy import AUTO
from ..tuned import tuned
from .devices import all_on_cpu
from .layout import Layout, size_of

_timed: Any = weakref.WeakSet()  # the graphs that have a clock


def tuned_strategy(strategy: Strategy, cluster: Any) -> Strategy:
    """Return the strategy to use: the user's, with the changes of the candidate that is measured.

    Raises:
        ClusterError: a candidate is measured, and there are several hosts.
    """
    candidate = tuned()
    if candidate and cluster is not None and cluster.size > 1:
        raise ClusterError(
            f"tune measures one host, and this program has {cluster.size}: measure it without a cluster"
        )
    return replace(strategy, **candidate.changes) if candidate else strategy


def note_facts(layout: Layout, strategy: Strategy) -> None:
    """Write the facts from which ``tune`` makes its candidates, if one is measured."""
    candidate = tuned()
    if candidate is None:
        return
    default, kept = Strategy(), ("sparse", "missing", "wire_dtype")
    asks = (strategy.algorithm, strategy.chunk_bytes, strategy.main)
    candidate.note(
        towers=len(layout.devices),
        gpus=not all_on_cpu(layout.devices),
        bytes=sum(size_of(column).bytes for column in layout.columns),
        chunk_bytes=layout.plan.chunk_bytes,
        algorithm=layout.plan.algorithm,
        planned=asks == (AUTO, None, None),
        kept={
            key: getattr(strategy, key)
            for key in kept
            if getattr(strategy, key) != getattr(default, key)
        },
    )


def with_clock(rows: Sequence[Tuple[Any, ...]]) -> List[Tuple[Any, ...]]:
    """Return K rows of N reduced gradients, one of which waits for the clock op of the candidate that is measured."""
    candidate = tuned()
    graph = None if tf.executing_eagerly() else tf1.get_default_graph()
    present = [
        (k, n) for k, row in enumerate(rows) for n, value in enumerate(row) if value is not None
    ]
    if candidate is None or graph in _timed or not present:
        return list(rows)
    if graph is not None:
        _timed.add(graph)
    k, n = present[0]
    value = rows[k][n]
    tensor = value.values if isinstance(value, tf.IndexedSlices) else value
    with tf.device("/cpu:0"), tf.control_dependencies([tensor]):
        now = tf.strings.as_string(tf.timestamp(), precision=6)
        with tf.control_dependencies([now]):
            written = tf.print(now, output_stream=f"file://{candidate.clock}")
    with tf.device(tensor.device), tf.control_dependencies([] if written is None else [written]):
        tensor = tf.identity(tensor)
    if isinstance(value, tf.IndexedSlices):
        tensor = tf.IndexedSlices(tensor, value.indices, value.dense_shape)
    changed = list(rows)
    changed[k] = (*rows[k][:n], tensor, *rows[k][n + 1 :])
    return changed
