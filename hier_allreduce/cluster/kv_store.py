"""A key-value store on each host's TensorFlow server, through which hosts exchange short texts.

::

    this process ─── put(task, key, text) ──► string variable ``hier_allreduce/KEY`` on the CPU of host ``task``
                 ◄── get(task, key) ─────────

Each server is reached by a session that sees that host only: no collective is involved, and no third host is waited
for.
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from ..graph import tf1

_FAILED = object()


class KeyValueStore:
    """Texts on the servers of all hosts, by task and key."""

    def __init__(self, hosts: Sequence[str], seconds: float):
        """Note the addresses; no session is opened yet.

        Args:
            hosts: the addresses of all hosts, by task.
            seconds: how long one operation may take.
        """
        self._hosts, self._milliseconds = hosts, max(1, int(1000 * seconds))
        self._sessions: Dict[int, Any] = {}
        self._ops: Dict[Tuple[Any, str], _Ops] = {}  # built once, by the session's graph and the key

    def put(self, task: int, key: str, text: str) -> bool:
        """Store ``text`` on a host's server; return False if there is no server or it does not answer."""
        ops = self._ops_of(task, key)
        return self._run(task, ops.put, {ops.text: text.encode()}) is not _FAILED

    def get(self, task: int, key: str) -> Optional[str]:
        """Return the text of ``key`` on a host's server; None if it is unset or the server does not answer."""
        ops = self._ops_of(task, key)
        if self._run(task, ops.is_set) in (_FAILED, False):  # TensorFlow logs a warning if an unset variable is read
            return None
        text = self._run(task, ops.get)
        return None if text is _FAILED else bytes(text).decode()

    def close(self, task: int) -> None:
        """Close the session on a host's server. This waits for the server, so it should still be there."""
        if task in self._sessions:
            with contextlib.suppress(tf.errors.OpError):
                self._sessions.pop(task).close()

    def _run(self, task: int, fetch: Any, feed: Optional[Dict[Any, bytes]] = None) -> Any:
        try:
            return self._sessions[task].run(fetch, feed)
        except (tf.errors.FailedPreconditionError, tf.errors.NotFoundError):
            return _FAILED
        except (tf.errors.UnavailableError, tf.errors.DeadlineExceededError):
            return _FAILED  # the session is kept: closing it would wait for the host once more
        except tf.errors.AbortedError:
            del self._sessions[task]  # it belonged to an earlier process at this address
            return _FAILED

    def _ops_of(self, task: int, key: str) -> _Ops:
        if task not in self._sessions:
            # A session waits at its start for all hosts that it may use. This filter matches none.
            config = tf1.ConfigProto(operation_timeout_in_ms=self._milliseconds, device_filters=["/job:nobody"])
            self._sessions[task] = tf1.Session(f"grpc://{self._hosts[task]}", tf.Graph(), config)
        graph = self._sessions[task].graph
        if (graph, key) not in self._ops:
            with graph.as_default(), tf1.device("/cpu:0"):
                self._ops[graph, key] = _build_ops(key)
        return self._ops[graph, key]


class _Ops(NamedTuple):
    """The ops of one key; ``text`` is the placeholder that ``put`` stores."""

    text: Any
    put: Any
    is_set: Any
    get: Any


def _build_ops(key: str) -> _Ops:
    variable = tf.raw_ops.VarHandleOp(dtype=tf.string, shape=[], shared_name=f"hier_allreduce/{key}")
    text = tf1.placeholder(tf.string, [])
    return _Ops(
        text=text,
        put=tf.raw_ops.AssignVariableOp(resource=variable, value=text),
        is_set=tf.raw_ops.VarIsInitializedOp(resource=variable),
        get=tf.raw_ops.ReadVariableOp(resource=variable, dtype=tf.string),
    )
