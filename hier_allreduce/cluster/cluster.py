"""Several hosts: the same plan inside each, TensorFlow's collectives between them.

::

    host 0   tower 0 ─┐                                       ┌─► tower 0
             tower 1 ─┴─► sum on its root ─┐             ┌────┴─► tower 1
                                           ├─ collective ┤
    host 1   tower 0 ─┐                    │             │    ┌─► tower 0
             tower 1 ─┴─► sum on its root ─┘             └────┴─► tower 1

Each host sends each chunk across once, not once for each tower, and different chunks from different devices.
"""

from __future__ import annotations

import itertools
import math
import os
from numbers import Real
from typing import Any, Mapping, Optional, Sequence, Tuple

import tensorflow as tf

from ..compat import builds_for_session, in_current_graph, tf1
from ..errors import ClusterError, HierAllreduceError
from ..graph import HostGroup
from ..graph.matrix import Column
from .collectives import ENGINES, RING, AcrossHosts, Collectives, can_cross
from .environment import check_hosts, is_whole_number, job_of, split_address
from .session import ClusterSession, Tables, difference
from .watch import Watch

_BUILT = "hier_allreduce/hosts"  # the collection of a graph with lines of text: all hosts must have built the same


class Cluster(HostGroup):
    """The hosts of one job, and the index of this process among them.

    ::

        cluster = Cluster.from_environment(devices_per_host=4)     # TF_CONFIG or Slurm; the same program on every host
        reduced = allreduce_grads(grads, devices, average=True, cluster=cluster)
        start = cluster.broadcast(tf.compat.v1.global_variables())
        with cluster.session() as session:                         # waits for all hosts, and compares their graphs
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(start)                                     # host 0's values on all hosts
            …

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
        stall_timeout: float = 1800.0,
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
            stall_timeout: seconds that a live host may keep the others waiting, for example while it saves.
            communication: ``"ring"``, TensorFlow's over gRPC; or ``"nccl"``, for GPUs.

        Raises:
            ClusterError: no hosts, an invalid or repeated address, a task that is not an index of the list, an unknown
                engine, or a number that is not positive.
        """
        check_hosts(hosts, task)
        if not is_whole_number(devices_per_host) or devices_per_host < 1:
            raise ClusterError(
                f"devices_per_host={devices_per_host!r}: expected a whole number of 1 or more"
            )
        if communication not in ENGINES:
            raise ClusterError(
                f"communication={communication!r}: expected one of {', '.join(ENGINES)}"
            )
        times = {"timeout": timeout, "start_timeout": start_timeout, "stall_timeout": stall_timeout}
        for name, seconds in times.items():
            is_number = isinstance(seconds, Real) and not isinstance(seconds, bool)
            if not is_number or not 0 < seconds < math.inf:
                raise ClusterError(f"{name}={seconds!r}: expected seconds, more than 0 and finite")
        self.hosts: Tuple[str, ...] = tuple(hosts)
        self.task = int(task)  # NumPy's integers are no indices of devices in names
        self.devices_per_host = int(devices_per_host)
        self.timeout = float(timeout)
        self.start_timeout = float(start_timeout)
        self.stall_timeout = float(stall_timeout)
        self.communication = communication
        self._collectives = Collectives(self.size, self.task)
        self._sessions = itertools.count()
        self._server: Any = None

    @classmethod
    def from_environment(cls, devices_per_host: int, **options: Any) -> Cluster:
        """Return the cluster that TF_CONFIG or Slurm describes; a cluster of one host without either.

        ``options`` are other arguments of :class:`Cluster`. Launchers set TF_CONFIG for ``tf.distribute``::

            {"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": {"type": "worker", "index": 1}}

        A job called ``chief`` comes before the workers. Slurm needs no TF_CONFIG: ``srun --ntasks-per-node=1``.

        Raises:
            ClusterError: the description is invalid; or a launcher has started several processes without one.
        """
        return cls(*job_of(os.environ), devices_per_host, **options)

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

    # ---- built in graphs ---------------------------------------------------------------------------

    def across(
        self, name: str, columns: Sequence[Column], facts: Mapping[str, Any]
    ) -> Optional[AcrossHosts]:
        """Return the sums over hosts that ``allreduce_grads`` applies to a host's sums; None for one host.

        Args:
            name: the name of this all-reduce in errors.
            columns: this host's N columns of K gradients.
            facts: further facts that must be equal on all hosts; compared before the first step.

        Raises:
            ClusterError: the gradients are not for ``devices_per_host`` devices; or there are several hosts and no
                graph for a session (eager execution, ``tf.function``, control flow of TensorFlow 2).
            HierAllreduceError: no collective can add up a gradient's dtype.
        """
        towers = {len(column.grads) for column in columns} - {self.devices_per_host}
        if towers:
            raise ClusterError(
                f"{name} is for {towers.pop()} devices, and {self} has {self.devices_per_host}"
            )
        if self.size == 1:
            return None
        _check_graph()
        for variable, column in enumerate(columns):
            if column.dtype and not can_cross(column.dtype):
                raise HierAllreduceError(
                    f"variable {variable} ({column.name!r}): {column.dtype} cannot be added up across hosts; cast it to"
                    " float32 or int64"
                )
        lines = [
            f"gradients: {column.name}: {_dtype_and_shape(column.dtype, column.shape)}"
            for column in columns
        ]
        lines += [
            f"{key}: {value}"
            for key, value in {"communication": self.communication, **facts}.items()
        ]
        self._note(f"all-reduce ({name})", lines)
        return AcrossHosts(self._collectives, self.communication)

    def broadcast(self, variables: Sequence[Any]) -> Any:
        """Return an op that copies the chief's values to every host; all hosts must run it at the same point.

        Args:
            variables: the same on every host, in any order. Variables without elements are left alone.

        Raises:
            ClusterError: there is no graph for a session, something is not a variable of it, or a variable's dtype
                cannot be sent, or its shape is unknown.
        """
        if self.size == 1:
            return tf.no_op()
        _check_graph()
        texts = {}
        for variable in variables:
            if not (in_current_graph(variable) and hasattr(variable, "assign")):
                raise ClusterError(
                    f"{variable!r} is not a variable of the graph being built, and cannot be sent"
                )
            dtype, shape = str(variable.dtype.base_dtype.name), variable.shape
            texts[str(variable.op.name)] = _dtype_and_shape(dtype, shape)
            if not can_cross(dtype) or not shape.is_fully_defined():
                raise ClusterError(
                    f"variable {variable.op.name!r} is {texts[variable.op.name]}: only numbers of known shape can be"
                    " sent to other hosts; leave it out of the variables"
                )
        self._note("broadcast", [f"variables: {name}: {texts[name]}" for name in sorted(texts)])
        ordered = sorted(variables, key=lambda variable: str(variable.op.name))
        with tf1.name_scope("broadcast"):
            return self._collectives.broadcast([v for v in ordered if v.shape.num_elements() != 0])

    def _note(self, kind: str, lines: Sequence[str]) -> None:
        """Note in the graph which collectives are about to be built."""
        for line in lines:
            tf1.add_to_collection(_BUILT, f"collective {self._collectives.built}, {kind}, {line}")

    # ---- sessions ----------------------------------------------------------------------------------

    def session(self, graph: Optional[Any] = None, config: Optional[Any] = None) -> Any:
        """Return a session of this host, once all hosts are there and have built the same graph.

        Before the first all-reduce, hosts compare the values of the trainable variables that the graph has now.

        Args:
            graph: the current one by default.
            config: a ConfigProto; the cluster's settings are added to a copy. The server keeps the first one.

        Returns:
            A ``tf.compat.v1.Session``. Leaving it waits until all hosts have left theirs.

        Raises:
            ClusterError: this host's port is taken, hosts are missing after ``start_timeout``, or a host has built
                another graph: the message names the host and the difference.
        """
        config, graph = self.config(config), graph or tf1.get_default_graph()
        if self.size == 1:
            return tf1.Session("", graph, config)
        self._server = self._server or self._start_server(config)
        watch = Watch(self.hosts, self.task, self.timeout)
        watch.wait_for_servers(self.start_timeout)
        tables = Tables(self._collectives, watch, self._server.target, config, next(self._sessions))
        self._compare_graphs(tables, graph)
        return ClusterSession(tables, self.stall_timeout, self._server.target, graph, config)

    def _compare_graphs(self, tables: Tables, graph: Any) -> None:
        mine = [
            f"devices_per_host: {self.devices_per_host}",
            f"TensorFlow: {tf.__version__}",
            f"hosts: {self.hosts}",
        ]
        mine += graph.get_collection(_BUILT)
        for task, text in enumerate(tables.texts("\n".join(mine), self.start_timeout)):
            differs = difference(mine, text.split("\n"))
            if differs:
                tables.meet()
                raise ClusterError(
                    f"host {task} ({self.hosts[task]}) differs from this host ({self.task}): {differs}. All hosts must"
                    " run the same program with the same settings"
                )

    def check_session(self, session: Any) -> None:
        """Check that all-reduces over several hosts can complete in a session.

        Raises:
            ClusterError: there are several hosts, and the session does not come from :meth:`session`.
        """
        if self.size > 1 and not isinstance(session, ClusterSession):
            raise ClusterError(
                f"a {type(session).__name__} does not know the other hosts, and cannot run a step with them; open"
                " cluster.session() instead"
            )

    def check_weights(self, session: Any) -> None:
        """Check that all hosts hold the same values of all trainable variables; all hosts must call it.

        Args:
            session: from :meth:`session`.

        Raises:
            ClusterError: variables differ, and are named; or as :meth:`check_session`.
        """
        self.check_session(session)
        if self.size > 1:
            session.compare_weights()

    def config(self, config: Optional[Any] = None) -> Any:
        """Return a copy of a ConfigProto with the settings that the cluster needs."""
        full = tf1.ConfigProto()
        full.CopyFrom(config or tf1.ConfigProto())
        full.device_count["CPU"] = max(full.device_count["CPU"], self.devices_per_host)
        if self.size > 1:
            full.use_per_session_threads = False  # sessions of a server use the server's threads
            full.experimental.collective_group_leader = "/job:worker/replica:0/task:0"
            # in TensorFlow 1, ops that name no task would go to task 0 without this filter
            full.device_filters.append(f"/job:worker/task:{self.task}")
        return full

    def _start_server(self, config: Any) -> Any:
        self._bypass_proxy()
        try:
            return tf1.train.Server(
                {"worker": list(self.hosts)},
                job_name="worker",
                task_index=self.task,
                config=config,
                protocol="grpc",
            )
        except tf.errors.OpError as error:
            raise ClusterError(
                f"this host's server ({self.hosts[self.task]}) does not start: {error.message}. If another process uses"
                " the port (an earlier run?), end it, or give this host another port in every host's list"
            ) from error

    def _bypass_proxy(self) -> None:
        """Except the hosts from the proxy of ``http_proxy``: gRPC would ask it for them, and wait for ever."""
        names = [split_address(address)[0] for address in self.hosts]
        excepted = os.environ.get("no_proxy", "")
        for variable in (
            "no_grpc_proxy",
            "no_proxy",
        ):  # the gRPC of TensorFlow 1.15 reads only the second one
            before = os.environ.get(variable, excepted).split(",")
            os.environ[variable] = ",".join(dict.fromkeys(filter(None, [*before, *names])))


def _dtype_and_shape(dtype: str, shape: Any) -> str:
    """Return ``"float32 [5, 7]"``, ``"float32 ?"`` or, without a dtype, ``"None"``."""
    if not dtype:
        return "None"
    return f"{dtype} {shape.as_list() if shape.ndims is not None else '?'}"


def _check_graph() -> None:
    """Raise a ClusterError if there is no graph, or it is a function's."""
    graph = tf1.get_default_graph()
    is_function = hasattr(graph, "capture")
    if is_function and builds_for_session():
        raise ClusterError(
            "several hosts cannot add up in a function, and TensorFlow 2 makes functions of the branches of tf.cond and"
            " tf.while_loop: call tf.compat.v1.disable_control_flow_v2() before you build the graph. In a tf.function,"
            " several hosts are not possible"
        )
    if tf.executing_eagerly() or is_function:
        raise ClusterError(
            "several hosts need a graph and a session: build under `with tf.Graph().as_default():` and run it in"
            " `cluster.session()`, not eagerly and not in a tf.function"
        )
