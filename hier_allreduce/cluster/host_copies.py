"""Copies between hosts by TensorFlow's gRPC, each timed on the clock of its receiver.

::

    receiver   go ┄┄┄┄┐                  ┌─► end
    sender            └┄► slice ──gRPC───┘          ┄ control edges, which cross between hosts too

The sessions of a cluster see their own host only. These copies need a session that sees all hosts: one host drives
them, and the others wait.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Dict, Sequence, Tuple

import tensorflow as tf

from ..errors import ClusterError
from ..graph import tf1
from .session import ClusterSession, summary

_TIMEOUT_MS = 60_000
_FLOAT = 4  # bytes
Pair = Tuple[int, int]  # the tasks of sender and receiver


class _CopySession(tf1.Session):
    """A session that can be left open, even by its destructor: closing it would wait for a host that is gone."""

    open_for_good = False

    def close(self) -> None:
        if not self.open_for_good:
            super().close()


class HostCopies:
    """Times copies between any two hosts of a cluster. One host uses it.

    Args:
        session: this host's session of the cluster.
        hosts: the addresses of the H hosts, by task.
        device: the device on every host from which and to which to copy, such as ``"/cpu:0"``.
        largest: the most bytes of a copy. Every host holds as many.
    """

    def __init__(self, session: ClusterSession, hosts: Sequence[str], device: str, largest: int):
        self._watched, self._hosts, self._device = session, tuple(hosts), device
        self._steps: Dict[Tuple[Any, ...], Any] = {}
        self._graph = tf.Graph()
        with self._graph.as_default():
            fill = self._build(largest // _FLOAT)
        self._session = _CopySession(session.sess_str, self._graph, plain_config(_TIMEOUT_MS))
        self._run(range(len(hosts)), fill)

    def close(self) -> None:
        """Close the session, unless an exception brings this host here: another host may be gone."""
        self._session.open_for_good |= sys.exc_info()[1] is not None
        self._session.close()

    def together(self, pairs: Sequence[Pair], size: int) -> float:
        """Return the seconds of the slowest of some copies at once, of ``size`` bytes each.

        A copy begins with a message to its sender, so the time includes a way there and a way back.

        Raises:
            ClusterError: a host is gone, or the copies take longer than a minute; names the hosts.
        """
        key = ("together", tuple(pairs), size)
        if key not in self._steps:
            with self._graph.as_default():
                self._steps[key] = [self._copy(src, dst, size) for src, dst in pairs]
        clocks = self._run({task for pair in pairs for task in pair}, self._steps[key])
        return max(float(end - go) for go, end in clocks)

    def hops(self, pair: Pair, count: int, size: int) -> float:
        """Return the seconds of ``count`` copies of one value between two hosts, to and fro; ``count`` is even.

        Raises:
            ClusterError: as in :meth:`together`.
        """
        key = ("hops", pair, count, size)
        if key not in self._steps:
            with self._graph.as_default():
                self._steps[key] = self._chain(pair, count, size)
        go, end = self._run(pair, self._steps[key])
        return float(end - go)

    # ---- the graph -------------------------------------------------------------------------------------

    def _build(self, elements: int) -> Any:
        self._values, fills = [], []
        for task in range(len(self._hosts)):
            with tf1.device(self._on(task)):
                source = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[elements], shared_name="hier_allreduce_copies")
                fills.append(tf.raw_ops.AssignVariableOp(resource=source, value=tf.ones([elements])))
                self._values.append(tf.raw_ops.ReadVariableOp(resource=source, dtype=tf.float32))
        return tf.group(*fills)

    def _on(self, task: int) -> str:
        return f"/job:worker/task:{task}{self._device}"

    def _clock(self, task: int, after: Sequence[Any] = ()) -> Any:
        with tf1.device(f"/job:worker/task:{task}/cpu:0"), tf1.control_dependencies(after):
            return tf.raw_ops.Timestamp()

    def _part(self, task: int, go: Any, size: int) -> Any:
        with tf1.device(self._on(task)), tf1.control_dependencies([go.op]):
            return tf.raw_ops.Slice(input=self._values[task], begin=[0], size=[size // _FLOAT])

    def _received(self, task: int, value: Any) -> Any:
        with tf1.device(self._on(task)):
            return tf.identity(value)

    def _copy(self, src: int, dst: int, size: int) -> Tuple[Any, Any]:
        go = self._clock(dst)
        return go, self._clock(dst, [self._received(dst, self._part(src, go, size)).op])

    def _chain(self, pair: Pair, count: int, size: int) -> Tuple[Any, Any]:
        go = self._clock(pair[0])
        value = self._part(pair[0], go, size)
        for hop in range(1, count + 1):
            value = self._received(pair[hop % 2], value)
        return go, self._clock(pair[0], [value.op])

    # ---- runs ------------------------------------------------------------------------------------------

    def _run(self, tasks: Any, fetches: Any) -> Any:
        try:
            return self._watched.watch(functools.partial(self._session.run, fetches))
        except tf.errors.OpError as error:
            named = ", ".join(f"host {task} ({self._hosts[task]})" for task in sorted(tasks))
            raise ClusterError(
                f"copies between {named} failed: {summary(error)}. Each host must reach the other's port"
            ) from error


def plain_config(timeout_ms: int = 0) -> Any:
    """Return a ConfigProto for sessions that run exactly the ops that were built."""
    config = tf1.ConfigProto(operation_timeout_in_ms=timeout_ms)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = tf1.OptimizerOptions.L0
    return config
