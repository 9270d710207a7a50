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

This is the only module that uses ``tensorflow.python.ops.collective_ops``, which has no public name.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import sys
import threading
import time
import warnings
import weakref
from typing import Any, Callable, Dict, Iterable, Iterator, Mapping, Optional, Sequence, Set, Tuple, Union

import tensorflow as tf
from tensorflow.python.ops import collective_ops

from . import alive, clusterfile
from .board import Board
from .compat import belongs_here, tf1
from .emit import Across
from .errors import ClusterError, GradientError
from .gradients import Matrix, is_sparse, static_shape
from .kinds import op_names
from .scaling import Network
from .watch import START_AGAIN, Watch

# Group and instance numbers are the server's, shared by all that use collectives in it: tensorpack counts from 42 and
# 100, tf.distribute from 1 and 100.
_BROADCASTS = 0x4840
_MAINS = 0x4841  # and one more for each tower that can be a main
_INSTANCES = 0x484100

_LEADER = "/job:worker/replica:0/task:0"
_WIDER = {
    "bool": "int32",
    "int8": "int32",
    "uint8": "int32",
    "int16": "int32",
    "uint16": "int32",
    "bfloat16": "float32",
}
_COLLECTIVE = ("float16", "float32", "float64", "int32", "int64")
_LISTED = 5  # so many differences does an error name
_BOARD = 2.0  # seconds that one reading or writing of a few words may take, before it is tried again
_POLL = 0.1  # seconds between two looks at hosts that are still starting


class Cluster:
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
                ``hier_allreduce.scaling.Network``. A strategy with a topology is then planned for it too.

        Raises:
            ClusterError: no hosts, an address that is none or that is there twice, a task that is not in the list, a
                number that is not positive, or a network that is unknown.
        """
        times = {"timeout": timeout, "start_timeout": start_timeout, "stall_timeout": stall_timeout}
        clusterfile.check(hosts, task, devices_per_host, **times)
        self.hosts: Tuple[str, ...] = tuple(hosts)
        self.task, self.devices_per_host = task, devices_per_host
        self.timeout, self.start_timeout, self.stall_timeout = timeout, start_timeout, stall_timeout
        self.network = clusterfile.joined_by(network)
        self._collectives = 0  # so many have been built, in all graphs
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
        return cls(task=task, **clusterfile.read(name_or_path, task))

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

    def across(self, name: str, grads: Matrix, facts: Mapping[str, Any]) -> Across:
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
            return Across()
        graph = _graph_of_session()
        found = [next((grad for grad in column if grad is not None), None) for column in grads.columns]
        for variable, grad in enumerate(found):
            if grad is not None and not _can_cross(grad.dtype.base_dtype):
                raise GradientError(
                    f"variable {variable} ({grads.names[variable]!r}): {grad.dtype.name} cannot be added up across"
                    " hosts; cast it to float32 or int64"
                )
        described = dict(zip(op_names(grads.names), map(_described, found)))
        self._note(graph, "all-reduce", {"gradients": described, **facts}, f" ({name})")
        return _Collectives(self)

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
            return tf.group(*[self._broadcast_one(v) for v in ordered if v.shape.num_elements() != 0])

    def _broadcast_one(self, variable: Any) -> Any:
        dtype = variable.dtype.base_dtype
        wide = _wider(dtype)
        how = (self.size, _BROADCASTS, self._instance())
        if self.is_chief:
            value = tf.cast(tf.identity(variable), wide)
            return collective_ops.broadcast_send(value, value.shape, wide, *how, communication_hint="ring").op
        value = collective_ops.broadcast_recv(variable.shape, wide, *how, communication_hint="ring")
        return tf1.assign(variable, tf.cast(value, dtype)).op

    def _note(self, graph: Any, kind: str, facts: Mapping[str, Any], name: str = "") -> None:
        """Put down what is built next. Its collectives only meet the other hosts' if as many were built before."""
        built = self._built_in(graph)
        number = sum(key.startswith(kind) for key in built)
        built[f"{kind} {number}{name}"] = {**facts, "collectives before": self._collectives}

    def _instance(self) -> int:
        """A number for one more collective."""
        self._collectives += 1
        return _INSTANCES + self._collectives - 1

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
        watch = Watch(self.hosts, self.task, self.timeout, self.stall_timeout)
        addresses = [*self.hosts]
        # as this host reaches itself, whatever the list says
        addresses[self.task] = self._server.target[len("grpc://") :]
        meeting = _Meeting(self, watch, next(self._sessions), Board(addresses, min(_BOARD, self.timeout / 6)))
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


