"""Several hosts: the same plan inside each, TensorFlow's own collectives between them.

::

    host 0   tower 0 ─┐                                       ┌─► tower 0
             tower 1 ─┴─► sum on its main ─┐             ┌────┴─► tower 1
                                           ├─ collective ┤
    host 1   tower 0 ─┐                    │             │    ┌─► tower 0
             tower 1 ─┴─► sum on its main ─┘             └────┴─► tower 1

Each host sends each chunk across once, not once for each tower, and different chunks from different devices.

::

    cluster = Cluster.from_environment(devices_per_host=4)         # from TF_CONFIG; the same program on every host
    reduced = allreduce_grads(grads, devices, average=True, cluster=cluster)
    start = cluster.broadcast(tf.compat.v1.global_variables())
    with cluster.session() as session:                             # waits for all hosts, and compares their graphs
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(start)                                         # host 0's values everywhere
        …
"""

from __future__ import annotations

import itertools
import os
import warnings
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

import tensorflow as tf

from ..errors import ClusterError
from ..graph import CrossHostReduce, HostGroup, Matrix, builds_for_session, forget_colocation, outside_control_flow, tf1
from .addresses import refuse_taken
from .collectives import AcrossHosts, Collectives, engine_for, nccl_groups
from .config import RING, check_config, from_tf_config, read_config
from .kv_store import KeyValueStore
from .manifest import ALL_REDUCE, BROADCAST, Manifest, gradient_facts, variable_facts
from .rendezvous import Rendezvous
from .session import ClusterSession
from .watchdog import Watchdog

_LEADER = "/job:worker/replica:0/task:0"
_MEETING = "hier_allreduce/meeting"  # the collection that holds a graph's op for it
_KV_SECONDS = 2.0  # limit to one operation of the key-value store, which is then tried again


