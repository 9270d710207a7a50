"""The session of one host among several, which raises an error where TensorFlow's would hang."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
from typing import Any, Callable, Dict, Iterator, Optional, Sequence, Tuple

import tensorflow as tf
from tensorflow.python.client.session import tf_session  # it has no public name

from ..errors import ClusterError
from ..graph import tf1
from .collectives import check_order, collectives_of
from .polling import POLL, attempts
from .rendezvous import Rendezvous
from .watchdog import START_AGAIN, Watchdog

# What TensorFlow numbers in one sequence has one key: a random one of 64 bits, or this one and a session's number.
_SEQUENCES = 0x48410000
_ONE_THREAD = (
    "another thread is in a step with the other hosts, and TensorFlow would give this one the same number: run all such"
    " steps from one thread. What needs no other host, such as filling a queue, can run in any thread"
)


class ClusterSession(tf1.Session):
    """A session whose steps end with an error that names the host if another host fails.

    Steps run in a thread of their own while the calling thread probes the hosts. That holds for the thread that opened
    the session; in other threads, such as those that fill queues, ``run`` works as in any session.

    Collectives meet those of the other hosts in the step of the same number. TensorFlow has a sequence of numbers for
    each set of collectives, and a host asks host 0 for the next one when it first needs it. If nothing crosses in host
    0's first step, because of a ``tf.cond``, that step may have ended by then, and the numbers differ by one for ever.
    So here all steps with the other hosts are of one sequence, whose first step is one in which all hosts meet.

    After a step with the other hosts that ended with an error, the end of the data included, there can be no other:
    TensorFlow gives the next step the same number, so it could meet hosts that are still in the failed one. For the
    same reason there is one such step at a time.
    """

    def __init__(self, rendezvous: Rendezvous, watchdog: Watchdog, number: int, target: str, graph: Any, config: Any):
        super().__init__(target, graph, config)
        self._rendezvous, self._watchdog = rendezvous, watchdog
        self._sequence = _SEQUENCES + number
        self._owner = threading.current_thread()
        self._left_by_error = False
        self._crossing: Dict[Tuple[Any, ...], bool] = {}  # by the ops that a run fetches
        self._no_more_steps = ""  # why there can be no other step with the other hosts
        self._step = threading.Lock()  # held during a step with the other hosts
        self._step_failed = False

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run as ``tf.compat.v1.Session.run`` does.

        Raises:
            ClusterError: a host died or froze, and TensorFlow cannot go on in this process: end it, and start again.
                Or an earlier step with the other hosts ended with an error, and this would be the next one; or another
                thread runs one; or NCCL's calls have no order in this one.
        """
        return self._watched(functools.partial(super().run, *args, **kwargs))

    def make_callable(self, fetches: Any, feed_list: Any = None, accept_options: bool = False) -> Callable[..., Any]:
        """Return a callable as ``tf.compat.v1.Session.make_callable`` does, with the errors of :meth:`run`."""
        return super().make_callable(fetches, feed_list or [], accept_options)  # with a list, it calls run()

    def _do_run(
        self, handle: Any, targets: Sequence[Any], fetches: Sequence[Any], feeds: Any, options: Any, metadata: Any
    ) -> Any:
        """Override TensorFlow's method between the choice of what to run and the run itself."""
        ops = (*targets, *(tensor.op for tensor in fetches))
        if ops not in self._crossing:
            collectives = collectives_of(ops)
            check_order(collectives)
            self._crossing[ops] = bool(collectives)
        if not self._crossing[ops]:
            return super()._do_run(handle, targets, fetches, feeds, options, metadata)
        if self._no_more_steps:
            raise ClusterError(self._no_more_steps)
        if not self._step.acquire(blocking=False):
            raise ClusterError(_ONE_THREAD)
        self._rendezvous.steps += 1
        try:
            with _of_sequence(self._sequence, options) as numbered:
                return super()._do_run(handle, targets, fetches, feeds, numbered, metadata)
        except tf.errors.OpError as error:
            self._no_more_steps, self._step_failed = _last_step_message(error), True
            raise
        finally:
            self._step.release()

    def _watched(self, function: Callable[[], Any]) -> Any:
        if threading.current_thread() is not self._owner:
            return function()
        try:
            return self._watchdog.call(function, peer_failure=self._peer_failure, departed=self._rendezvous.departed)
        except tf.errors.OutOfRangeError:  # the end of the data
            raise
        except tf.errors.OpError as error:
            cause = self._cause(error)
            if not cause:
                raise
            self._rendezvous.leave_after_error(cause)
            raise ClusterError(f"{cause}. {START_AGAIN}") from error
        except ClusterError:
            self._rendezvous.leave_after_error(self._watchdog.cause)
            raise

    def _peer_failure(self) -> str:
        return self._rendezvous.peer_failure() if self._step.locked() else ""

    def _cause(self, error: tf.errors.OpError) -> str:
        """Return which other host made a run fail; if none did, report the failure to the others."""
        step_failed, self._step_failed = self._step_failed, False
        may_be_peer, seconds = step_failed and _may_come_from_a_peer(error), 0.0
        if may_be_peer:
            seconds = self._rendezvous.grace  # a host that fails reports it within this time
        elif isinstance(error, tf.errors.UnavailableError):
            seconds = POLL  # a process that ends may close its connections before its port
        for _ in attempts(seconds):
            faults = self._watchdog.faults()
            # a host that is gone may have ended for the reason for which this one failed, and have told it
            report = self._rendezvous.peer_failure(step_failed=not faults) if may_be_peer or faults else ""
            cause = report or self._watchdog.fault(faults, self._rendezvous.departed)
            if cause:
                return cause
        if step_failed:
            self._rendezvous.report_failure(f"ended its step with {_summary(error)}")
        return ""

    def close(self) -> None:
        """Close the session once all hosts have come to this point or are gone.

        A host that an exception brings here does not wait: the others may be in the middle of a step with it.
        """
        if self._watchdog.stuck:
            return
        if not (self._left_by_error or _is_failure(sys.exc_info()[1])):
            self._rendezvous.leave_at_end()
        super().close()
        self._rendezvous.close()
        self._watchdog.close()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        # TensorFlow then calls close() in a thread that does not see the exception.
        self._left_by_error = _is_failure(error)
        super().__exit__(kind, error, trace)


