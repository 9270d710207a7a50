"""A few lines of text on every host's server that every other host can read: how hosts agree before they start.

A text is a string variable on the server's CPU, found by its name. It is written and read through a session of its own
on each server, which knows that host only: no collective is involved, and nobody waits for a third host.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Sequence, Tuple

import tensorflow as tf

from .compat import tf1

_NOTHING = object()


class Board:
    """What this process writes to and reads from the hosts' servers."""

    def __init__(self, hosts: Sequence[str], seconds: float):
        """Nothing is opened yet.

        Args:
            hosts: the addresses of all hosts, by task.
            seconds: how long one reading or writing may take.
        """
        self._hosts, self._milliseconds = hosts, max(1, int(1000 * seconds))
        self._sessions: Dict[int, Any] = {}
        self._reads: Dict[Tuple[Any, str], Any] = {}

    def write(self, task: int, topic: str, text: str) -> bool:
        """Put ``text`` up on a host's server; False if there is none, or it does not answer."""
        session = self._session(task)
        with session.graph.as_default(), tf1.device("/cpu:0"):
            assign = tf.raw_ops.AssignVariableOp(resource=_variable(topic), value=tf.constant(text))
        return self._asked(task, assign) is not _NOTHING

    def read(self, task: int, topic: str) -> Optional[str]:
        """The text of a topic on a host's server; None while there is none, or no server."""
        session = self._session(task)
        if (session, topic) not in self._reads:
            with session.graph.as_default(), tf1.device("/cpu:0"):
                variable = _variable(topic)
                self._reads[session, topic] = (
                    tf.raw_ops.VarIsInitializedOp(resource=variable),
                    tf.raw_ops.ReadVariableOp(resource=variable, dtype=tf.string),
                )
        is_there, value = self._reads[session, topic]
        if self._asked(task, is_there) in (_NOTHING, False):  # reading what is not there makes TensorFlow log a warning
            return None
        found = self._asked(task, value)
        return None if found is _NOTHING else bytes(found).decode()

    def _asked(self, task: int, fetch: Any) -> Any:
        try:
            return self._sessions[task].run(fetch)
        except (tf.errors.FailedPreconditionError, tf.errors.NotFoundError):
            return _NOTHING
        except (tf.errors.UnavailableError, tf.errors.DeadlineExceededError):
            return _NOTHING  # the session is kept: closing it would wait for the host once more
        except tf.errors.AbortedError:
            del self._sessions[task]  # of an earlier process at this address
            return _NOTHING

    def _session(self, task: int) -> Any:
        if task not in self._sessions:
            # a filter that lets no host through: a session waits for all that it may use before it starts
            config = tf1.ConfigProto(operation_timeout_in_ms=self._milliseconds, device_filters=["/job:nobody"])
            self._sessions[task] = tf1.Session(f"grpc://{self._hosts[task]}", tf.Graph(), config)
        return self._sessions[task]


def _variable(topic: str) -> Any:
    return tf.raw_ops.VarHandleOp(dtype=tf.string, shape=[], shared_name=f"hier_allreduce/{topic}")