class _Collectives(Across):
    """Chunks of one all-reduce, added up over the hosts' mains."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self.hosts = cluster.size

    def all_reduce(self, tensor: Any, root: int, name: str) -> Any:
        if tensor.shape.num_elements() == 0:
            return tensor
        with tf1.name_scope(name):
            total = collective_ops.all_reduce(
                tf.cast(tensor, _wider(tensor.dtype)),
                self.hosts,
                _MAINS + root,
                self._cluster._instance(),
                "Add",
                "Id",
                communication_hint="ring",
            )
            total.set_shape(tensor.shape)
            return tf.cast(total, tensor.dtype)


def _wider(dtype: Any) -> Any:
    """The dtype in which a dtype crosses."""
    has_halves = hasattr(collective_ops, "all_reduce_v2")  # TensorFlow 1.15's kernels have no float16
    name = dtype.base_dtype.name
    return tf.as_dtype("float32" if name == "float16" and not has_halves else _WIDER.get(name, name))


def _can_cross(dtype: Any) -> bool:
    return _wider(dtype).name in _COLLECTIVE


def _refuse_unsendable(variable: Any) -> None:
    if not (belongs_here(variable) and hasattr(variable, "assign")):
        raise ClusterError(f"{variable!r} is no variable of the graph that is being built, and cannot be sent")
    if not _can_cross(variable.dtype) or not variable.shape.is_fully_defined():
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


class ClusterSession(tf1.Session):
    """A session that ends with an error that names the host, where TensorFlow's would hang when a host dies.

    Steps are made in a thread of their own while the calling one looks after the hosts. That is done for the thread
    that opened the session; others, such as those that fill queues, run as in any session.

    After a step with the other hosts that ended with an error, be it the end of the data, there can be no other:
    TensorFlow gives the next one the same number, by which it would meet hosts that are still in the first.
    """

    def __init__(self, meeting: _Meeting, watch: Watch, target: str, graph: Any, config: Any):
        super().__init__(target, graph, config)
        self._meeting, self._watch = meeting, watch
        self._owner = threading.current_thread()
        self._failed = False
        self._crossing: Dict[Tuple[Any, ...], bool] = {}  # by what is run
        self._ended = ""  # why there can be no other step with the other hosts
        self._inside = self._broken = False  # a step with the other hosts: is this one in it, did its last one fail

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """As ``tf.compat.v1.Session.run``.

        Raises:
            ClusterError: a host died or froze; TensorFlow cannot go on in this process: end it, and start again. Or
                a step with the other hosts has ended with an error, and this would be the next.
        """
        return self._watched(functools.partial(super().run, *args, **kwargs))

    def make_callable(self, fetches: Any, feed_list: Any = None, accept_options: bool = False) -> Callable[..., Any]:
        """As ``tf.compat.v1.Session.make_callable``; errors are those of :meth:`run`."""
        return super().make_callable(fetches, feed_list or [], accept_options)  # with a list it is made of run()

    def _do_run(self, handle: Any, targets: Sequence[Any], fetches: Sequence[Any], *rest: Any) -> Any:
        """TensorFlow's own place between finding out what is to be run and running it."""
        ops = (*targets, *(tensor.op for tensor in fetches))
        if ops not in self._crossing:
            self._crossing[ops] = _crosses(ops)
        if not self._crossing[ops]:
            return super()._do_run(handle, targets, fetches, *rest)
        if self._ended:
            raise ClusterError(self._ended)
        self._meeting.steps += 1
        self._inside = True
        try:
            return super()._do_run(handle, targets, fetches, *rest)
        except tf.errors.OpError as error:
            self._ended, self._broken = _no_more_steps(error), True
            raise
        finally:
            self._inside = False

    def _watched(self, function: Callable[[], Any]) -> Any:
        if threading.current_thread() is not self._owner:
            return function()
        try:
            return self._watch.call(function, told=lambda: self._meeting.told() if self._inside else "")
        except tf.errors.OutOfRangeError:  # the data are at their end
            raise
        except tf.errors.OpError as error:
            words = self._cause(error)
            if not words:
                raise
            self._meeting.leave_after_error()
            raise ClusterError(words) from error
        except ClusterError:
            self._meeting.leave_after_error()
            raise

    def _cause(self, error: tf.errors.OpError) -> str:
        """Which host has made a run fail, in words; nothing where it is this one, which then tells the others."""
        broken, self._broken = self._broken, False
        listens, patience = broken and _is_from_elsewhere(error), 0.0
        if listens:
            patience = self._meeting.patience  # a host that fails tells the others after that
        elif isinstance(error, tf.errors.UnavailableError):
            patience = _POLL  # a process that ends may close its connections before its port
        end = time.monotonic() + patience
        while True:
            found = self._watch.faults()
            words = (self._meeting.told(also_same=not found) if listens else "") or self._watch.message(found)
            if words or time.monotonic() >= end:
                break
            time.sleep(_POLL)
        if broken and not words:
            self._meeting.tell(f"ended its step with {_in_a_line(error)}")
        return words

    def close(self) -> None:
        """Wait until all hosts have come to this point, or are gone; then close.

        A host that an exception brings here waits for nobody: the others may be in the middle of a step with it.
        """
        if self._watch.stuck:
            return
        if not (self._failed or _is_failure(sys.exc_info()[1])):
            self._meeting.leave_at_end()
        super().close()
        self._meeting.close()
        self._watch.close()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._failed = _is_failure(error)  # TensorFlow then calls close() in a thread that knows of no exception
        super().__exit__(kind, error, trace)


