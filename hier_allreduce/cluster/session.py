"""The session of a host among several: it ends with an error that names the host where TensorFlow's would hang."""

from __future__ import annotations

import functools
import re
import sys
import threading
import time
from typing import Any, Callable, Dict, Iterable, Optional, Sequence, Tuple

import tensorflow as tf

from ..errors import ClusterError
from ..graph import tf1
from .rendezvous import POLL, Rendezvous
from .watchdog import Watchdog


class ClusterSession(tf1.Session):
    """A session that ends with an error that names the host, where TensorFlow's would hang when a host dies.

    Steps are made in a thread of their own while the calling one looks after the hosts. That is done for the thread
    that opened the session; others, such as those that fill queues, run as in any session.

    After a step with the other hosts that ended with an error, be it the end of the data, there can be no other:
    TensorFlow gives the next one the same number, by which it would meet hosts that are still in the first.
    """

    def __init__(self, meeting: Rendezvous, watch: Watchdog, target: str, graph: Any, config: Any):
        super().__init__(target, graph, config)
        self._meeting, self._watch = meeting, watch
        self._owner = threading.current_thread()
        self._failed = False
        self._crossing: Dict[Tuple[Any, ...], bool] = {}  # by what is run
        self._ended = ""  # why there can be no other step with the other hosts
        self._inside = self._broken = False  # a step with the other hosts: is this one in it, did its last one fail

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """As ``tf.compat.v1.Session.run``.

        Raises:
            ClusterError: a host died or froze; TensorFlow cannot go on in this process: end it, and start again. Or
                a step with the other hosts has ended with an error, and this would be the next.
        """
        return self._watched(functools.partial(super().run, *args, **kwargs))

    def make_callable(self, fetches: Any, feed_list: Any = None, accept_options: bool = False) -> Callable[..., Any]:
        """As ``tf.compat.v1.Session.make_callable``; errors are those of :meth:`run`."""
        return super().make_callable(fetches, feed_list or [], accept_options)  # with a list it is made of run()

    def _do_run(self, handle: Any, targets: Sequence[Any], fetches: Sequence[Any], *rest: Any) -> Any:
        """TensorFlow's own place between finding out what is to be run and running it."""
        ops = (*targets, *(tensor.op for tensor in fetches))
        if ops not in self._crossing:
            self._crossing[ops] = _crosses(ops)
        if not self._crossing[ops]:
            return super()._do_run(handle, targets, fetches, *rest)
        if self._ended:
            raise ClusterError(self._ended)
        self._meeting.steps += 1
        self._inside = True
        try:
            return super()._do_run(handle, targets, fetches, *rest)
        except tf.errors.OpError as error:
            self._ended, self._broken = _no_more_steps(error), True
            raise
        finally:
            self._inside = False

    def _watched(self, function: Callable[[], Any]) -> Any:
        if threading.current_thread() is not self._owner:
            return function()
        try:
            return self._watch.call(function, told=self._told, left=self._meeting.left)
        except tf.errors.OutOfRangeError:  # the data are at their end
            raise
        except tf.errors.OpError as error:
            words = self._cause(error)
            if not words:
                raise
            self._meeting.leave_after_error()
            raise ClusterError(words) from error
        except ClusterError:
            self._meeting.leave_after_error()
            raise

    def _told(self) -> str:
        return self._meeting.told() if self._inside else ""

    def _cause(self, error: tf.errors.OpError) -> str:
        """Which host has made a run fail, in words; nothing where it is this one, which then tells the others."""
        broken, self._broken = self._broken, False
        listens, patience = broken and _is_from_elsewhere(error), 0.0
        if listens:
            patience = self._meeting.moment  # a host that fails tells the others after that
        elif isinstance(error, tf.errors.UnavailableError):
            patience = POLL  # a process that ends may close its connections before its port
        end = time.monotonic() + patience
        while True:
            found = self._watch.faults()
            words = self._meeting.told(also_same=not found) if listens else ""
            words = words or self._watch.message(found, self._meeting.left)
            if words or time.monotonic() >= end:
                break
            time.sleep(POLL)
        if broken and not words:
            self._meeting.tell(f"ended its step with {_in_a_line(error)}")
        return words

    def close(self) -> None:
        """Wait until all hosts have come to this point, or are gone; then close.

        A host that an exception brings here waits for nobody: the others may be in the middle of a step with it.
        """
        if self._watch.stuck:
            return
        if not (self._failed or _is_failure(sys.exc_info()[1])):
            self._meeting.leave_at_end()
        super().close()
        self._meeting.close()
        self._watch.close()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._failed = _is_failure(error)  # TensorFlow then calls close() in a thread that knows of no exception
        super().__exit__(kind, error, trace)


def _is_failure(error: Optional[BaseException]) -> bool:
    if isinstance(error, SystemExit):
        return bool(error.code)
    return error is not None and not isinstance(error, tf.errors.OutOfRangeError)  # that is the end of the data


def _crosses(ops: Iterable[Any]) -> bool:
    """Whether a collective is among ``ops`` and all that they need."""
    found, waiting = set(ops), list(ops)
    while waiting:
        op = waiting.pop()
        if op.type.startswith("Collective"):
            return True
        needed = {*(tensor.op for tensor in op.inputs), *op.control_inputs} - found
        found |= needed
        waiting += needed
    return False


def _is_from_elsewhere(error: tf.errors.OpError) -> bool:
    """Whether a step may have failed because it did on another host; else it was an op of this one."""
    if isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)):
        return True
    collective = str(getattr(error.op, "type", "")).startswith("Collective")
    return collective or any(words in str(error.message) for words in ("from peer", "[_Derived_]", "BufRendezvous"))


def _no_more_steps(error: tf.errors.OpError) -> str:
    ended = "with the end of its data" if isinstance(error, tf.errors.OutOfRangeError) else "with an error"
    return (
        f"this host's last step with the other hosts ended {ended} ({_in_a_line(error)}), and after that this session"
        " cannot make another: they might still be in that one, and take this for it. Let the data repeat"
        " (dataset.repeat()) and count the steps, as many on every host; or open a session for each epoch. What needs"
        " no other host may still be run"
    )


def _in_a_line(error: tf.errors.OpError) -> str:
    """What kind of error it is, and what happened."""
    first = error.__context__  # before TensorFlow added where the op was built
    text = str((first if isinstance(first, tf.errors.OpError) else error).message)
    told = [line.strip() for line in text.splitlines() if not line.startswith("From /job:")]
    told = [line for line in told if line and not line.endswith("root error(s) found.")]
    return f"{type(error).__name__}: {re.sub('^[(]0[)] [A-Z_]+: ', '', told[0]) if told else 'no message'}"
