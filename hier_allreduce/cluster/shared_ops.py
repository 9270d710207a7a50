"""What the graphs of all hosts have in common: sums and broadcasts, numbered in one order.

::

    host 0   … announce ─► all_reduce, number 5 ─► all_reduce, number 6 …
                  │              │                      │           TensorFlow joins equal numbers
    host 1   … announce ─► all_reduce, number 5 ─► all_reduce, number 6 …
                  └─► lines in the graph, which hosts compare before the first step
"""

from __future__ import annotations

from typing import Any, Dict, Mapping, Sequence, Tuple

import tensorflow as tf

from ..compat import builds_for_session, in_current_graph, tf1
from ..errors import ClusterError, HierAllreduceError
from .collectives import (
    FIRST_IN_GRAPHS,
    NCCL,
    ON_ROOTS,
    add_up,
    can_cross,
    crossing_dtype,
    gather,
    send,
)
from .environment import Job

BUILT = "hier_allreduce/hosts"  # the collection of a graph with lines that all hosts must have
_MOST_DIMENSIONS = 254  # of a tensor: TensorShape::MaxDimensions() in TensorFlow


class SharedOps:
    """What the graph of one host has in common with those of the others.

    Args:
        job: the hosts, and the index of this one.
        devices_per_host: K.
        communication: between roots, ``"ring"`` or ``"nccl"``.

    Attributes:
        size: H, the number of hosts.
    """

    def __init__(self, job: Job, devices_per_host: int, communication: str):
        self.size = len(job.hosts)
        self._job = job
        self._devices_per_host = devices_per_host
        self._communication = communication
        self._built = 0  # collectives in users' graphs
        self._last_over_nccl: Dict[int, Any] = {}  # of the all-reduce that is being built, by root

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
        if towers != self._devices_per_host:
            raise ClusterError(
                f"{name} is for {towers} devices, and the cluster has {self._devices_per_host} on"
                " each host"
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
        lines.append(f"communication: {self._communication}")
        lines += [f"{key}: {value}" for key, value in facts.items()]
        self._note(f"all-reduce ({name})", lines)
        self._last_over_nccl = {}

    def announce_update(self, kind: str, options: Mapping[str, Any]) -> None:
        """Note an optimizer's class and the numbers that it was made with: hosts compare them."""
        if self.size > 1:
            lines = [f"optimizer: {kind}"]
            lines += [f"optimizer: {name}={value}" for name, value in options.items()]
            self._note("update", lines)

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
                total = add_up(wide, self._job, ON_ROOTS + root, number, self._communication)
            if self._communication == NCCL:
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
                rows = gather(row, self._job, self._next_number())  # H × _MOST_DIMENSIONS
                told = (
                    f"{name}: the shape of its gradient differs between the hosts; on this host it"
                    " is"
                )
                are_equal = tf.reduce_all(tf.equal(rows, rows[:1]))
                return tf.raw_ops.Assert(condition=are_equal, data=[told, shape])

    def broadcast(self, variables: Sequence[Any]) -> Any:
        """Return the op of :meth:`.Cluster.broadcast`; raises its errors."""
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
            tf1.add_to_collection(BUILT, f"collective {self._built}, {kind}, {line}")


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
