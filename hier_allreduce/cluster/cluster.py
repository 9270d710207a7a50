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
    with cluster.session() as session:                             # waits for all hosts, and compares them
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(start)                                         # host 0's values everywhere
        …
"""

from __future__ import annotations

import itertools
import json
import os
import warnings
import weakref
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple, Union

import tensorflow as tf

from ..errors import ClusterError, GradientError
from ..graph import CrossHostReduce, HostGroup, Matrix, belongs_here, is_sparse, op_names, static_shape, tf1
from ..topology import Network
from . import config as clusterfile
from . import liveness as alive
from .collectives import Collectives, can_cross
from .kv_store import KeyValueStore
from .rendezvous import Rendezvous, TimeLimits
from .session import ClusterSession
from .watchdog import Watchdog

_LEADER = "/job:worker/replica:0/task:0"
_BOARD = 2.0  # seconds that one reading or writing of a few words may take, before it is tried again


class Cluster(HostGroup):
    """The hosts of one job, and which of them this process is.

    With one host everything is as without a cluster: no server, no collective.

    Attributes:
        hosts: H addresses, ``"host:port"``, in the same order on every host.
        task: which of them this process is; 0 is the chief.
        devices_per_host: K, the same on every host. So many CPU devices a session has, at least.
        network: what joins them, or None where that is not known.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        task: int,
        devices_per_host: int,
        timeout: float = 30.0,
        start_timeout: float = 600.0,
        stall_timeout: float = 3600.0,
        network: Union[str, Network, None] = None,
    ):
        """Only a description: nothing is started before :meth:`session`.

        Args:
            hosts: addresses by which the hosts reach each other.
            task: the place of this process in ``hosts``.
            devices_per_host: towers on each host.
            timeout: seconds within which every host ends with an error after another one has died or frozen. A host
                that computes, saves or evaluates is neither, however long it takes.
            start_timeout: seconds to wait for all hosts at the start.
            stall_timeout: seconds that a live host may keep the others waiting: the limit to its saving and evaluating.
            network: what joins the hosts, the same on every one: a name of ``configs/networks``, a YAML file, or a
                ``hier_allreduce.Network``. A strategy with a topology is then planned for it too.

        Raises:
            ClusterError: no hosts, an address that is none or that is there twice, a task that is not in the list, a
                number that is not positive, or a network that is unknown.
        """
        times = {"timeout": timeout, "start_timeout": start_timeout, "stall_timeout": stall_timeout}
        clusterfile.check_config(hosts, task, devices_per_host, **times)
        self.hosts: Tuple[str, ...] = tuple(hosts)
        self.task, self.devices_per_host = task, devices_per_host
        self.timeout, self.start_timeout, self.stall_timeout = timeout, start_timeout, stall_timeout
        self.network = clusterfile.network_from(network)
        self._collectives = Collectives(self.size, self.is_chief)
        self._sessions = itertools.count()
        self._built: weakref.WeakKeyDictionary[Any, Dict[str, Any]] = weakref.WeakKeyDictionary()
        self._server: Any = None

    @classmethod
    def from_environment(cls, devices_per_host: int, **options: Any) -> Cluster:
        """The cluster that TF_CONFIG describes, as launchers set it for ``tf.distribute``; without it, one host.

        ``options`` are other arguments of :class:`Cluster`: timeouts, and the network.

        ::

            {"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": {"type": "worker", "index": 1}}

        A job called ``chief`` comes before the workers.

        Raises:
            ClusterError: TF_CONFIG cannot be read, has jobs other than these, or what it says is refused.
        """
        text = os.environ.get("TF_CONFIG", "").strip()
        if not text:
            return cls(["127.0.0.1:2222"], 0, devices_per_host, **options)
        try:
            content = json.loads(text)
            jobs, own = content["cluster"], content["task"]
            places = [(job, index) for job in ("chief", "worker") for index in range(len(jobs.get(job, ())))]
            task = places.index((own["type"], int(own["index"])))
            hosts = [jobs[job][index] for job, index in places]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ClusterError(
                f"TF_CONFIG={text!r}: expected"
                ' {"cluster": {"worker": ["HOST:PORT", …]}, "task": {"type": "worker", "index": NUMBER}}, with this'
                " process in the list"
            ) from None
        if set(jobs) - {"chief", "worker"}:
            raise ClusterError(f"TF_CONFIG: this is for jobs 'chief' and 'worker' only, not {sorted(jobs)}")
        return cls(hosts, task, devices_per_host, **options)

    @classmethod
    def load(cls, name_or_path: str, task: int) -> Cluster:
        """A cluster from ``configs/clusters/NAME.yaml``, or from the YAML file at a path.

        Raises:
            ClusterError: no such file or name, a key that is no argument, or a value that is refused.
        """
        return cls(task=task, **clusterfile.read_config(name_or_path, task))

    def __repr__(self) -> str:
        return f"Cluster({list(self.hosts)}, task={self.task}, devices_per_host={self.devices_per_host})"

    @property
    def size(self) -> int:
        """H, the number of hosts."""
        return len(self.hosts)

    @property
    def is_chief(self) -> bool:
        """Whether this host saves, evaluates, and has the values that all start from."""
        return self.task == 0

    # ---- what goes into graphs ---------------------------------------------------------------------

    def across(self, name: str, grads: Matrix, facts: Mapping[str, Any]) -> CrossHostReduce:
        """What :func:`hier_allreduce.allreduce_grads` does with a host's sums.

        Args:
            name: what to call this all-reduce in errors.
            grads: this host's gradients, K×N.
            facts: what else must be the same on all hosts, as JSON; it is compared before the first step.

        Raises:
            ClusterError: this is not for ``devices_per_host`` devices; or there are several hosts and no graph for a
                session (eager execution, ``tf.function``).
            GradientError: no collective can add up a gradient's dtype.
        """
        if len(grads.devices) != self.devices_per_host:
            raise ClusterError(f"{name} is for {len(grads.devices)} devices, and {self} has {self.devices_per_host}")
        if self.size == 1:
            return CrossHostReduce()
        graph = _graph_of_session()
        found = [next((grad for grad in column if grad is not None), None) for column in grads.columns]
        for variable, grad in enumerate(found):
            if grad is not None and not can_cross(grad.dtype.base_dtype):
                raise GradientError(
                    f"variable {variable} ({grads.names[variable]!r}): {grad.dtype.name} cannot be added up across"
                    " hosts; cast it to float32 or int64"
                )
        described = dict(zip(op_names(grads.names), map(_described, found)))
        self._note(graph, "all-reduce", {"gradients": described, **facts}, f" ({name})")
        return self._collectives

    def broadcast(self, variables: Sequence[Any]) -> Any:
        """An op that gives every host the chief's values; all hosts must run it at the same point.

        Args:
            variables: the same ones on every host, in any order. Those without elements are left alone.

        Raises:
            ClusterError: there is no graph for a session, something is no variable of it, or a variable's dtype cannot
                be sent, or its shape is not known.
        """
        if self.size == 1:
            return tf.no_op()
        graph = _graph_of_session()
        for variable in variables:
            _refuse_unsendable(variable)
        ordered = sorted(variables, key=lambda variable: str(variable.op.name))
        self._note(graph, "broadcast", {"variables": {v.op.name: _described(v) for v in ordered}})
        with tf1.name_scope("broadcast"), tf1.device("/cpu:0"):
            return tf.group(*[self._collectives.broadcast(v) for v in ordered if v.shape.num_elements() != 0])

    def _note(self, graph: Any, kind: str, facts: Mapping[str, Any], name: str = "") -> None:
        """Put down what is built next. Its collectives only meet the other hosts' if as many were built before."""
        built = self._built_in(graph)
        number = sum(key.startswith(kind) for key in built)
        built[f"{kind} {number}{name}"] = {**facts, "collectives before": self._collectives.built}

    def _built_in(self, graph: Any) -> Dict[str, Any]:
        return self._built.setdefault(graph, {})

    # ---- sessions ----------------------------------------------------------------------------------

    def session(self, graph: Optional[Any] = None, config: Optional[Any] = None) -> Any:
        """A session of this host, once all hosts are there and have built the same.

        Args:
            graph: the current one by default.
            config: a ConfigProto; what the cluster needs is added to a copy. The first one is the server's.

        Returns:
            A ``tf.compat.v1.Session``. Leaving it waits until all hosts have left theirs.

        Raises:
            ClusterError: this host's port is taken, hosts are missing after ``start_timeout``, or a host has another
                list of hosts or built something else: the message names the host and the difference.
        """
        config = self.config(config)
        if self.size == 1:
            return tf1.Session("", graph, config)
        graph = graph or tf1.get_default_graph()
        if self._may_start_apart(graph):
            warnings.warn(
                "no cluster.broadcast was built in this graph: unless all hosts restore the same checkpoint, each"
                " trains from values of its own, and their models differ. Build everywhere ="
                " cluster.broadcast(tf.compat.v1.global_variables()), and run it once the variables have their values",
                stacklevel=2,
            )
        if self._server is None:
            self._server = self._serve(config)
        watch = Watchdog(self.hosts, self.task, self.timeout, self.stall_timeout)
        addresses = [*self.hosts]
        # as this host reaches itself, whatever the list says
        addresses[self.task] = self._server.target[len("grpc://") :]
        board = KeyValueStore(addresses, min(_BOARD, self.timeout / 6))
        patience = TimeLimits(self.timeout, self.start_timeout, self.stall_timeout)
        meeting = Rendezvous(self.hosts, self.task, patience, watch, board, next(self._sessions))
        meeting.agree(self._facts(graph))
        return ClusterSession(meeting, watch, self._server.target, graph, config)

    def _may_start_apart(self, graph: Any) -> bool:
        kinds = {key.split()[0] for key in self._built_in(graph)}
        return kinds == {"all-reduce"} and bool(graph.get_collection(tf1.GraphKeys.TRAINABLE_VARIABLES))

    def check_session(self, session: Any) -> None:
        """Check that a session is one in which all-reduces over several hosts come to an end.

        Raises:
            ClusterError: there are several hosts, and it does not come from :meth:`session`.
        """
        if self.size > 1 and not isinstance(session, ClusterSession):
            raise ClusterError(
                f"a {type(session).__name__} knows nothing of the other hosts, and its first step would wait for ever;"
                " open cluster.session() instead"
            )

    def config(self, config: Optional[Any] = None) -> Any:
        """A copy of a ConfigProto with what the cluster needs."""
        full = tf1.ConfigProto()
        full.CopyFrom(config or tf1.ConfigProto())
        full.device_count["CPU"] = max(full.device_count["CPU"], self.devices_per_host)
        if self.size > 1:
            full.use_per_session_threads = False  # a server's threads are its own, and sessions cannot bring any
            full.experimental.collective_group_leader = _LEADER
            # without it ops that name no task go to task 0, in TensorFlow 1
            full.device_filters.append(f"/job:worker/task:{self.task}")
        return full

    def _serve(self, config: Any) -> Any:
        address = self.hosts[self.task]
        alive.refuse_taken(address)
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
            "network": self.network and self.network[:4],  # but for its name
            "TensorFlow": tf.__version__,
            **self._built_in(graph),
        }


def _refuse_unsendable(variable: Any) -> None:
    if not (belongs_here(variable) and hasattr(variable, "assign")):
        raise ClusterError(f"{variable!r} is no variable of the graph that is being built, and cannot be sent")
    if not can_cross(variable.dtype) or not variable.shape.is_fully_defined():
        raise ClusterError(
            f"variable {variable.op.name!r} is {_described(variable)}: only numbers of known shape can be sent to other"
            " hosts; leave it out of the variables"
        )


def _described(thing: Any) -> str:
    """A gradient or variable in a few words, which are the same on hosts that have the same."""
    if thing is None:
        return "None"
    shape = static_shape(thing)
    words = shape.as_list() if shape.ndims is not None else "?"
    return f"{thing.dtype.base_dtype.name} {words}{' sparse' * is_sparse(thing)}"


def _graph_of_session() -> Any:
    """The graph that is being built.

    Raises:
        ClusterError: there is none, or it is a function's.
    """
    graph = tf1.get_default_graph()
    if tf.executing_eagerly() or hasattr(graph, "capture"):
        raise ClusterError(
            "several hosts need a graph and a session: build under `with tf.Graph().as_default():` and run it in"
            " `cluster.session()`, not eagerly and not in a tf.function"
        )
    return graph