def _is_failure(error: Optional[BaseException]) -> bool:
    if isinstance(error, SystemExit):
        return bool(error.code)
    return error is not None and not isinstance(error, tf.errors.OutOfRangeError)  # that is the end of the data


def _crosses(ops: Iterable[Any]) -> bool:
    """Whether a collective is among ``ops`` and all that they need."""
    found, waiting = set(ops), list(ops)
    while waiting:
        op = waiting.pop()
        if op.type.startswith("Collective"):
            return True
        needed = {*(tensor.op for tensor in op.inputs), *op.control_inputs} - found
        found |= needed
        waiting += needed
    return False


def _is_from_elsewhere(error: tf.errors.OpError) -> bool:
    """Whether a step may have failed because it did on another host; else it was an op of this one."""
    if isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)):
        return True
    collective = str(getattr(error.op, "type", "")).startswith("Collective")
    return collective or any(words in str(error.message) for words in ("from peer", "[_Derived_]", "BufRendezvous"))


def _no_more_steps(error: tf.errors.OpError) -> str:
    ended = "with the end of its data" if isinstance(error, tf.errors.OutOfRangeError) else "with an error"
    return (
        f"this host's last step with the other hosts ended {ended} ({_in_a_line(error)}), and after that this session"
        " cannot make another: they might still be in that one, and take this for it. Let the data repeat"
        " (dataset.repeat()) and count the steps, as many on every host; or open a session for each epoch. What needs"
        " no other host may still be run"
    )


def _in_a_line(error: tf.errors.OpError) -> str:
    """What kind of error it is, and what happened."""
    first = error.__context__  # before TensorFlow added where the op was built
    text = str((first if isinstance(first, tf.errors.OpError) else error).message)
    told = [line.strip() for line in text.splitlines() if not line.startswith("From /job:")]
    told = [line for line in told if line and not line.endswith("root error(s) found.")]
    return f"{type(error).__name__}: {re.sub('^[(]0[)] [A-Z_]+: ', '', told[0]) if told else 'no message'}"


