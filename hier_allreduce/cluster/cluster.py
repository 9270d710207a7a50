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
import math
import os
from numbers import Real
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

import tensorflow as tf

from ..compat import builds_for_session, in_current_graph, tf1
from ..configs import is_whole_number
from ..errors import ClusterError, HierAllreduceError
from .collectives import (
    ENGINES,
    FIRST_IN_GRAPHS,
    FIRST_OF_SESSIONS,
    NCCL,
    ON_ROOTS,
    RING,
    add_up,
    can_cross,
    crossing_dtype,
    gather,
    send,
)
from .environment import Job, check_hosts, job_of
from .health import HealthCheck
from .session import ClusterSession, start_server

_BUILT = "hier_allreduce/hosts"  # the collection of a graph with lines that all hosts must have
_MOST_DIMENSIONS = 254  # of a tensor: TensorShape::MaxDimensions() in TensorFlow


class Cluster:
    """The hosts of one job, and the index of this process among them.

    ::

        # TF_CONFIG or Slurm says which hosts; the same program runs on every host
        cluster = Cluster.from_environment(devices_per_host=4)
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
        devices_per_host: K, the same on every host. A session has at least this number of CPU
            devices.
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
            timeout: seconds within which every host ends with an error after another one has died
                or frozen. A host that computes, saves or evaluates is neither, however long it
                takes.
            start_timeout: seconds to wait for all hosts at the start.
            stall_timeout: seconds that a live host may keep the others waiting, for example while
                it saves.
            communication: ``"ring"``, TensorFlow's over gRPC; or ``"nccl"``, for GPUs.

        Raises:
            ClusterError: no hosts, an invalid or repeated address, a task that is not an index of
                the list, an unknown engine, or a number that is not positive.
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
        self.task = int(task)
        self.devices_per_host = int(devices_per_host)
        self.timeout = float(timeout)
        self.start_timeout = float(start_timeout)
        self.stall_timeout = float(stall_timeout)
        self.communication = communication
        self._job = Job(self.hosts, self.task)
        self._built = 0  # collectives in users' graphs
        self._last_over_nccl: Dict[int, Any] = {}  # of the all-reduce that is being built, by root
        self._sessions = itertools.count()
        self._numbers_of_sessions = itertools.count(FIRST_OF_SESSIONS)
        self._server: Any = None

    @classmethod
    def from_environment(cls, devices_per_host: int, **options: Any) -> Cluster:
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
        return cls(*job_of(os.environ), devices_per_host, **options)

    def __repr__(self) -> str:
        hosts = list(self.hosts)
        return f"Cluster({hosts}, task={self.task}, devices_per_host={self.devices_per_host})"

    @property
    def size(self) -> int:
        """H, the number of hosts."""
        return len(self.hosts)

    @property
    def is_chief(self) -> bool:
        """Whether this host saves and evaluates, and has the initial values of all hosts."""
        return self.task == 0

    # ---- built in graphs ---------------------------------------------------------------------

    def announce(
        self,
        name: str,
        towers: int,
        gradients: Sequence[Tuple[str, str, Any]],
        facts: Mapping[str, Any],
    ) -> None:
        """Check an all-reduce before its first op is added, and note it: hosts compare their notes.

        Args:
            name: of the all-reduce, in errors.
            towers: K of this host.
            gradients: name, dtype and shape of N gradients; a dtype is empty if there is none.
            facts: what else must be equal on all hosts.

        Raises:
            ClusterError: the gradients are not for ``devices_per_host`` devices; or there are
                several hosts and no graph for a session (eager execution, ``tf.function``, control
                flow of TensorFlow 2).
            HierAllreduceError: no collective can add up a gradient's dtype.
        """
        if towers != self.devices_per_host:
            raise ClusterError(
                f"{name} is for {towers} devices, and {self} has {self.devices_per_host}"
            )
        if self.size == 1:
            return
        _check_graph()
        for variable, (gradient, dtype, _) in enumerate(gradients):
            if dtype and not can_cross(dtype):
                raise HierAllreduceError(
                    f"variable {variable} ({gradient!r}): {dtype} cannot be added up across hosts;"
                    " cast it to float32 or int64"
                )
        lines = [
            f"gradients: {gradient}: {_dtype_and_shape(dtype, shape)}"
            for gradient, dtype, shape in gradients
        ]
        lines.append(f"communication: {self.communication}")
        lines += [f"{key}: {value}" for key, value in facts.items()]
        self._note(f"all-reduce ({name})", lines)
        self._last_over_nccl = {}

    def all_reduce(self, tensor: Any, root: int, name: str) -> Any:
        """Return the sum of the tensors that all hosts give in this place of their programs.

        It is called under the device of tower ``root``, after :meth:`announce`. NCCL matches calls
        by their order. So the calls of one all-reduce with the same root run one after another, in
        the order in which they were built.

        Args:
            tensor: of one shape and dtype on all hosts.
            root: the tower.
            name: the name scope of the ops.
        """
        if self.size == 1 or tensor.shape.num_elements() == 0:
            return tensor
        before = []
        if not tensor.shape.is_fully_defined():
            before.append(self._equal_shapes(tensor, name.rpartition("/")[0]))
        if root in self._last_over_nccl:
            before.append(self._last_over_nccl[root])
        with tf1.name_scope(name):
            # TensorFlow 1 needs to know the device.
            here = tensor if tensor.device else tf.identity(tensor)
            wide = tf.cast(here, crossing_dtype(tensor.dtype.name))
            with tf1.control_dependencies(before):
                number = self._next_number()
                total = add_up(wide, self._job, ON_ROOTS + root, number, self.communication)
            if self.communication == NCCL:
                self._last_over_nccl[root] = total.op
            total.set_shape(tensor.shape)
            return tf.cast(total, tensor.dtype)

    def _equal_shapes(self, tensor: Any, name: str) -> Any:
        """Return an op that fails on every host if the hosts' tensors differ in shape.

        Engines compare only sizes.
        """
        # not in the chunk's scope, where the audit counts the sums over hosts
        with tf1.name_scope("shapes_across"):
            shape = tf.shape(tensor)
            with tf1.device("/cpu:0"):
                missing = _MOST_DIMENSIONS - tf.size(shape)
                row = tf.pad(shape + 1, [[0, missing]])  # no size becomes 0
                rows = self.all_gather(row)  # H × _MOST_DIMENSIONS
                told = (
                    f"{name}: the shape of its gradient differs between the hosts; on this host it"
                    " is"
                )
                are_equal = tf.reduce_all(tf.equal(rows, rows[:1]))
                return tf.raw_ops.Assert(condition=are_equal, data=[told, shape])

    def all_gather(self, row: Any) -> Any:
        """Return the rows that all hosts give in this place of their programs: H×M, int64.

        Args:
            row: M whole numbers.
        """
        if self.size == 1:
            return tf.cast([row], tf.int64)
        return gather(row, self._job, self._next_number())

    def broadcast(self, variables: Sequence[Any]) -> Any:
        """Return an op that copies the chief's values to every host; all must run it together.

        Args:
            variables: the same on every host, in any order. Those without elements are left alone.

        Raises:
            ClusterError: there is no graph for a session, something is not a variable of it, or a
                variable's dtype cannot be sent, or its shape is unknown.
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
            dtype = str(variable.dtype.base_dtype.name)
            shape = variable.shape
            text = _dtype_and_shape(dtype, shape)
            texts[str(variable.op.name)] = text
            if not can_cross(dtype) or not shape.is_fully_defined():
                raise ClusterError(
                    f"variable {variable.op.name!r} is {text}: only numbers of known shape can be"
                    " sent to other hosts; leave it out of the variables"
                )
        self._note("broadcast", [f"variables: {name}: {texts[name]}" for name in sorted(texts)])
        ordered = sorted(variables, key=lambda variable: str(variable.op.name))
        with tf1.name_scope("broadcast"):
            sent = [
                send(variable, self._job, self._next_number())
                for variable in ordered
                if variable.shape.num_elements() != 0
            ]
            return tf.group(*sent)

    def _next_number(self) -> int:
        """Return the number of a collective in a user's graph, the same on all hosts."""
        self._built += 1
        return FIRST_IN_GRAPHS + self._built - 1

    def _note(self, kind: str, lines: Sequence[str]) -> None:
        """Note in the graph which collectives are about to be built."""
        for line in lines:
            tf1.add_to_collection(_BUILT, f"collective {self._built}, {kind}, {line}")

    # ---- sessions ----------------------------------------------------------------------------

    def session(self, graph: Optional[Any] = None, config: Optional[Any] = None) -> Any:
        """Return a session of this host, once all hosts are there and have built the same graph.

        Before the first all-reduce, hosts compare the values of the trainable variables that the
        graph has now.

        Args:
            graph: the current one by default.
            config: a ConfigProto; the cluster's settings are added to a copy. The server keeps the
                first one.

        Returns:
            A ``tf.compat.v1.Session``. Leaving it waits until all hosts have left theirs.

        Raises:
            ClusterError: this host's port is taken, hosts are missing after ``start_timeout``, or a
                host has built another graph: the message names the host and the difference.
        """
        config = self.config(config)
        graph = graph or tf1.get_default_graph()
        if self.size == 1:
            return tf1.Session("", graph, config)
        self._server = self._server or start_server(self._job, config)
        health = HealthCheck(self.hosts, self.task, self.timeout)
        health.wait_for_servers(self.start_timeout)
        session = ClusterSession(
            self._server.target,
            graph,
            config,
            self._job,
            health,
            self.stall_timeout,
            number=next(self._sessions),
            collectives=self._numbers_of_sessions,
        )
        lines = [
            f"devices_per_host: {self.devices_per_host}",
            f"TensorFlow: {tf.__version__}",
            f"hosts: {self.hosts}",
        ]
        session.begin([*lines, *graph.get_collection(_BUILT)], self.start_timeout)
        return session

    def check_session(self, session: Any) -> None:
        """Check that all-reduces over several hosts can complete in a session.

        Raises:
            ClusterError: there are several hosts, and the session does not come from
                :meth:`session`.
        """
        if self.size > 1 and not isinstance(session, ClusterSession):
            raise ClusterError(
                f"a {type(session).__name__} does not know the other hosts, and cannot run a step"
                " with them; open cluster.session() instead"
            )

    def check_weights(self, session: Any) -> None:
        """Check that all hosts hold the same values of all trainable variables; all must call it.

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
            # In TensorFlow 1, ops that name no task would go to task 0 without this filter.
            full.device_filters.append(f"/job:worker/task:{self.task}")
        return full


def _dtype_and_shape(dtype: str, shape: Any) -> str:
    """Return ``"float32 [5, 7]"``, ``"float32 ?"`` or, without a dtype, ``"None"``."""
    if not dtype:
        return "None"
    sizes = "?" if shape.ndims is None else shape.as_list()
    return f"{dtype} {sizes}"


def _check_graph() -> None:
    """Raise a ClusterError if there is no graph, or it is a function's."""
    graph = tf1.get_default_graph()
    is_function = hasattr(graph, "capture")
    if is_function and builds_for_session():
        raise ClusterError(
            "several hosts cannot add up in a function, and TensorFlow 2 makes functions of the"
            " branches of tf.cond and tf.while_loop: call"
            " tf.compat.v1.disable_control_flow_v2() before you build the graph. In a tf.function,"
            " several hosts are not possible"
        )
    if tf.executing_eagerly() or is_function:
        raise ClusterError(
            "several hosts need a graph and a session: build under"
            " `with tf.Graph().as_default():` and run it in `cluster.session()`, not eagerly and"
            " not in a tf.function"
        )
