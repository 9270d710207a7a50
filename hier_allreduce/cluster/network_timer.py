"""Sums over all hosts and copies between two of them, timed: what a calibration of the network consists of.

::

    sums     every host   meet ─► go ─► collectives ─► end ─► the mean of all hosts' end - go, by one more collective
    copies   host 0       copies, timed by their receivers ─► seconds ─► every host, by a collective

All hosts get the same times, to the last bit. So all decide alike what to measure next, without another message.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple

import tensorflow as tf

from ..graph import Matrix, tf1
from .cluster import Cluster
from .host_copies import HostCopies, Pair, plain_config

_FLOAT = 4  # bytes


class NetworkTimer:
    """Times what crosses between hosts. All hosts call the same methods in the same order.

    Attributes:
        hosts: H, the number of hosts.
    """

    def __init__(self, cluster: Cluster, devices: Sequence[str], largest: int, facts: Mapping[str, Any]):
        """Wait for all hosts, and open the sessions.

        Args:
            cluster: the hosts, two or more.
            devices: this host's K devices; sums begin and end on all of them, copies on the first.
            largest: the most bytes of a sum or a copy. Every device holds as many.
            facts: what must be equal on all hosts, as JSON.

        Raises:
            ClusterError: as in :meth:`.Cluster.session`.
        """
        self.hosts = cluster.size
        self._devices = tuple(devices)
        self._built: Dict[Tuple[int, int], Any] = {}
        self._graph = tf.Graph()
        with self._graph.as_default():
            fill = self._build(cluster, largest // _FLOAT, {**facts, "devices": list(devices), "bytes": largest})
        self._session = cluster.session(self._graph, plain_config())
        self._session.run(fill)
        self._copies: Optional[HostCopies] = None
        if cluster.is_chief:
            self._copies = HostCopies(self._session, cluster.hosts, self._devices[0], largest)

    def close(self) -> None:
        """Close the sessions; without an error, this waits for all hosts."""
        if self._copies:
            self._copies.close()
        self._session.close()

    def sums(self, count: int, size: int) -> float:
        """Return the seconds of ``count`` sums of ``size`` bytes over all hosts at once: the mean of the hosts.

        Raises:
            ClusterError: a host is gone or stuck; names it.
        """
        if (count, size) not in self._built:
            with self._graph.as_default():
                self._built[count, size] = self._sums(count, size // _FLOAT)
        return float(self._session.run(self._built[count, size]))

    def copies(self, pairs: Sequence[Pair], size: int) -> float:
        """Return the seconds of the slowest of some copies at once; see :meth:`.HostCopies.together`.

        Raises:
            ClusterError: a host is gone or stuck; names it.
        """
        return self._shared(lambda copies: copies.together(pairs, size))

    def hops(self, pair: Pair, count: int, size: int) -> float:
        """Return the seconds of ``count`` copies between two hosts, to and fro; see :meth:`.HostCopies.hops`.

        Raises:
            ClusterError: a host is gone or stuck; names it.
        """
        return self._shared(lambda copies: copies.hops(pair, count, size))

    def _shared(self, measure: Callable[[HostCopies], float]) -> float:
        """Return host 0's measurement on every host."""
        seconds = measure(self._copies) if self._copies else 0.0
        return float(self._session.run(self._everywhere, {self._mine: seconds}))

    # ---- the graph -------------------------------------------------------------------------------------

    def _build(self, cluster: Cluster, elements: int, facts: Mapping[str, Any]) -> Any:
        """Build what all runs share; return the op that fills the memory."""
        self._values, fills = [], []
        for number, device in enumerate(self._devices):
            with tf1.device(device):
                name = f"hier_allreduce_sums{number}"
                source = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[elements], shared_name=name)
                fills.append(tf.raw_ops.AssignVariableOp(resource=source, value=tf.ones([elements])))
                value = tf.raw_ops.ReadVariableOp(resource=source, dtype=tf.float32)
                value.set_shape([elements])
                self._values.append(value)
        grads = Matrix(tuple((value,) for value in self._values), self._devices, ("calibration",))
        self._across = cluster.across("calibration", grads, facts)
        self._mine = tf1.placeholder(tf.float64, [], "seconds")
        self._everywhere = self._total(self._mine)
        return tf.group(*fills)

    def _total(self, value: Any) -> Any:
        """Return the sum of a number over all hosts."""
        with tf1.device("/cpu:0"):
            # the roots below K are those of the devices' own sums
            return tf.reshape(self._across.all_reduce(tf.reshape(value, [1]), len(self._devices), "total"), [])

    def _clock(self, after: Sequence[Any]) -> Any:
        with tf1.device("/cpu:0"), tf1.control_dependencies(after):
            return tf.raw_ops.Timestamp()

    def _sums(self, count: int, elements: int) -> Any:
        """Build sums at once, from the devices in turn; return the mean of the hosts' seconds."""
        go = self._clock([self._total(tf.constant(0.0, tf.float64))])
        ends = [self._sum(number % len(self._devices), elements, go) for number in range(count)]
        return self._total(self._clock(ends) - go) / self.hosts

    def _sum(self, root: int, elements: int, go: Any) -> Any:
        """Build one sum from a device; return what is there only when its last byte is."""
        with tf1.device(self._devices[root]), tf1.control_dependencies([go.op]):
            part = tf.raw_ops.Slice(input=self._values[root], begin=[0], size=[elements])
            total = self._across.all_reduce(part, root, "sum")
            first = tf.raw_ops.Slice(input=total, begin=[0], size=[1])
        with tf1.device("/cpu:0"):
            return tf.identity(first)