@contextlib.contextmanager
def _of_sequence(key: int, options: Any) -> Iterator[Any]:
    """Yield the options of a step whose number is of the sequence ``key``.

    Args:
        key: of the sequence.
        options: the step's other options, or None. Both are serialized, as ``_do_run`` takes them.
    """
    numbered = tf1.RunOptions.FromString(tf_session.TF_GetBuffer(options) if options else b"")
    numbered.experimental.collective_graph_key = key
    serialized = tf_session.TF_NewBufferFromString(numbered.SerializeToString())
    try:
        yield serialized
    finally:
        tf_session.TF_DeleteBuffer(serialized)


def _is_failure(error: Optional[BaseException]) -> bool:
    if isinstance(error, SystemExit):
        return bool(error.code)
    return error is not None and not isinstance(error, tf.errors.OutOfRangeError)  # that one is the end of the data


def _may_come_from_a_peer(error: tf.errors.OpError) -> bool:
    """Whether a step may have failed because it did on another host; else an op of this host has failed."""
    if isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)):
        return True
    if str(getattr(error.op, "type", "")).startswith("Collective"):
        return True
    return any(mark in str(error.message) for mark in ("from peer", "[_Derived_]", "BufRendezvous"))


def _last_step_message(error: tf.errors.OpError) -> str:
    end = "with the end of its data" if isinstance(error, tf.errors.OutOfRangeError) else "with an error"
    return (
        f"this host's last step with the other hosts ended {end} ({_summary(error)}), and after that this session"
        " cannot run another: the others might still be in that step and take the new one for it. Let the data repeat"
        " (dataset.repeat()) and run the same number of steps on every host; or open a session for each epoch. What"
        " needs no other host can still run"
    )


def _summary(error: tf.errors.OpError) -> str:
    """Return an error's type and first line of its message, without the graph's traceback."""
    first = error.__context__  # before TensorFlow added where the op was built
    text = str((first if isinstance(first, tf.errors.OpError) else error).message)
    lines = [line.strip() for line in text.splitlines() if not line.startswith("From /job:")]
    lines = [line for line in lines if line and not line.endswith("root error(s) found.")]
    return f"{type(error).__name__}: {re.sub('^[(]0[)] [A-Z_]+: ', '', lines[0]) if lines else 'no message'}"
