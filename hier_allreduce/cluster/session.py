"""The session of one host among several, which raises errors where others would hang.

::

    all listen? ─► equal graphs? ─► runs on this host alone, as in any session
                                    steps with the other hosts: numbered, one at a time, watched
                                      before sums 1, 2, 3, 5, 9 …: equal weights? ─► all at the end?
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from ..compat import tf1
from ..errors import ClusterError
from ..formatting import count
from .collectives import Fingerprint, check_order, collectives_of, fingerprints, gather, has_sum
from .environment import Job, split_address
from .health import START_AGAIN, HealthCheck

# TensorFlow numbers the steps of a sequence. The key of a sequence is a random number of 64 bits,
# unless a run gives one; ours are this number and the next ones.
_FIRST_SEQUENCE = 0x48410000
# A step that fails because it has failed on another host has one of these errors.
_FROM_OTHER_HOSTS = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
)
# TensorFlow calls a process so.
_INCARNATION = "incarnation"
_RESTARTED = (
    "all hosts answer, but one has started again, or was lost for a moment; or an op here, such as"
    " one that reads data, is unavailable"
)
_LONGEST = 300  # characters of TensorFlow's error in ours
# A process that ends may close its connections before its port.
_CLOSING_SECONDS = 1.0
# An error message lists so many differences at most.
_MOST_LISTED = 5
_ONE_THREAD = (
    "another thread is in a step with the other hosts: run all such steps from one thread, and"
    " those that need no other host, such as filling a queue, in any"
)
_EQUAL_AT_START = (
    "Run cluster.broadcast(tf.compat.v1.global_variables()) once they have their values, or restore"
    " the same checkpoint on every host"
)
_EQUAL_UPDATES = (
    "Every host needs the same optimizer with the same numbers, such as its rate, the same update,"
    " and the same changes of variables between steps"
)


class ClusterSession(tf1.Session):
    """A session whose steps end with an error that names the host if another host fails.

    After a step with the other hosts that ended with an error, the end of the data included, there
    can be no other. TensorFlow would give the next step the same number, so it could meet hosts
    that are still in the failed one.

    ``index`` and ``instances`` are the same on all hosts.
    """

    def __init__(
        self,
        target: str,
        graph: Any,
        config: Any,
        job: Job,
        health: HealthCheck,
        stall_timeout: float,  # seconds that a live host may keep the others waiting in a step
        index: int,  # of this session among the cluster's
        instances: Iterator[int],  # the numbers of collectives that sessions add
        weights: Optional[List[Fingerprint]],  # None if no step compares them
    ):
        super().__init__(target, graph, config)
        self._job = job
        self._health = health
        self._stall_timeout = stall_timeout
        self._sequence = _FIRST_SEQUENCE + index
        self._instances = instances
        # Collectives of this class have a graph of their own, because the user's may be finalized.
        self._own = tf1.Session(target, tf.Graph(), config)
        self._table_by_length: Dict[int, Tuple[Any, Any]] = {}
        # Whether it will meet the others at the end: once it has joined them, and until a host is
        # lost, or this one leaves.
        self._is_joined = False
        self._fault = ""  # why there can be no more steps with the other hosts
        # A step with the other hosts holds this lock.
        self._step = threading.Lock()
        self._collectives_by_ops: Dict[Tuple[Any, ...], List[Any]] = {}
        self._weights = weights
        # The steps with sums over hosts that have begun: the same on all hosts.
        self._sums = 0

    # ---- steps -------------------------------------------------------------------------------

    def run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        """Run as ``tf.compat.v1.Session.run`` does.

        Raises:
            ClusterError: a host died or froze, and TensorFlow cannot go on in this process: end it,
                and start again. Or an earlier step with the other hosts ended with an error, and
                this would be the next one; or another thread runs one; or NCCL's calls have no
                order in this one; or the hosts' weights differ.
        """
        run = super().run
        # Find the collectives that the fetches need, once for the same fetches, because a training
        # loop runs them again and again.
        ops = fetched_ops(self.graph, fetches)
        if ops not in self._collectives_by_ops:
            collectives = collectives_of(ops)
            check_order(collectives)
            self._collectives_by_ops[ops] = collectives
        collectives = self._collectives_by_ops[ops]
        if not collectives:
            return run(fetches, feed_dict, options, run_metadata)

        with self._only_thread():
            if has_sum(collectives):
                # After 0, 1, 2, 4, 8, … sums and each 1000, because most faults show at once.
                if self._sums & (self._sums - 1) == 0 or self._sums % 1000 == 0:
                    self._compare_weights()
                self._sums += 1
            numbered = self._numbered(options)
            return self._watched(lambda: run(fetches, feed_dict, numbered, run_metadata))

    def make_callable(
        self, fetches: Any, feed_list: Any = None, accept_options: bool = False
    ) -> Callable[..., Any]:
        """Return a callable as ``Session.make_callable`` does, with the errors of :meth:`run`."""
        # With a list of feeds, the callable calls run().
        return super().make_callable(fetches, feed_list or [], accept_options)

    @contextlib.contextmanager
    def _only_thread(self) -> Iterator[None]:
        """Hold the lock of steps with the other hosts, if there can be another step."""
        if self._fault:
            raise ClusterError(self._fault)
        if not self._step.acquire(blocking=False):
            raise ClusterError(_ONE_THREAD)
        try:
            yield
        finally:
            self._step.release()

    def _numbered(self, options: Optional[Any] = None) -> Any:
        """Return the options of a step with the other hosts.

        TensorFlow numbers the steps of a set of collectives: a host asks host 0 for the next number
        when it first needs it. If a ``tf.cond`` skips all collectives in host 0's first step, that
        may be over before host 1 asks, and their numbers differ for ever. So all steps are of one
        sequence, which begins with the comparison of the graphs.
        """
        numbered = tf1.RunOptions()
        numbered.CopyFrom(options or tf1.RunOptions())
        numbered.experimental.collective_graph_key = self._sequence
        return numbered

    def _watched(self, step: Callable[[], Any]) -> Any:
        """Return the result of a step with the other hosts; note its error for the next ones."""
        try:
            return self._wait(step, self._stall_timeout, "in a step")
        except ClusterError as error:
            self._is_joined = False
            self._fault = str(error)
            raise
        except tf.errors.OpError as error:
            is_end = isinstance(error, tf.errors.OutOfRangeError)
            cause = "the end of its data" if is_end else type(error).__name__
            self._fault = (
                f"this host's last step with the other hosts ended with {cause}, and the others"
                " might take another one for it. Let the data repeat (dataset.repeat()) and run the"
                " same number of steps on every host; or open a session for each epoch"
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
            # A host that starts again is another process for TensorFlow, in another incarnation.
            is_unavailable = isinstance(error, tf.errors.UnavailableError)
            was_lost = is_unavailable or _INCARNATION in str(error.message)
            if not (was_lost or isinstance(error, _FROM_OTHER_HOSTS)):
                raise
            fault = self._health.fault(_CLOSING_SECONDS)
            if not (fault or was_lost):
                raise
            self._health.let_others_find_it()
            cause = fault or f"{_RESTARTED}. TensorFlow's error: {str(error.message)[:_LONGEST]}"
            raise ClusterError(f"{cause}. {START_AGAIN}") from error

    # ---- comparisons -------------------------------------------------------------------------

    def begin(self, lines: Sequence[str], seconds: float) -> None:
        """Join the other hosts, if all have the same lines.

        Raises:
            ClusterError: a host is gone, or has other lines; the message names it and them.
        """
        for task, joined in enumerate(self._texts("\n".join(lines), seconds)):
            theirs = joined.split("\n")
            if theirs == list(lines):
                continue
            there = [f"{line} there" for line in theirs if line not in lines]
            here = [f"{line} here" for line in lines if line not in theirs]
            listed = there[:_MOST_LISTED] + here[:_MOST_LISTED]
            difference = "; ".join(listed) or "the same in another order"
            # The other hosts need this host until they have read its lines.
            self._end_together()
            raise ClusterError(
                f"host {task} ({self._job.hosts[task]}) differs from this host"
                f" ({self._job.task}): {difference}. All hosts must run the same program with the"
                " same settings"
            )
        self._is_joined = True

    def compare_weights(self) -> None:
        """Check that all hosts hold the same values of all trainable variables; all must call it.

        Raises:
            ClusterError: some differ, and are named; or as :meth:`run`.
        """
        with self._only_thread():
            self._compare_weights()

    def _compare_weights(self) -> None:
        """Check that all hosts have the same weights; a variable without a value counts as 0."""
        # A finalized graph has them only if an earlier session has added them.
        if self._weights is None:
            self._weights = fingerprints(self.graph)
        if not self._weights:
            return
        run = super().run
        are_set = run([weight.is_set for weight in self._weights])
        initialized = np.flatnonzero(are_set)
        own = np.zeros(len(are_set), np.int64)
        # NumPy cannot take an empty list for no pairs.
        if initialized.size:
            own[initialized] = run([self._weights[n].value for n in initialized])
        table = self._table(own, self._stall_timeout, "to compare the weights")
        differs = table != table[0]  # H × N
        differing = [self._weights[n].name for n in np.flatnonzero(differs.any(0))]
        if differing:
            self._end_together()
            hosts = [f"host {task}" for task in np.flatnonzero(differs.any(1))]
            fault, advice = "hosts begin with different weights", _EQUAL_AT_START
            if self._sums:
                fault = f"after {count(self._sums, 'step')} the hosts' weights are different"
                advice = _EQUAL_UPDATES
            raise ClusterError(
                f"{fault}: {len(differing)} of {len(self._weights)} variables are not the same on"
                f" host 0 and on {', '.join(hosts)}, {', '.join(differing[:_MOST_LISTED])} among"
                f" them. {advice}"
            )

    def _table(self, integers: Any, seconds: float, doing: str) -> Any:
        """Return an H×M table: the M whole numbers of each host, of which this host gives its own.

        ``seconds`` and ``doing`` are those of :meth:`HealthCheck.wait`.
        """
        own, length = self._own, len(integers)
        # Ops stay in a graph for ever, so tables of one length share theirs.
        if length not in self._table_by_length:
            with own.graph.as_default():
                ours = tf1.placeholder(tf.int64, [length])
                table = gather(ours, self._job, next(self._instances))
            self._table_by_length[length] = (ours, table)
        ours, table = self._table_by_length[length]

        def step() -> Any:
            return own.run(table, {ours: integers}, self._numbered())

        return self._wait(step, seconds, doing)

    def _texts(self, own: str, seconds: float) -> List[str]:
        """Return the texts of all hosts; nothing if they are equal."""
        # Compare lengths and digests first, because the texts of equal hosts need not cross. No
        # table has the length of the one in which hosts end together: that would be another step
        # of the same collective, for which TensorFlow was seen to mix up hosts under load.
        doing = "to compare the graphs"
        encoded = own.encode()
        digest = np.frombuffer(hashlib.sha256(encoded).digest(), np.int64)
        table = self._table([len(encoded), *digest], seconds, doing)
        if (table == table[0]).all():
            return []
        # A collective needs equal shapes, so all texts are as long as the longest one.
        words = -(-table[:, 0].max() // 8)  # of 8 bytes
        padded = encoded.ljust(8 * words, b"\0")
        table = self._table(np.frombuffer(padded, np.int64), seconds, doing)
        return [line.tobytes().rstrip(b"\0").decode() for line in table]

    # ---- the end -----------------------------------------------------------------------------

    def _end_together(self) -> None:
        """Wait until all hosts have come to this point, are gone, or the timeout has passed.

        A host gets the last table from the others, so none may end before all have read it.
        """
        with contextlib.suppress(ClusterError, tf.errors.OpError):
            self._table([0], self._health.timeout, "to end together")

    def close(self) -> None:
        """Close the session once all hosts have come to this point, are gone, or after the timeout.

        A host that an exception brings here does not wait: the others may be in a step with it.
        """
        if _is_failure(sys.exc_info()[1]) or sys.is_finalizing():
            self._is_joined = False
        if self._is_joined and not self._health.is_waiting:
            self._is_joined = False
            self._end_together()
        # Closing would wait for the call that still waits.
        if not self._health.is_waiting:
            super().close()
            self._own.close()

    def __exit__(self, error_type: Any, error: Any, trace: Any) -> None:
        # TensorFlow then calls close() in a thread that does not see the exception.
        if _is_failure(error):
            self._is_joined = False
        super().__exit__(error_type, error, trace)


def fetched_ops(graph: Any, fetches: Any) -> Tuple[Any, ...]:
    """Return the ops whose results, or end, a session is asked for."""
    elements = [graph.as_graph_element(fetch) for fetch in _leaves(fetches)]
    return tuple(
        element if isinstance(element, tf.Operation) else element.op for element in elements
    )


def _leaves(fetches: Any) -> Iterator[Any]:
    """Yield the tensors, ops, variables and names in fetches."""
    # tf.nest would sort the keys of a mapping, which hooks need not allow.
    if isinstance(fetches, Mapping):
        fetches = list(fetches.values())
    if isinstance(fetches, (list, tuple)):
        for fetch in fetches:
            yield from _leaves(fetch)
    elif fetches is not None:
        yield from tf.nest.flatten(fetches, expand_composites=True)


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
        # Sessions of a server use the server's threads.
        full.use_per_session_threads = False
        full.experimental.collective_group_leader = "/job:worker/replica:0/task:0"
        # In TensorFlow 1, ops that name no task would go to task 0 without this filter.
        full.device_filters.append(f"/job:worker/task:{job.task}")
    return full


def start_server(job: Job, config: Any) -> Any:
    """Start TensorFlow's server of this host.

    Raises:
        ClusterError: its port is taken.
    """
    # Except the hosts from the proxy of `http_proxy`, because gRPC would ask it for them, and wait
    # for ever. The gRPC of TensorFlow 1.15 reads only the second variable.
    machines = [split_address(address)[0] for address in job.hosts]
    excepted = os.environ.get("no_proxy", "")
    for variable in ("no_grpc_proxy", "no_proxy"):
        before = os.environ.get(variable, excepted).split(",")
        os.environ[variable] = ",".join(dict.fromkeys(filter(None, [*before, *machines])))
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
            f"this host's server ({job.hosts[job.task]}) does not start: {error.message}. End an"
            " earlier run that uses the port, or take another port in every host's list"
        ) from error
