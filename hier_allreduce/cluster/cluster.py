"""Several hosts: the same plan inside each, TensorFlow's collectives between them.

::

    host 0   tower 0 ─┐                                       ┌─► tower 0
             tower 1 ─┴─► sum on its root ─┐             ┌────┴─► tower 1
                                           ├─ collective ┤
    host 1   tower 0 ─┐                    │             │    ┌─► tower 0
             tower 1 ─┴─► sum on its root ─┘             └────┴─► tower 1

Each host sends each chunk across once, not once for each tower, and different chunks from
different devices.
"""

from __future__ import annotations

import itertools
import os
from typing import Any, Optional, Sequence

import tensorflow as tf

from ..compat import tf1
from ..errors import ClusterError
from ..graphs import memory_of
from .collectives import fingerprints, has_sum
from .environment import Job, job_of, split_address
from .health import HealthCheck
from .session import ClusterSession, session_config, start_server
from .shared_ops import SharedOps


class Cluster:
    """The hosts of one job, and the index of this process among them.

    ::

        # TF_CONFIG or Slurm says which hosts; the same program runs on every host
        cluster = Cluster.from_environment()
        reduced = allreduce_grads(grads, devices, average=True, cluster=cluster)
        start = cluster.broadcast(tf.compat.v1.global_variables())
        with cluster.session() as session:  # waits for all hosts, and compares their graphs
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(start)              # host 0's values on all hosts
            …

    With one host, everything works as without a cluster: no server, no collective.

    Attributes:
        hosts: H addresses, ``"host:port"``, in the same order on every host.
        task: the index of this process in ``hosts``; 0 is the chief.
        ops: what the functions of this package build with the other hosts.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        task: int,
        timeout: float = 30.0,
        start_timeout: float = 600.0,
        stall_timeout: float = 1800.0,
    ):
        """The constructor checks the description; nothing is started before :meth:`session`.

        Args:
            hosts: addresses by which the hosts reach each other.
            task: the index of this process in ``hosts``.
            timeout: seconds within which every host ends with an error after another one has died
                or frozen. A host that computes, saves or evaluates is neither, however long it
                takes.
            start_timeout: seconds to wait for all hosts at the start.
            stall_timeout: seconds that a live host may keep the others waiting in a step: at least
                the time for which the chief saves and evaluates.

        Raises:
            ClusterError: an invalid or repeated address, a task that is not one of the hosts, or a
                timeout that is not above 0.
        """
        if len(set(map(split_address, hosts))) < len(hosts):
            raise ClusterError(f"hosts={hosts!r}: each host needs an address of its own")
        if task not in range(len(hosts)):
            raise ClusterError(f"task={task!r}: expected the index of one of {len(hosts)} hosts")
        limits = [float(limit) for limit in (timeout, start_timeout, stall_timeout)]
        for limit in limits:
            # With 0 a healthy host would be said to be gone, and NaN would be waited for for ever.
            if not limit > 0:
                raise ClusterError(f"a timeout of {limit} s: expected more than 0")
        self.hosts = tuple(hosts)
        self.task = int(task)
        self._job = Job(self.hosts, self.task, *limits)
        self.ops = SharedOps(self._job)
        # All hosts count sessions alike, because they open them in one order.
        self._sessions = itertools.count()
        self._server: Any = None

    @classmethod
    def from_environment(cls, **options: Any) -> Cluster:
        """Return the cluster that TF_CONFIG or Slurm describes; without either, one of one host.

        ``options`` are other arguments of :class:`Cluster`. ``tf.distribute`` reads TF_CONFIG too::

            {"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]},
             "task": {"type": "worker", "index": 1}}

        A job called ``chief`` comes before the workers. Slurm needs no TF_CONFIG:
        ``srun --ntasks-per-node=1``.

        Raises:
            ClusterError: the description is invalid; or a launcher has started several processes
                without one.
        """
        return cls(*job_of(os.environ), **options)

    def __repr__(self) -> str:
        return f"Cluster({list(self.hosts)}, task={self.task})"

    @property
    def size(self) -> int:
        """H, the number of hosts."""
        return self._job.size

    @property
    def is_chief(self) -> bool:
        """Whether this host saves and evaluates, and has the initial values of all hosts."""
        return self.task == 0

    def broadcast(self, variables: Sequence[Any]) -> Any:
        """Return an op that copies the chief's values to every host; all must run it together.

        Args:
            variables: the same on every host, in any order. Those without elements are left alone.

        Raises:
            ClusterError: there is no graph for a session, or a variable's dtype cannot be sent, or
                its shape is unknown.
        """
        return self.ops.broadcast(variables)

    def session(self, graph: Optional[Any] = None, config: Optional[Any] = None) -> Any:
        """Return a session of this host, once all hosts are there and have built the same graph.

        Before all-reduces 1, 2, 3, 5, 9, … and after each 1000, hosts compare the values of the
        trainable variables that the graph has now, unless a ``TowerOptimizer`` with
        ``check_replicas_every=0`` is in it.

        Args:
            graph: the current one by default.
            config: a ConfigProto; the cluster's settings are added to a copy. The server keeps the
                first one. Towers on CPU devices need ``device_count``.

        Returns:
            A ``tf.compat.v1.Session``. Leaving it waits for the other hosts, at most ``timeout``.

        Raises:
            ClusterError: this host's port is taken, hosts are missing after ``start_timeout``, or a
                host has built another graph: the message names the host and the difference.
            RuntimeError: TensorFlow's, if the graph has an all-reduce, and was finalized before its
                first session: comparing the weights needs new ops.
        """
        graph = graph or tf1.get_default_graph()
        if self.size == 1:
            return tf1.Session("", graph, config)
        config = session_config(self._job, config)
        memory = memory_of(graph)
        # A host that cannot compare its weights must say so before the others wait for it. Only a
        # finalized graph gets no all-reduce any more, and without one no step compares them.
        may_reduce = not graph.finalized or has_sum(graph.get_operations())
        compares = memory.compares_hosts and may_reduce
        weights = fingerprints(graph) if compares else {}
        # A process has one server, because its port stays taken until the process ends.
        self._server = self._server or start_server(self._job, config)
        # A session has a number once all hosts are there: one that has waited in vain, and tries
        # again, would have another one than the others, which TensorFlow would not bring together.
        HealthCheck(self._job).wait_for_servers()
        index = next(self._sessions)
        session = ClusterSession(self._server.target, graph, config, self._job, index, weights)
        # Hosts with other settings would build equal graphs, and wait for each other for ever.
        lines = [f"TensorFlow: {tf.__version__}", f"hosts: {self.hosts}", *memory.shared_lines]
        session.begin([*lines, f"trainable variables to compare: {len(weights)}"])
        return session

    def check_session(self, session: Any) -> None:
        """Check that all-reduces over several hosts can complete in a session.

        Raises:
            ClusterError: there are several hosts, and the session does not come from
                :meth:`session`.
        """
        if self.size > 1 and not isinstance(session, ClusterSession):
            raise ClusterError(
                f"a {type(session).__name__} does not know the other hosts: open cluster.session()"
            )