class Cluster(HostGroup):
    """The hosts of one job, and the place of this process among them.

    With one host, everything works as without a cluster: no server, no collective.

    Attributes:
        hosts: H addresses, ``"host:port"``, in the same order on every host.
        task: the index of this process in ``hosts``; 0 is the chief.
        devices_per_host: K, the same on every host. A session has at least this number of CPU devices.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        task: int,
        devices_per_host: int,
        timeout: float = 30.0,
        start_timeout: float = 600.0,
        stall_timeout: float = 3600.0,
        communication: str = RING,
    ):
        """Check and keep the description; nothing is started before :meth:`session`.

        Args:
            hosts: addresses by which the hosts reach each other.
            task: the index of this process in ``hosts``.
            devices_per_host: number of towers on each host.
            timeout: seconds within which every host ends with an error after another one has died or frozen. A host
                that computes, saves or evaluates is neither, however long it takes.
            start_timeout: seconds to wait for all hosts at the start.
            stall_timeout: seconds that a live host may keep the others waiting, for example while it saves or
                evaluates.
            communication: ``"ring"``, TensorFlow's own over gRPC; ``"nccl"``, for GPUs; or ``"auto"``: NCCL for each
                all-reduce whose towers are all GPUs, if this TensorFlow was built with it. Hosts compare the choice.

        Raises:
            ClusterError: no hosts, an invalid or repeated address, a task that is not an index of the list, an unknown
                engine, or a number that is not positive.
        """
        times = {"timeout": timeout, "start_timeout": start_timeout, "stall_timeout": stall_timeout}
        check_config(hosts, task, devices_per_host, communication, **times)
        self.hosts: Tuple[str, ...] = tuple(hosts)
        self.task, self.devices_per_host = task, devices_per_host
        self.timeout, self.start_timeout, self.stall_timeout = timeout, start_timeout, stall_timeout
        self.communication = communication
        self._collectives = Collectives(self.size, self.task)
        self._manifest = Manifest()
        self._session_numbers = itertools.count()
        self._server: Any = None

    @classmethod
    def from_environment(cls, devices_per_host: int, **options: Any) -> Cluster:
        """Return the cluster that TF_CONFIG describes; a cluster of one host if there is none in it.

        Launchers set it for ``tf.distribute``. ``options`` are other arguments of :class:`Cluster`.

        ::

            {"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": {"type": "worker", "index": 1}}

        A job called ``chief`` comes before the workers.

        Raises:
            ClusterError: TF_CONFIG is invalid, has jobs other than these, or describes an invalid cluster.
        """
        hosts, task = from_tf_config(os.environ.get("TF_CONFIG", ""))
        return cls(hosts, task, devices_per_host, **options)

    @classmethod
    def load(cls, name_or_path: str, task: int, **options: Any) -> Cluster:
        """Return a cluster from ``configs/clusters/NAME.yaml``, or from the YAML file at a path.

        The file has ``hosts`` and ``devices_per_host``. ``options`` are other arguments of :class:`Cluster`.

        Raises:
            HierAllreduceError: no such file or name, or an unknown or missing key.
            ClusterError: an invalid value.
        """
        return cls(task=task, **read_config(name_or_path, task), **options)

    def __repr__(self) -> str:
        return f"Cluster({list(self.hosts)}, task={self.task}, devices_per_host={self.devices_per_host})"

    @property
    def size(self) -> int:
        """H, the number of hosts."""
        return len(self.hosts)

    @property
    def is_chief(self) -> bool:
        """Whether this host saves and evaluates, and has the initial values of all hosts."""
        return self.task == 0

    # ---- what goes into graphs ---------------------------------------------------------------------

    def across(self, name: str, grads: Matrix, facts: Mapping[str, Any]) -> CrossHostReduce:
        """Return the reduction over hosts that ``allreduce_grads`` applies to a host's sums.

        Args:
            name: the name of this all-reduce in errors.
            grads: this host's gradients, K×N.
            facts: what else must be equal on all hosts, as JSON; compared before the first step.

        Raises:
            ClusterError: the gradients are not for ``devices_per_host`` devices; or there are several hosts and no
                graph for a session (eager execution, ``tf.function``, control flow of TensorFlow 2).
            HierAllreduceError: no collective can add up a gradient's dtype.
        """
        if len(grads.places.towers) != self.devices_per_host:
            raise ClusterError(
                f"{name} is for {len(grads.places.towers)} devices, and {self} has {self.devices_per_host}"
            )
        if self.size == 1:
            return CrossHostReduce()
        graph = _graph_for_session()
        engine = engine_for(self.communication, grads.places.towers)
        self._note(graph, ALL_REDUCE, {"communication": engine, "gradients": gradient_facts(grads), **facts}, name)
        return AcrossHosts(self._collectives, engine)

    def broadcast(self, variables: Sequence[Any]) -> Any:
        """Return an op that gives every host the chief's values; all hosts must run it at the same point.

        Args:
            variables: the same on every host, in any order. Variables without elements are left alone.

        Raises:
            ClusterError: there is no graph for a session, something is not a variable of it, or a variable's dtype
                cannot be sent, or its shape is unknown.
        """
        if self.size == 1:
            return tf.no_op()
        graph, facts = _graph_for_session(), {"variables": variable_facts(variables)}
        ordered = sorted(variables, key=lambda variable: str(variable.op.name))
        groups = nccl_groups(self.communication, ordered)
        facts["over NCCL"] = {v.op.name: str(groups[v.device]) for v in ordered if v.device in groups}
        self._note(graph, BROADCAST, facts)
        with tf1.name_scope("broadcast"):
            return self._collectives.broadcast([v for v in ordered if v.shape.num_elements() != 0], groups)

    def _note(self, graph: Any, kind: str, facts: Mapping[str, Any], name: str = "") -> None:
        """Note what is about to be built in a graph; build the op of the graph's meeting, if it has none yet."""
        if not graph.get_collection(_MEETING):
            with outside_control_flow(), forget_colocation(), tf1.name_scope(None):
                graph.add_to_collection(_MEETING, self._collectives.meeting())
        self._manifest.add(graph, kind, facts, self._collectives.built, name)

    # ---- sessions ----------------------------------------------------------------------------------

    def session(self, graph: Optional[Any] = None, config: Optional[Any] = None) -> Any:
        """Return a session of this host, once all hosts are there and have built the same graph.

        Args:
            graph: the current one by default.
            config: a ConfigProto; what the cluster needs is added to a copy. The server keeps the first one.

        Returns:
            A ``tf.compat.v1.Session``. Leaving it waits until all hosts have left theirs.

        Raises:
            ClusterError: this host's port is taken, hosts are missing after ``start_timeout``, or a host has another
                list of hosts or has built something else: the message names the host and the difference.
        """
        config = self.config(config)
        if self.size == 1:
            return tf1.Session("", graph, config)
        graph = graph or tf1.get_default_graph()
        if self._manifest.lacks_broadcast(graph):
            warnings.warn(
                "no cluster.broadcast was built in this graph: unless all hosts restore the same checkpoint, each"
                " trains from values of its own, and their models differ. Build everywhere ="
                " cluster.broadcast(tf.compat.v1.global_variables()), and run it once the variables have their values",
                stacklevel=2,
            )
        if self._server is None:
            self._server = self._start_server(config)
        watchdog = Watchdog(self.hosts, self.task, self.timeout, self.stall_timeout)
        number = next(self._session_numbers)
        addresses = list(self.hosts)
        # the address by which this host reaches itself, whatever the list says
        addresses[self.task] = self._server.target[len("grpc://") :]
        kv_store = KeyValueStore(addresses, min(_KV_SECONDS, self.timeout / 6))
        rendezvous = Rendezvous(self.hosts, self.task, self.start_timeout, watchdog, kv_store, number)
        rendezvous.barrier(self._facts(graph))
        session = ClusterSession(rendezvous, watchdog, number, self._server.target, graph, config)
        for meeting in graph.get_collection(_MEETING):  # at most one; none in a graph without collectives
            session.run(meeting)
        return session

    def check_session(self, session: Any) -> None:
        """Check that all-reduces over several hosts can complete in a session.

        Raises:
            ClusterError: there are several hosts, and the session does not come from :meth:`session`.
        """
        if self.size > 1 and not isinstance(session, ClusterSession):
            raise ClusterError(
                f"a {type(session).__name__} knows nothing of the other hosts, and its first step would wait for ever;"
                " open cluster.session() instead"
            )

    def config(self, config: Optional[Any] = None) -> Any:
        """Return a copy of a ConfigProto with what the cluster needs."""
        full = tf1.ConfigProto()
        full.CopyFrom(config or tf1.ConfigProto())
        full.device_count["CPU"] = max(full.device_count["CPU"], self.devices_per_host)
        if self.size > 1:
            full.use_per_session_threads = False  # sessions of a server use the server's threads, not their own
            full.experimental.collective_group_leader = _LEADER
            # in TensorFlow 1, ops that name no task would go to task 0 without this filter
            full.device_filters.append(f"/job:worker/task:{self.task}")
        return full

    def _start_server(self, config: Any) -> Any:
        address = self.hosts[self.task]
        refuse_taken(address)
        try:
            return tf1.train.Server(
                {"worker": list(self.hosts)}, job_name="worker", task_index=self.task, config=config, protocol="grpc"
            )
        except tf.errors.OpError as error:
            raise ClusterError(f"this host's server ({address}) does not start: {error.message}") from error

    def _facts(self, graph: Any) -> Dict[str, Any]:
        return {
            "hosts": dict(enumerate(self.hosts)),
            "task": self.task,
            "devices_per_host": self.devices_per_host,
            "TensorFlow": tf.__version__,
            **self._manifest.entries(graph),
        }


def _graph_for_session() -> Any:
    """Return the graph that is being built.

    Raises:
        ClusterError: there is none, or it is a function's.
    """
    graph = tf1.get_default_graph()
    is_function = hasattr(graph, "capture")
    if is_function and builds_for_session():
        raise ClusterError(
            "several hosts cannot add up in a function, and TensorFlow 2 makes functions of what tf.cond and"
            " tf.while_loop call: call tf.compat.v1.disable_control_flow_v2() before you build the graph. In a"
            " tf.function, several hosts are not possible"
        )
    if tf.executing_eagerly() or is_function:
        raise ClusterError(
            "several hosts need a graph and a session: build under `with tf.Graph().as_default():` and run it in"
            " `cluster.session()`, not eagerly and not in a tf.function"
        )
    return graph
