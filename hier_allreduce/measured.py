"""A process that ``hier-allreduce tune`` measures: the only reader of its environment variable.

::

    HIER_ALLREDUCE_TUNE={"peer": "", "changes": {"algorithm": "flat"}, "clock": "/tmp/…/3.clock"}

In all other processes the decorators return their function as it is, because the variable is read
when the modules are imported. In a measured process, one of them changes the strategy, and the
other one adds an op that appends the time to the clock file at every step. The first all-reduce of
a graph has that op, so that it runs once a step. Facts about the program are written beside the
clock file: ``tune`` makes its candidates from them.
"""

from __future__ import annotations

import functools
import json
import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, TypeVar, cast

from .errors import ClusterError

VARIABLE = "HIER_ALLREDUCE_TUNE"
KEPT = ("sparse", "missing", "wire_dtype")  # of the program's strategy, in every candidate

F = TypeVar("F", bound=Callable[..., Any])
_noted: Dict[str, Any] = {"front_end": "towers"}
_timed: Any = weakref.WeakSet()  # the graphs that have a clock


class Measurement(NamedTuple):
    """The request of ``tune`` to a process.

    Attributes:
        peer: the name of an all-reduce that is not ours; empty for ours.
        changes: fields of :class:`hier_allreduce.Strategy`, instead of the program's.
        clock: the path of the file that gets a line at every step.
    """

    peer: str
    changes: Dict[str, Any]
    clock: str

    def as_text(self) -> str:
        """Return the value of the variable."""
        return json.dumps(self._asdict())

    def note(self, **facts: Any) -> None:
        """Write facts beside the clock file; of two all-reduces the one with more ``bytes`` counts.

        Statistics and losses are reduced too, and the all-reduce of the gradients is the largest.
        """
        if "bytes" in facts and facts["bytes"] <= _noted.get("bytes", -1):
            return
        _noted.update(facts)
        path = Path(self.clock + ".new")
        path.write_text(json.dumps(_noted), encoding="utf-8")
        path.replace(self.clock + ".facts")  # the reader never sees half a file


def measurement() -> Optional[Measurement]:
    """Return the request of ``tune``; None in all processes that it has not started."""
    text = os.environ.get(VARIABLE)
    return Measurement(**json.loads(text)) if text else None


def read_facts(clock: str) -> Dict[str, Any]:
    """Return the facts beside a clock file; none before the program has built an all-reduce."""
    path = Path(clock + ".facts")
    if not path.exists():
        return {}
    facts: Dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return facts


def with_candidate(plan: F) -> F:
    """Let ``plan(all_grads, devices, average, strategy, cluster, …) -> layout`` use the candidate.

    The decorated function raises a ClusterError if there are several hosts: ``tune`` measures one.
    """
    asked = measurement()
    if asked is None:
        return plan
    changes = asked.changes
    note = asked.note

    @functools.wraps(plan)
    def planned(
        all_grads: Any,
        devices: Any,
        average: bool,
        strategy: Any,
        cluster: Any = None,
        *others: Any,
        **options: Any,
    ) -> Any:
        if cluster is not None and cluster.size > 1:
            raise ClusterError(
                f"tune measures one host, and this program has {cluster.size}:"
                " run it without a cluster"
            )
        changed = replace(strategy, **changes)
        layout = plan(all_grads, devices, average, changed, cluster, *others, **options)
        note(**_facts(layout, strategy))
        return layout

    return cast(F, planned)


def _facts(layout: Any, strategy: Any) -> Dict[str, Any]:
    """Return the facts about an all-reduce: its size, its plan, and the program's strategy."""
    default = type(strategy)()
    kept = {name: getattr(strategy, name) for name in KEPT}
    given = {name: value for name, value in kept.items() if value != getattr(default, name)}
    on_cpus = all("CPU" in str(device).upper() for device in layout.devices)
    return {
        "towers": len(layout.devices),
        "gpus": not on_cpus,
        "bytes": sum(chunk.bytes for chunk in layout.chunks),
        "algorithm": layout.plan.algorithm,
        "chunk_bytes": layout.plan.chunk_bytes,
        "is_default": strategy == replace(default, **kept),
        "kept": given,
    }


def with_clock(reduce: F) -> F:
    """Let a function that returns K rows of N reduced gradients run the clock op once a step."""
    asked = measurement()
    if asked is None:
        return reduce
    clock = asked.clock

    @functools.wraps(reduce)
    def timed(*args: Any, **options: Any) -> Any:
        return _timed_rows(reduce(*args, **options), clock)

    return cast(F, timed)


def _has_gradient(row: Sequence[Any]) -> bool:
    return any(entry is not None for entry in row)


def _timed_rows(rows: Sequence[Tuple[Any, ...]], clock: str) -> List[Tuple[Any, ...]]:
    """Return K rows of N reduced gradients, one of which waits for the clock op."""
    import tensorflow as tf  # only a measured process gets here, and the ground needs no TensorFlow

    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    tower = next((k for k, row in enumerate(rows) if _has_gradient(row)), None)
    if tower is None or graph in _timed:
        return list(rows)
    if graph is not None:
        _timed.add(graph)
    row = list(rows[tower])
    column = next(n for n, entry in enumerate(row) if entry is not None)
    value = row[column]
    if isinstance(value, tf.IndexedSlices):
        values = _after_clock(tf, value.values, clock)
        row[column] = tf.IndexedSlices(values, value.indices, value.dense_shape)
    else:
        row[column] = _after_clock(tf, value, clock)
    changed = list(rows)
    changed[tower] = tuple(row)
    return changed


def _after_clock(tf: Any, tensor: Any, clock: str) -> Any:
    """Return a copy of a tensor, after a line with the time is in the clock file."""
    with tf.device("/cpu:0"), tf.control_dependencies([tensor]):
        now = tf.strings.as_string(tf.timestamp(), precision=6)
        with tf.control_dependencies([now]):
            written = tf.print(now, output_stream=f"file://{clock}")
    # eagerly the line is written by now, and there is no op to wait for
    waited = [] if written is None else [written]
    with tf.device(tensor.device), tf.control_dependencies(waited):
        return tf.identity(tensor)
