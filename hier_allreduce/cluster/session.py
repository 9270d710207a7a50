"""The session of one host among several, which raises errors where others would hang.

::

    all listen? ─► equal graphs? ─► runs on this host alone, as in any session
                                    steps with the other hosts: numbered, one at a time, watched
                                      before the first all-reduce: equal weights? ─► all at the end?
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import os
import sys
import threading
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from ..compat import tf1
from ..errors import ClusterError
from .collectives import check_order, checksums, collectives_of, gather
from .environment import Job, split_address
from .health import START_AGAIN, HealthCheck

# TensorFlow numbers the steps of a sequence. The key of a sequence is a random number of 64 bits,
# unless a run gives one; ours are this number and the next ones.
_FIRST_SEQUENCE = 0x48410000
# the errors of a step that fails because it has failed on another host
_FROM_OTHER_HOSTS = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
)
# what TensorFlow calls a process; after a restart it is another one
_INCARNATION = "incarnation"
_RESTARTED = (
    "all hosts answer, but one was lost for a moment: it has started again while the others still"
    " ran, or the network between them failed"
)
_CLOSING_SECONDS = 1.0  # A process that ends may close its connections before its port.
_MOST_LISTED = 5  # differences that an error message lists
_ONE_THREAD = (
    "another thread is in a step with the other hosts, and TensorFlow would give this one the same"
    " number: run all such steps from one thread. Work that needs no other host, such as filling a"
    " queue, can run in any thread"
)


class _State(enum.Enum):
    """The steps with the other hosts that a session can still make."""

    READY = "any"
    FAILED = "only the one in which hosts end together, because an earlier one ended with an error"
    LOST = "none, because a host is lost"
    LEFT = "none, because this host has not joined the others, or has left them"


class ClusterSession(tf1.Session):
    """A session whose steps end with an error that names the host if another host fails.

    After a step with the other hosts that ended with an error, the end of the data included, there
    can be no other. TensorFlow would give the next step the same number, so it could meet hosts
    that are still in the failed one.

    Args:
        target: this host's server.
        graph, config: as in ``tf.compat.v1.Session``.
        job: the hosts, and which one this is.
        health: of the other hosts.
        stall_timeout: seconds that a live host may keep the others waiting in a step.
        number: of this session among the cluster's, the same on all hosts.
        collectives: the numbers of collectives that sessions add, the same on all hosts.
    """

    def __init__(
        self,
        target: str,
        graph: Any,
        config: Any,
        job: Job,
        health: HealthCheck,
        stall_timeout: float,
        number: int,
        collectives: Iterator[int],
    ):
        super().__init__(target, graph, config)
        self._job = job
        self._health = health
        self._stall_timeout = stall_timeout
        self._sequence = _FIRST_SEQUENCE + number
        self._numbers = collectives
        self._own = tf1.Session(target, tf.Graph(), config)  # for collectives that this class adds
        self._state = _State.LEFT  # until it has begun
        self._reason = ""  # of FAILED and LOST, for errors
        self._step = threading.Lock()  # held during a step with the other hosts
        self._needed: Dict[
            Tuple[Any, ...], List[Any]
        ] = {}  # collectives, by the ops that need them
        self._checksums: List[Any] = []
        self._has_compared_weights = False

    # ---- steps -------------------------------------------------------------------------------

    def run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        """Run as ``tf.compat.v1.Session.run`` does.

        Raises:
            ClusterError: a host died or froze, and TensorFlow cannot go on in this process: end it,
                and start again. Or an earlier step with the other hosts ended with an error, and
                this would be the next one; or another thread runs one; or NCCL's calls have no
                order in this one; or the hosts began with different weights.
        """
        run = super().run
        collectives = self._collectives_for(fetches)
        if not collectives:
            return run(fetches, feed_dict, options, run_metadata)
        with self._only_thread():
            adds_up = any(op.type.startswith("CollectiveReduce") for op in collectives)
            if adds_up and not self._has_compared_weights:
                self._compare_weights("hosts begin with different weights")
                self._has_compared_weights = True
            numbered = self._numbered(options)
            return self._watched(lambda: run(fetches, feed_dict, numbered, run_metadata))

    def make_callable(
        self, fetches: Any, feed_list: Any = None, accept_options: bool = False
    ) -> Callable[..., Any]:
        """Return a callable as ``Session.make_callable`` does, with the errors of :meth:`run`."""
        # With a list of feeds, the callable calls run().
        return super().make_callable(fetches, feed_list or [], accept_options)

    def _collectives_for(self, fetches: Any) -> List[Any]:
        """Return the collectives that fetches need."""
        elements = [self.graph.as_graph_element(fetch) for fetch in _leaves(fetches)]
        ops = tuple(
            element if isinstance(element, tf.Operation) else element.op for element in elements
        )
        if ops not in self._needed:
            collectives = collectives_of(ops)
            check_order(collectives)
            self._needed[ops] = collectives
        return self._needed[ops]

    @contextlib.contextmanager
    def _only_thread(self) -> Iterator[None]:
        """Hold the lock of steps with the other hosts, if there can be another step."""
        if self._state in (_State.FAILED, _State.LOST):
            raise ClusterError(self._reason)
        if not self._step.acquire(blocking=False):
            raise ClusterError(_ONE_THREAD)
        try:
            yield
        finally:
            self._step.release()

    def _numbered(self, options: Optional[Any] = None) -> Any:
        """Return the options of a step with the other hosts.

        TensorFlow has a sequence of numbers for each set of collectives. A host asks host 0 for the
        next number when it first needs it. Suppose that a ``tf.cond`` skips all collectives in the
        first step of host 0. That step may be over before host 1 asks, so host 1 gets the number of
        host 0's second step, and they differ by one for ever. So all steps are of one sequence,
        which begins with the comparison of the graphs.
        """
        numbered = tf1.RunOptions()
        numbered.CopyFrom(options or tf1.RunOptions())
        numbered.experimental.collective_graph_key = self._sequence
        return numbered

    def _watched(self, step: Callable[[], Any]) -> Any:
        """Return the result of a step with the other hosts; note in the state how it has failed."""
        try:
            return self._wait(step, self._stall_timeout, "in a step")
        except ClusterError as error:
            self._state = _State.LOST
            self._reason = str(error)
            raise
        except tf.errors.OpError as error:
            is_end = isinstance(error, tf.errors.OutOfRangeError)
            cause = "the end of its data" if is_end else type(error).__name__
            self._state = _State.FAILED
            self._reason = (
                f"this host's last step with the other hosts ended with {cause}, and after that"
                " this session cannot run another: the others might still be in that step and take"
                " the new one for it. Let the data repeat (dataset.repeat()) and run the same"
                " number of steps on every host; or open a session for each epoch. Runs that need"
                " no other host are still possible"
            )
            raise

    def _wait(self, step: Callable[[], Any], seconds: float, doing: str) -> Any:
        """Return the result of a step with the other hosts, as :meth:`HealthCheck.wait` does.

        Raises:
            ClusterError: also if TensorFlow's error comes from a host that is gone.
        """
        try:
            return self._health.wait(step, seconds, doing)
        except tf.errors.OpError as error:
            was_lost = _is_of_lost_host(error)
            if not (was_lost or isinstance(error, _FROM_OTHER_HOSTS)):
                raise
            fault = self._health.fault(_CLOSING_SECONDS)
            if not (fault or was_lost):
                raise
            self._health.let_others_find_it()
            raise ClusterError(f"{fault or _RESTARTED}. {START_AGAIN}") from error

    # ---- comparisons -------------------------------------------------------------------------

    def begin(self, lines: Sequence[str], seconds: float) -> None:
        """Join the other hosts, if all have the same lines.

        Args:
            lines: which collectives this host has built, and for which cluster.
            seconds: to wait for the other hosts.

        Raises:
            ClusterError: a host is gone, or has other lines; the message names it and them.
        """
        for task, text in enumerate(self._texts("\n".join(lines), seconds)):
            differs = _difference(lines, text.split("\n"))
            if differs:
                self._end_together()
                raise ClusterError(
                    f"host {task} ({self._job.hosts[task]}) differs from this host"
                    f" ({self._job.task}): {differs}. All hosts must run the same program with the"
                    " same settings"
                )
        self._checksums = checksums(self.graph)
        self._state = _State.READY

    def compare_weights(self) -> None:
        """Check that all hosts hold the same values of all trainable variables; all must call it.

        Raises:
            ClusterError: some differ, and are named; or as :meth:`run`.
        """
        with self._only_thread():
            self._compare_weights("the hosts' weights have become different")

    def _compare_weights(self, found: str) -> None:
        """Check that all hosts have the same weights; a variable without a value counts as 0."""
        if not self._checksums:
            return
        run = super().run
        are_set = run([checksum.is_set for checksum in self._checksums])
        numbers = [number for number, is_set in enumerate(are_set) if is_set]
        row = np.zeros([len(are_set), 2], np.int64)
        row[numbers] = run([self._checksums[number].value for number in numbers])
        rows = self._rows(row.ravel(), self._stall_timeout, "to compare the weights")
        rows = rows.reshape(-1, *row.shape)  # H × N × 2
        differs = (rows != rows[0]).any(axis=2)
        differing = [self._checksums[number].name for number in np.flatnonzero(differs.any(0))]
        if differing:
            self._end_together()
            others = [f"host {task}" for task in np.flatnonzero(differs.any(1))]
            raise ClusterError(
                f"{found}: {len(differing)} of {len(self._checksums)} variables are not the same on"
                f" host 0 and on {', '.join(others)}, {', '.join(differing[:_MOST_LISTED])} among"
                " them. Run cluster.broadcast(tf.compat.v1.global_variables()) once they have their"
                " values, or restore the same checkpoint on every host"
            )

    def _rows(self, row: Any, seconds: float, doing: str) -> Any:
        """Return the rows of all hosts, H×M whole numbers, of which this host gives one.

        ``seconds`` and ``doing`` are those of :meth:`HealthCheck.wait`.
        """
        own = self._own
        with own.graph.as_default():
            rows = gather(tf.constant(row, tf.int64), self._job, next(self._numbers))
        return self._wait(lambda: own.run(rows, options=self._numbered()), seconds, doing)

    def _texts(self, text: str, seconds: float) -> List[str]:
        """Return the texts of all hosts; nothing if they are equal."""
        doing = "to compare the graphs"
        data = text.encode()
        digest = np.frombuffer(hashlib.sha256(data).digest(), np.int64)
        rows = self._rows([len(data), *digest], seconds, doing)
        if (rows == rows[0]).all():
            return []
        words = -(-rows[:, 0].max() // 8)  # of 8 bytes, for the longest text
        padded = data.ljust(8 * words, b"\0")
        rows = self._rows(np.frombuffer(padded, np.int64), seconds, doing)
        return [row.tobytes().rstrip(b"\0").decode() for row in rows]

    # ---- the end -----------------------------------------------------------------------------

    def _end_together(self) -> None:
        """Wait until all hosts have come to this point, are gone, or the timeout has passed.

        A host gets the last rows from the others, so none may end before all have read them.
        """
        with contextlib.suppress(ClusterError, tf.errors.OpError):
            self._rows([0], 6 * self._health.interval, "to end together")

    def close(self) -> None:
        """Close the session once all hosts have come to this point, are gone, or after the timeout.

        A host that an exception brings here does not wait: the others may be in a step with it.
        """
        if _is_failure(sys.exc_info()[1]) or sys.is_finalizing():
            self._leave()
        if self._state in (_State.READY, _State.FAILED) and not self._health.is_stuck:
            self._leave()
            self._end_together()
        if not self._health.is_stuck:  # Closing would wait for the call that is stuck.
            super().close()
            self._own.close()

    def _leave(self) -> None:
        """Give up all steps with the other hosts but the one in which they end together."""
        if self._state is not _State.LOST:
            self._state = _State.LEFT

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        # TensorFlow then calls close() in a thread that does not see the exception.
        if _is_failure(error):
            self._leave()
        super().__exit__(kind, error, trace)


def _is_of_lost_host(error: Any) -> bool:
    """Return whether a step has met a host that was gone, or another process in its place."""
    return isinstance(error, tf.errors.UnavailableError) or _INCARNATION in str(error.message)


def _leaves(fetches: Any) -> Iterator[Any]:
    """Yield the tensors, ops, variables and names in fetches."""
    if isinstance(fetches, Mapping):  # tf.nest would sort its keys, which hooks need not allow
        fetches = list(fetches.values())
    if isinstance(fetches, (list, tuple)):
        for fetch in fetches:
            yield from _leaves(fetch)
    elif fetches is not None:
        yield from tf.nest.flatten(fetches, expand_composites=True)


def _difference(mine: Sequence[str], theirs: Sequence[str]) -> str:
    """Return the lines in which two hosts differ; empty if they do not."""
    there = [f"{line} there" for line in theirs if line not in mine]
    here = [f"{line} here" for line in mine if line not in theirs]
    listed = there[:_MOST_LISTED] + here[:_MOST_LISTED]
    if listed:
        return "; ".join(listed)
    return "" if list(mine) == list(theirs) else "the same in another order"


def _is_failure(error: Optional[BaseException]) -> bool:
    """Return whether an exception is neither a normal exit nor the end of the data."""
    if isinstance(error, SystemExit):
        return bool(error.code)
    return error is not None and not isinstance(error, tf.errors.OutOfRangeError)


# ---- the server ------------------------------------------------------------------------------


def session_config(job: Job, devices_per_host: int, config: Optional[Any] = None) -> Any:
    """Return a copy of a ConfigProto with the settings that the sessions of a job need."""
    full = tf1.ConfigProto()
    full.CopyFrom(config or tf1.ConfigProto())
    full.device_count["CPU"] = max(full.device_count["CPU"], devices_per_host)
    if len(job.hosts) > 1:
        full.use_per_session_threads = False  # sessions of a server use the server's threads
        full.experimental.collective_group_leader = "/job:worker/replica:0/task:0"
        # In TensorFlow 1, ops that name no task would go to task 0 without this filter.
        full.device_filters.append(f"/job:worker/task:{job.task}")
    return full


def start_server(job: Job, config: Any) -> Any:
    """Start TensorFlow's server of this host.

    Raises:
        ClusterError: its port is taken.
    """
    _bypass_proxy(job.hosts)
    try:
        return tf1.train.Server(
            {"worker": list(job.hosts)},
            job_name="worker",
            task_index=job.task,
            config=config,
            protocol="grpc",
        )
    except tf.errors.OpError as error:
        raise ClusterError(
            f"this host's server ({job.hosts[job.task]}) does not start: {error.message}. If"
            " another process uses the port (an earlier run?), end it, or give this host another"
            " port in every host's list"
        ) from error


def _bypass_proxy(hosts: Sequence[str]) -> None:
    """Except the hosts from the proxy of ``http_proxy``.

    gRPC would ask the proxy for them, and wait for ever.
    """
    names = [split_address(address)[0] for address in hosts]
    excepted = os.environ.get("no_proxy", "")
    # The gRPC of TensorFlow 1.15 reads only the second variable.
    for variable in ("no_grpc_proxy", "no_proxy"):
        before = os.environ.get(variable, excepted).split(",")
        os.environ[variable] = ",".join(dict.fromkeys(filter(None, [*before, *names])))
