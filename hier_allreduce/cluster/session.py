"""The session of one host among several, which raises errors where others would hang.

::

    all listen? ─► equal graphs? ─► runs on this host alone, as in any session
                                    steps with the other hosts: numbered, one at a time, watched
                                      before sums 1, 2, 3, 5, 9 …: equal weights? ─► all at the end?
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import threading
import time
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Callable, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from ..compat import tf1
from ..configs import is_step_to_compare
from ..errors import ClusterError
from ..formatting import count
from .collectives import FIRST_OF_SESSIONS, collectives_of, gather, has_sum
from .environment import Job, split_address
from .health import START_AGAIN, HealthCheck

# TensorFlow numbers the steps of a sequence. The key of a sequence is a random number of 64 bits,
# unless a run gives one. Each session has two, with keys from this one on.
_FIRST_SEQUENCE = 0x48410000
# A step that fails because of another host has one of these errors, or one that is about its
# incarnation, which is what TensorFlow calls a process.
_FROM_OTHER_HOSTS = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
)
_NO_HOST_IS_GONE = (
    "all hosts answer, but one has started again, or was lost for a moment, or an op has failed."
    " TensorFlow's error"
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
_EQUAL = (
    "At the start, run cluster.broadcast(tf.compat.v1.global_variables()) once they have their"
    " values, or restore the same checkpoint on every host. Every host needs the same optimizer"
    " with the same numbers, such as its rate, the same update, and the same changes of variables"
    " between steps. If they only round differently, as other processors may,"
    " TowerOptimizer(check_replicas_every=0) compares nothing"
)


class ClusterSession(tf1.Session):
    """A session whose steps end with an error that names the host if another host fails.

    After a step with the other hosts that ended with an error, the end of the data included, there
    can be no other. TensorFlow would give the next step the same number, so it could meet hosts
    that are still in the failed one.

    ``index`` is the same on all hosts.
    """

    def __init__(
        self,
        target: str,
        graph: Any,
        config: Any,
        job: Job,
        index: int,  # of this session among the cluster's
        weights: Mapping[str, Any],  # the fingerprints that steps compare, by the variable's name
    ):
        super().__init__(target, graph, config)
        self._job = job
        self._health = HealthCheck(job)
        self._sequence = _FIRST_SEQUENCE + 2 * index
        # TensorFlow gives the number of a step that failed to the next one of its sequence, and
        # may still be tidying up after the first one, on any host, while the second one sends. So
        # the only one that may follow, in which hosts end together, is of another sequence.
        self._last_sequence = self._sequence + 1
        # The hosts' table has a graph of its own, because the user's may be finalized.
        self._own = tf1.Session(target, tf.Graph(), config)
        with self._own.graph.as_default():
            self._integers = tf1.placeholder(tf.int64, [None])
            self._gathered = gather(self._integers, job, FIRST_OF_SESSIONS + index)
        # Whether it will meet the others at the end: once it has joined them, and until a host is
        # lost, or this one leaves.
        self._is_joined = False
        self._fault = ""  # why there can be no more steps with the other hosts
        # A step with the other hosts holds this lock.
        self._step = threading.Lock()
        # It walks through the graph, and a training loop runs the same fetches again and again.
        self._collectives_of = lru_cache(maxsize=None)(collectives_of)
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
                this would be the next one; or another thread runs one; or the hosts' weights
                differ.
        """
        run = super().run
        collectives = self._collectives_of(fetched_ops(self.graph, fetches))
        if not collectives:
            return run(fetches, feed_dict, options, run_metadata)

        with self._only_thread():
            if has_sum(collectives):
                # The hosts are also compared before their first sum, after none.
                if is_step_to_compare(self._sums):
                    self._compare_weights()
                self._sums += 1
            numbered = _numbered(self._sequence, options)
            return self._watched(
                lambda: run(fetches, feed_dict, numbered, run_metadata), self._job.stall_timeout
            )

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

    def _watched(self, step: Callable[[], Any], seconds: float) -> Any:
        """Return the result of a step with the other hosts; after an error there is no other one.

        ``seconds`` are those of :meth:`HealthCheck.wait`.
        """
        try:
            return self._health.wait(step, seconds)
        except (ClusterError, tf.errors.OpError) as error:
            self._is_joined = isinstance(error, tf.errors.OutOfRangeError)
            self._fault = (
                f"this host's last step with the other hosts ended with {type(error).__name__}, and"
                " the others might take another one for it. At the end of the data, open a session"
                " for each epoch; or let the data repeat (dataset.repeat()), and run the same"
                f" number of steps on every host. After another error: {START_AGAIN}"
            )
            if isinstance(error, _FROM_OTHER_HOSTS) or "incarnation" in str(error):
                time.sleep(_CLOSING_SECONDS)
                fault = self._health.fault() or f"{_NO_HOST_IS_GONE}: {str(error)[:_LONGEST]}"
                self._health.let_others_find_it()
                raise ClusterError(f"{fault}. {START_AGAIN}") from error
            raise

    # ---- comparisons -------------------------------------------------------------------------

    def begin(self, lines: Sequence[str]) -> None:
        """Join the other hosts, if all have the same lines.

        Raises:
            ClusterError: a host is gone, or has other lines; the message names it, and the first
                difference.
        """
        own = "\n".join(lines).encode()
        # A collective needs equal shapes, so all texts are as long as the longest one.
        longest = self._table([len(own)]).max()
        table = self._table(list(own.ljust(longest, b"\0")))
        for task, text in enumerate(table):
            theirs = bytes(text.tolist()).rstrip(b"\0").decode().split("\n")
            for there, here in zip_longest(theirs, lines, fillvalue="nothing more"):
                if there != here:
                    raise ClusterError(
                        f"host {task} ({self._job.hosts[task]}) differs from this host"
                        f" ({self._job.task}): {there} there; {here} here"
                    )
        self._is_joined = True

    def table(self, integers: Any) -> Any:
        """Return an H×M table: the M whole numbers of each host; all must call it."""
        with self._only_thread():
            return self._table(integers)

    def _compare_weights(self) -> None:
        """Check that all hosts have the same weights, to the bit."""
        if not self._weights:
            return
        own = super().run(self._weights)
        names = list(own)
        table = self._table(list(own.values()))
        differs = table != table[0]  # H × N
        differing = [names[n] for n in np.flatnonzero(differs.any(0))]
        if differing:
            fault = f"after {count(self._sums, 'step')} the hosts' weights are different"
            hosts = np.flatnonzero(differs.any(1))
            listed = ", ".join(differing[:_MOST_LISTED])
            raise ClusterError(
                f"{fault}: {len(differing)} of {len(names)} variables are not the same on host 0"
                f" and on hosts {hosts}, {listed} among them. {_EQUAL}"
            )

    def _table(self, integers: Any) -> Any:
        """Return an H×M table: the M whole numbers of each host, once all hosts have it."""
        table = self._gather(integers, self._sequence, self._job.stall_timeout)
        # A host that finds a difference ends, so all must have read the table before.
        self._gather([0], self._sequence, self._job.stall_timeout)
        return table

    def _gather(self, integers: Any, sequence: int, seconds: float) -> Any:
        """Return an H×M table, without waiting until the other hosts have it."""
        fed = {self._integers: integers}
        options = _numbered(sequence)
        return self._watched(lambda: self._own.run(self._gathered, fed, options), seconds)

    # ---- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Close the session once all hosts have come to this point, are gone, or after the timeout.

        A host gets the last results from the others, so none may end before all have read them. One
        that an exception brings here does not wait: the others may be in a step with it.
        """
        if _is_failure(sys.exc_info()[1]) or sys.is_finalizing():
            self._is_joined = False
        if self._is_joined:
            self._is_joined = False
            with contextlib.suppress(ClusterError, tf.errors.OpError):
                self._gather([0], self._last_sequence, self._job.timeout)
        # Closing would wait for the call that still waits.
        if not self._health.is_waiting:
            super().close()
            self._own.close()

    def __exit__(self, error_type: Any, error: Any, trace: Any) -> None:
        # TensorFlow then calls close() in a thread that does not see the exception.
        if _is_failure(error):
            self._is_joined = False
        super().__exit__(error_type, error, trace)


def _numbered(sequence: int, options: Optional[Any] = None) -> Any:
    """Return the options of a step with the other hosts.

    TensorFlow numbers the steps of a sequence: a host asks host 0 for the next number when it first
    needs it. If a ``tf.cond`` skips all collectives in host 0's first step, that may be over before
    host 1 asks, and their numbers differ for ever. So each sequence begins with a table of all.
    """
    numbered = copy.deepcopy(options or tf1.RunOptions())
    numbered.experimental.collective_graph_key = sequence
    return numbered


def fetched_ops(graph: Any, fetches: Any) -> Tuple[Any, ...]:
    """Return the ops whose results, or end, a session is asked for."""
    leaves: List[Any] = []
    waiting = [fetches]
    while waiting:
        fetch = waiting.pop()
        # tf.nest would sort the keys of a mapping, which hooks need not allow.
        if isinstance(fetch, Mapping):
            fetch = list(fetch.values())
        if isinstance(fetch, (list, tuple)):
            waiting += fetch
        else:
            leaves += tf.nest.flatten(fetch, expand_composites=True)
    elements = map(graph.as_graph_element, leaves)
    return tuple(getattr(element, "op", element) for element in elements)


def _is_failure(error: Optional[BaseException]) -> bool:
    """Return whether an exception is neither an exit nor the end of the data."""
    return not isinstance(error, (type(None), SystemExit, tf.errors.OutOfRangeError))


# ---- the server ------------------------------------------------------------------------------


def session_config(job: Job, config: Optional[Any] = None) -> Any:
    """Return a copy of a ConfigProto with the settings that the sessions of a job need."""
    full = copy.deepcopy(config or tf1.ConfigProto())
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
        before = os.environ.get(variable, excepted)
        os.environ[variable] = ",".join(filter(None, [before, *machines]))
    try:
        return tf1.train.Server(
            {"worker": list(job.hosts)},
            job_name="worker",
            task_index=job.task,
            config=config,
        )
    except tf.errors.OpError as error:
        raise ClusterError(
            f"this host's server ({job.hosts[job.task]}) does not start: {error.message}. End an"
            " earlier run that uses the port, or take another port in every host's list"
        ) from error
