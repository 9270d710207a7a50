"""A few lines of text on every host's server that every other host can read: how hosts agree before they start.

A text is a string variable on the server's CPU, found by its name. It is written and read through a session of its own
on each server, which knows that host only: no collective is involved, and nobody waits for a third host.
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, NamedTuple, Optional, Sequence

import tensorflow as tf

from ..graph import tf1

_NOTHING = object()


class KeyValueStore:
    """What this process writes to and reads from the hosts' servers."""

    def __init__(self, hosts: Sequence[str], seconds: float):
        """Nothing is opened yet.

        Args:
            hosts: the addresses of all hosts, by task.
            seconds: how long one reading or writing may take.
        """
        self._hosts, self._milliseconds = hosts, max(1, int(1000 * seconds))
        self._servers: Dict[int, _Server] = {}

    def write(self, task: int, topic: str, text: str) -> bool:
        """Put ``text`` up on a host's server; False if there is none, or it does not answer."""
        ops = self._server(task).ops(topic)
        return self._asked(task, ops.write, {ops.text: text.encode()}) is not _NOTHING

    def read(self, task: int, topic: str) -> Optional[str]:
        """The text of a topic on a host's server; None while there is none, or no server."""
        ops = self._server(task).ops(topic)
        if self._asked(task, ops.is_there) in (_NOTHING, False):  # TensorFlow warns of reading what is not there
            return None
        found = self._asked(task, ops.read)
        return None if found is _NOTHING else bytes(found).decode()

    def close(self, task: int) -> None:
        """Close what was opened on a host's server, which should still be there: it is waited for."""
        if task in self._servers:
            with contextlib.suppress(tf.errors.OpError):
                self._servers.pop(task).session.close()

    def _asked(self, task: int, fetch: Any, feed: Optional[Dict[Any, bytes]] = None) -> Any:
        try:
            return self._servers[task].session.run(fetch, feed)
        except (tf.errors.FailedPreconditionError, tf.errors.NotFoundError):
            return _NOTHING
        except (tf.errors.UnavailableError, tf.errors.DeadlineExceededError):
            return _NOTHING  # the session is kept: closing it would wait for the host once more
        except tf.errors.AbortedError:
            del self._servers[task]  # an earlier process at this address
            return _NOTHING

    def _server(self, task: int) -> _Server:
        if task not in self._servers:
            # a filter that lets no host through: a session waits for all that it may use before it starts
            config = tf1.ConfigProto(operation_timeout_in_ms=self._milliseconds, device_filters=["/job:nobody"])
            self._servers[task] = _Server(tf1.Session(f"grpc://{self._hosts[task]}", tf.Graph(), config))
        return self._servers[task]


class _Server:
    """A session on one host's server, and what was built in its graph: a topic's ops once, however often they run."""

    def __init__(self, session: Any):
        self.session = session
        self._ops: Dict[str, _Ops] = {}

    def ops(self, topic: str) -> _Ops:
        if topic not in self._ops:
            with self.session.graph.as_default(), tf1.device("/cpu:0"):
                self._ops[topic] = _built(topic)
        return self._ops[topic]


class _Ops(NamedTuple):
    """Of one topic; ``text`` is what ``write`` is fed with."""

    text: Any
    write: Any
    is_there: Any
    read: Any


def _built(topic: str) -> _Ops:
    variable = tf.raw_ops.VarHandleOp(dtype=tf.string, shape=[], shared_name=f"hier_allreduce/{topic}")
    text = tf1.placeholder(tf.string, [])
    return _Ops(
        text=text,
        write=tf.raw_ops.AssignVariableOp(resource=variable, value=text),
        is_there=tf.raw_ops.VarIsInitializedOp(resource=variable),
        read=tf.raw_ops.ReadVariableOp(resource=variable, dtype=tf.string),
    )