class _Meeting:
    """One session's beginning and end, on all hosts."""

    def __init__(self, cluster: Cluster, watch: Watch, number: int, board: Board):
        self._cluster, self._watch, self._number, self._board = cluster, watch, number, board
        self._others = [task for task in range(cluster.size) if task != cluster.task]
        self._met: Set[int] = set()  # hosts that have answered once
        self._left = False
        self.steps = 0  # with the other hosts, that this one has begun; broadcasts are some too
        self.patience = cluster.timeout / 4  # seconds to wait for others' words after an error

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Wait for all hosts; return if their facts are the same as these."""
        cluster, mine = self._cluster, json.loads(json.dumps(facts))
        waiting, end = list(self._others), time.monotonic() + cluster.start_timeout
        while not self._board.write(cluster.task, self._topic("facts"), json.dumps(facts)):
            if time.monotonic() > end:
                raise ClusterError(
                    f"this host's own server ({cluster.hosts[cluster.task]}) does not answer; start the process again"
                )
            time.sleep(_POLL)
        while waiting:
            away = self._away(waiting)
            for task in [task for task in waiting if task not in away]:
                text = self._watch.call(functools.partial(self._board.read, task, self._topic("facts")), [task])
                if text is not None:
                    waiting.remove(task)
                    self._compare(task, mine, json.loads(text))
            told = self._said(self._topic("refused"))
            if told:
                self._refuse(told, self._met)
            if waiting and time.monotonic() > end:
                named = [f"host {t} ({cluster.hosts[t]}) {away.get(t, 'has not built its graph')}" for t in waiting]
                self._leave(self.patience, self._met)
                raise ClusterError(
                    f"after {cluster.start_timeout:g} s not all hosts are there: {'; '.join(named)}. Start it, or"
                    " correct the list of hosts on every host"
                )
            time.sleep(_POLL if waiting else 0)

    def _compare(self, task: int, mine: Dict[str, Any], theirs: Dict[str, Any]) -> None:
        own = self._cluster.task
        if list(differences({**mine, "task": task}, theirs)):
            # it may wait at another address for this host, and never find out by itself
            self._board.write(task, self._topic("refused"), self._difference(own, theirs, mine))
            # those who are late would wait for a host that is gone; if lists differ, nobody may ever be there
            late = self._others if mine["hosts"] == theirs["hosts"] else self._met
            self._refuse(self._difference(task, mine, theirs), late)

    def _difference(self, task: int, mine: Dict[str, Any], theirs: Dict[str, Any]) -> str:
        """What the host that ``mine`` is of has to say about host ``task``."""
        found = list(differences({**mine, "task": theirs["task"]}, theirs))
        if theirs["task"] != task:
            found.insert(0, f"it takes itself for host {theirs['task']}")
        more = [f"and {len(found) - _LISTED} more"] * (len(found) > _LISTED)
        return (
            f"host {task} ({self._cluster.hosts[task]}) differs from this host ({mine['task']}):"
            f" {'; '.join(found[:_LISTED] + more)}. All hosts must run the same program with the same settings"
        )

    def _refuse(self, words: str, hosts: Iterable[int]) -> None:
        self._leave(self._cluster.timeout, hosts)
        raise ClusterError(words)

    def tell(self, words: str) -> None:
        """Say to all others, for their :meth:`told`, why this host's step has failed."""
        own, away = self._cluster.task, self._away(self._others)
        for task in [task for task in self._others if task not in away]:
            self._board.write(task, self._topic("failed"), f"host {own} ({self._cluster.hosts[own]}) {words}")

    def told(self, also_same: bool = False) -> str:
        """What another host has said for which this one's run cannot end; nothing if there is nothing.

        A host that has left in the same run may have been at the end of its data, as this one may be soon; with
        ``also_same``, when this one's run has failed, that is told too.
        """
        words = self._said(self._topic("failed"))
        for task in self._others:
            address, own = self._cluster.hosts[task], self.steps
            left = self._said(self._topic(f"left by {address}"))
            if not words and left is not None and int(left) < own + also_same:
                when, where = ("in", "still in it") if int(left) == own else ("after", f"in run {own}")
                words = (
                    f"host {task} ({address}) has left its session {when} run {left} with the other hosts (broadcasts"
                    f" count too), and this host is {where}: all must make the same steps, as many"
                )
        return f"{words}. {START_AGAIN}" if words else ""

    def leave_after_error(self) -> None:
        """Say that this host needs the others no more; wait a moment for those that are not lost to say so too."""
        self._leave(self.patience)

    def leave_at_end(self) -> None:
        """The same, with the patience that a host which saves or evaluates at the end asks for."""
        self._leave(self._cluster.stall_timeout)

    def _leave(self, seconds: float, hosts: Optional[Iterable[int]] = None) -> None:
        """Tell ``hosts`` that this one leaves, and wait until they all have said so too, or have come and gone.

        They may still look at this process until then: one that ends early would be taken for the cause of what others
        are about to find.
        """
        if self._left:
            return
        self._left = True
        waiting = [task for task in self._others if task not in self._watch.lost] if hosts is None else list(hosts)
        # by address: where lists differ, numbers do too
        left = [self._topic(f"left by {address}") for address in self._cluster.hosts]
        untold, end = set(waiting), time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            away = self._away(waiting)
            for task in untold - set(away):
                if self._board.write(task, left[self._cluster.task], str(self.steps)):
                    self._board.close(task)
                    untold.remove(task)
            settled = {task for task in waiting if task not in untold - set(away) and self._said(left[task])}
            waiting = [task for task in waiting if task not in settled and not (task in away and task in self._met)]
            time.sleep(_POLL if waiting else 0)

    def close(self) -> None:
        """Close what is open on this host's server. Another host may be gone, and closing would wait for it."""
        self._board.close(self._cluster.task)

    def _said(self, topic: str) -> Optional[str]:
        """What another host has written here."""
        return self._board.read(self._cluster.task, topic)

    def _away(self, hosts: Sequence[int]) -> Dict[int, str]:
        found = self._watch.faults(hosts)
        self._met.update(set(hosts) - set(found))
        return found

    def _topic(self, name: str) -> str:
        return f"{name}/{self._number}"


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """What two nested mappings do not have in common, in words."""
    for key in [*mine, *(key for key in theirs if key not in mine)]:
        place = f"{path}, {key}" if path else str(key)
        if key not in mine or key not in theirs:
            value = mine.get(key, theirs.get(key))
            yield f"{place}: only {'there' if key in theirs else 'here'}" + f" ({value})" * isinstance(value, str)
        elif isinstance(mine[key], dict) and isinstance(theirs[key], dict):
            yield from differences(mine[key], theirs[key], place)
        elif mine[key] != theirs[key]:
            yield f"{place}: {theirs[key]} there, {mine[key]} here"
