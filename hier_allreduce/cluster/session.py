"""The session of one host among several: compares the hosts, and raises an error where others would hang.

::

    all listen? ─► equal texts? ─► runs on this host alone, as in any session
                                   steps with the other hosts: numbered, one at a time, watched
                                     before the first all-reduce: equal weights?          ─► all at the end?
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import threading
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

import numpy as np
import tensorflow as tf

from ..compat import tf1
from ..errors import ClusterError
from .collectives import Collectives, check_order, checksums, collectives_of
from .watch import START_AGAIN, Watch

# A sequence of steps that TensorFlow numbers has one key: a random one of 64 bits, or this one and a session's number.
_SEQUENCES = 0x48410000
# of a step that fails because it failed on another host
_FROM_PEERS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
)
_CLOSING_SECONDS = 1.0  # a process that ends may close its connections before its port
_LISTED = 5  # differences that an error message lists
_ONE_THREAD = (
    "another thread is in a step with the other hosts, and TensorFlow would give this one the same number: run all such"
    " steps from one thread. Work that needs no other host, such as filling a queue, can run in any thread"
)


class Tables:
    """The tables to which every host contributes a row of whole numbers, in one session of this host."""

    def __init__(
        self, collectives: Collectives, watch: Watch, target: str, config: Any, session: int
    ):
        self.watch, self._collectives, self._sequence = watch, collectives, _SEQUENCES + session
        self._session = tf1.Session(target, tf.Graph(), config)

    def numbered(self, options: Optional[Any] = None) -> Any:
        """Return the options of a step with the other hosts.

        TensorFlow has a sequence of numbers for each set of collectives, and a host asks host 0 for the next one when
        it first needs it. If nothing crosses in host 0's first step, because of a ``tf.cond``, that step may have ended
        by then, and the numbers differ by one for ever. So all steps are of one sequence, which begins with a table.
        """
        numbered = tf1.RunOptions()
        numbered.CopyFrom(options or tf1.RunOptions())
        numbered.experimental.collective_graph_key = self._sequence
        return numbered

    def rows(self, row: Any, seconds: float, doing: str) -> Any:
        """Return the rows of all hosts, H×M; ``seconds`` and ``doing`` are those of :meth:`Watch.wait`."""
        with self._session.graph.as_default():
            table = self._collectives.table(tf.constant(row, tf.int64))
        return self.wait(lambda: self._session.run(table, options=self.numbered()), seconds, doing)

    def wait(self, step: Callable[[], Any], seconds: float, doing: str) -> Any:
        """Return the result of a step with the other hosts, as :meth:`Watch.wait` does.

        Raises:
            ClusterError: also if TensorFlow's error comes from a host that is gone.
        """
        try:
            return self.watch.wait(step, seconds, doing)
        except _FROM_PEERS as error:
            fault = self.watch.fault(_CLOSING_SECONDS)
            if not fault:
                raise
            self.watch.linger()
            raise ClusterError(f"{fault}. {START_AGAIN}") from error

    def meet(self) -> None:
        """Wait until all hosts have come to this point, are gone, or have not come within the timeout.

        A host that ends before the others have read the last table would take it from them.
        """
        with contextlib.suppress(ClusterError, tf.errors.OpError):
            self.rows([0], 6 * self.watch.period, "to end together")

    def texts(self, text: str, seconds: float) -> List[str]:
        """Return the texts of all hosts; nothing if they are equal."""
        data, doing = text.encode(), "to compare the graphs"
        digest = np.frombuffer(hashlib.sha256(data).digest(), np.int64)
        rows = self.rows([len(data), *digest], seconds, doing)
        if (rows == rows[0]).all():
            return []
        words = -(-rows[:, 0].max() // 8)
        rows = self.rows(np.frombuffer(data.ljust(8 * words, b"\0"), np.int64), seconds, doing)
        return [row.tobytes().rstrip(b"\0").decode() for row in rows]

    def close(self) -> None:
        """Close the session of the tables."""
        self._session.close()


def difference(mine: List[str], theirs: List[str]) -> str:
    """Return the lines in which two hosts differ; empty if they do not."""
    there, here = (
        [line for line in a if line not in b] for a, b in ((theirs, mine), (mine, theirs))
    )
    lines = [f"{line} there" for line in there[:_LISTED]] + [
        f"{line} here" for line in here[:_LISTED]
    ]
    return "; ".join(lines) or ("the same in another order" if mine != theirs else "")


class ClusterSession(tf1.Session):
    """A session whose steps end with an error that names the host if another host fails.

    After a step with the other hosts that ended with an error, the end of the data included, there can be no other:
    TensorFlow gives the next step the same number, so it could meet hosts that are still in the failed one.
    """

    def __init__(self, tables: Tables, patience: float, target: str, graph: Any, config: Any):
        super().__init__(target, graph, config)
        self._tables, self._watch, self._patience = tables, tables.watch, patience
        self._step = threading.Lock()  # held during a step with the other hosts
        self._over = ""  # why there can be no other step with the other hosts
        self._waits = True  # whether closing waits for the other hosts
        self._crossing: Dict[
            Tuple[Any, ...], List[Any]
        ] = {}  # the collectives, by the ops that a run fetches
        self._checksums = checksums(graph)
        self._compared = False

    def run(
        self, fetches: Any, feed_dict: Any = None, options: Any = None, run_metadata: Any = None
    ) -> Any:
        """Run as ``tf.compat.v1.Session.run`` does.

        Raises:
            ClusterError: a host died or froze, and TensorFlow cannot go on in this process: end it, and start again.
                Or an earlier step with the other hosts ended with an error, and this would be the next one; or another
                thread runs one; or NCCL's calls have no order in this one; or the hosts began with different weights.
        """
        run, collectives = super().run, self._collectives(fetches)
        if not collectives:
            return run(fetches, feed_dict, options, run_metadata)
        with self._alone():
            if not self._compared and any(
                op.type.startswith("CollectiveReduce") for op in collectives
            ):
                self._compare("hosts begin with different weights")
                self._compared = True
            numbered = self._tables.numbered(options)
            return self._watched(lambda: run(fetches, feed_dict, numbered, run_metadata))

    def make_callable(
        self, fetches: Any, feed_list: Any = None, accept_options: bool = False
    ) -> Callable[..., Any]:
        """Return a callable as ``tf.compat.v1.Session.make_callable`` does, with the errors of :meth:`run`."""
        return super().make_callable(
            fetches, feed_list or [], accept_options
        )  # with a list, it calls run()

    def compare_weights(self) -> None:
        """Check that all hosts hold the same values of all trainable variables; all hosts must call it.

        Raises:
            ClusterError: some differ, and are named; or as :meth:`run`.
        """
        with self._alone():
            self._compare("the hosts' weights have become different")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock of steps with the other hosts."""
        if self._over:
            raise ClusterError(self._over)
        if not self._step.acquire(blocking=False):
            raise ClusterError(_ONE_THREAD)
        try:
            yield
        finally:
            self._step.release()

    def _collectives(self, fetches: Any) -> List[Any]:
        """Return the collectives that fetches need."""
        elements = [self.graph.as_graph_element(fetch) for fetch in _leaves(fetches)]
        ops = tuple(
            element if isinstance(element, tf.Operation) else element.op for element in elements
        )
        if ops not in self._crossing:
            collectives = collectives_of(ops)
            check_order(collectives)
            self._crossing[ops] = collectives
        return self._crossing[ops]

    def _watched(self, step: Callable[[], Any]) -> Any:
        try:
            return self._tables.wait(step, self._patience, "in a step")
        except ClusterError as error:
            self._over, self._waits = str(error), False
            raise
        except tf.errors.OpError as error:
            ended = (
                "the end of its data"
                if isinstance(error, tf.errors.OutOfRangeError)
                else type(error).__name__
            )
            self._over = (
                f"this host's last step with the other hosts ended with {ended}, and after that this session cannot run"
                " another: the others might still be in that step and take the new one for it. Let the data repeat"
                " (dataset.repeat()) and run the same number of steps on every host; or open a session for each epoch."
                " Runs that need no other host are still possible"
            )
            raise

    def _compare(self, found: str) -> None:
        """Check that all hosts have the same weights; a variable without a value counts as 0."""
        if not self._checksums:
            return
        names, is_set, sums = zip(*self._checksums)
        have_values = super().run(list(is_set))
        values = iter(
            super().run([checksum for checksum, has_value in zip(sums, have_values) if has_value])
        )
        row = [next(values) if has_value else 0 for has_value in have_values]
        rows = self._tables.rows(row, self._patience, "to compare the weights")
        differing = [name for name, column in zip(names, rows.T) if len(set(column)) > 1]
        if differing:
            self._tables.meet()
            others = ", ".join(
                f"host {task}" for task, values in enumerate(rows) if (values != rows[0]).any()
            )
            raise ClusterError(
                f"{found}: {len(differing)} of {len(names)} variables are not the same on host 0 and on {others},"
                f" {', '.join(differing[:_LISTED])} among them. Run cluster.broadcast(tf.compat.v1.global_variables())"
                " once they have their values, or restore the same checkpoint on every host"
            )

    def close(self) -> None:
        """Close the session once all hosts have come to this point, are gone, or have not come within the timeout.

        A host that an exception brings here does not wait: the others may be in the middle of a step with it.
        """
        waits = self._waits and not (
            self._watch.stuck or _is_failure(sys.exc_info()[1]) or sys.is_finalizing()
        )
        self._waits = False
        if waits:
            self._tables.meet()
        if not self._watch.stuck:  # closing would wait for the call that is stuck
            super().close()
            self._tables.close()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        # TensorFlow then calls close() in a thread that does not see the exception.
        self._waits = self._waits and not _is_failure(error)
        super().__exit__(kind, error, trace)


def _leaves(fetches: Any) -> Iterator[Any]:
    """Yield the tensors, ops, variables and names in fetches."""
    if isinstance(fetches, Mapping):  # tf.nest would sort its keys, which hooks need not allow
        fetches = list(fetches.values())
    if isinstance(fetches, (list, tuple)):
        for fetch in fetches:
            yield from _leaves(fetch)
    elif fetches is not None:
        yield from tf.nest.flatten(fetches, expand_composites=True)


def _is_failure(error: Optional[BaseException]) -> bool:
    if isinstance(error, SystemExit):
        return bool(error.code)
    return error is not None and not isinstance(
        error, tf.errors.OutOfRangeError
    )  # that one is the end of the data
