"""What the graphs of all hosts have in common: sums and broadcasts, numbered in one order.

::

    host 0   … announce ─► all_reduce, number 5 ─► all_reduce, number 6 …
                  │              │                      │           TensorFlow joins equal numbers
    host 1   … announce ─► all_reduce, number 5 ─► all_reduce, number 6 …
                  └─► lines in the graph, which hosts compare before the first step
"""

from __future__ import annotations

from collections import abc
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import tensorflow as tf

from ..compat import builds_for_session, in_current_graph, tf1
from ..errors import ClusterError, HierAllreduceError
from ..graphs import memory_of
from .collectives import (
    FIRST_IN_GRAPHS,
    NCCL,
    ON_ROOTS,
    add_up,
    can_cross,
    crossing_dtype,
    gather,
    highest_number,
    send,
)
from .environment import Job

# A tensor has so many dimensions at most: TensorShape::MaxDimensions() in TensorFlow.
_MOST_DIMENSIONS = 254


def noted_in(graph: Any) -> List[str]:
    """Return the lines about the collectives built in a graph, which all hosts must have."""
    return list(memory_of(graph).shared_lines)


class SharedOps:
    """What the graph of one host has in common with those of the others.

    Args:
        job: the hosts, and the index of this one.
        devices_per_host: K.
        communication: the engine between roots, ``"ring"`` or ``"nccl"``.

    Attributes:
        size: H, the number of hosts.
    """

    def __init__(self, job: Job, devices_per_host: int, communication: str):
        self.size = len(job.hosts)
        self._job = job
        self._devices_per_host = devices_per_host
        self._communication = communication
        self._built = 0  # collectives in users' graphs
        # The last call of each root in the all-reduce that is being built.
        self._last_over_nccl: Dict[int, Any] = {}

    def announce(
        self,
        name: str,
        towers: int,
        gradients: Sequence[Tuple[str, str, Any]],
        settings: Mapping[str, Any],
    ) -> None:
        """Check an all-reduce before its first op is added, and note it: hosts compare their notes.

        Args:
            name: the name of the all-reduce in errors.
            towers: K of this host.
            gradients: name, dtype and shape of N gradients; a dtype is empty if there is none.
            settings: what else must be equal on all hosts.

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
        # All checks come before the first note, so that an error leaves the graph unchanged.
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
        lines += [f"{key}: {setting}" for key, setting in settings.items()]
        self.note(f"all-reduce ({name})", lines)
        self._last_over_nccl = {}

    def all_reduce(self, tensor: Any, root: int, name: str) -> Any:
        """Return the sum of the tensors that all hosts give in this place of their programs.

        It is called under the device of tower ``root``, after :meth:`announce`. NCCL matches calls
        by their order. So the calls of one all-reduce with the same root run one after another, in
        the order in which they were built.

        Args:
            tensor: a tensor of one shape and dtype on all hosts.
            root: the tower.
            name: the name scope of the ops.
        """
        if self.size == 1 or tensor.shape.num_elements() == 0:
            return tensor
        before = []
        # Engines compare only sizes. So shapes that are not known are compared by an op that fails
        # on every host if they differ. It is not in the chunk's scope, where the audit counts the
        # sums over hosts.
        if not tensor.shape.is_fully_defined():
            with tf1.name_scope("shapes_across"):
                shape = tf.shape(tensor)
                with tf1.device("/cpu:0"):
                    missing = _MOST_DIMENSIONS - tf.size(shape)
                    sizes = tf.pad(shape + 1, [[0, missing]])  # no size becomes 0
                    shapes = gather(sizes, self._job, self._next_instance())  # H lines
                    told = (
                        f"{name.rpartition('/')[0]}: the shape of its gradient differs between the"
                        " hosts; on this host it is"
                    )
                    are_equal = tf.reduce_all(tf.equal(shapes, shapes[:1]))
                    before.append(tf.raw_ops.Assert(condition=are_equal, data=[told, shape]))
        if root in self._last_over_nccl:
            before.append(self._last_over_nccl[root])
        with tf1.name_scope(name):
            # TensorFlow 1 needs to know the device.
            here = tensor if tensor.device else tf.identity(tensor)
            wide = tf.cast(here, crossing_dtype(tensor.dtype.name))
            with tf1.control_dependencies(before):
                instance = self._next_instance()
                total = add_up(wide, self._job, ON_ROOTS + root, instance, self._communication)
            if self._communication == NCCL:
                self._last_over_nccl[root] = total.op
            total.set_shape(tensor.shape)
            return tf.cast(total, tensor.dtype)

    def broadcast(self, variables: Sequence[Any]) -> Any:
        """Return the op of :meth:`.Cluster.broadcast`; raises its errors."""
        # Looking for variables in a tensor or a variable would add ops.
        if tf.is_tensor(variables) or not isinstance(variables, abc.Iterable):
            raise ClusterError(
                f"broadcast needs a list of variables, and this is one {type(variables).__name__}"
            )
        if self.size == 1:
            return tf.no_op()
        _check_graph()
        variables = list(variables)
        line_by_name = {}
        for variable in variables:
            if not (in_current_graph(variable) and hasattr(variable, "assign")):
                raise ClusterError(
                    f"{variable!r} is not a variable of the graph being built, and cannot be sent"
                )
            dtype = str(variable.dtype.base_dtype.name)
            shape = variable.shape
            described = _dtype_and_shape(dtype, shape)
            line_by_name[str(variable.op.name)] = f"{variable.op.name}: {described}"
            if not can_cross(dtype) or not shape.is_fully_defined():
                raise ClusterError(
                    f"variable {variable.op.name!r} is {described}: only numbers of known shape can"
                    " be sent to other hosts; leave it out of the variables"
                )
        # Variables are sent in the order of their names, because hosts may list them in any.
        lines = [f"variables: {line_by_name[sent]}" for sent in sorted(line_by_name)]
        self.note("broadcast", lines)
        ordered = sorted(variables, key=lambda variable: str(variable.op.name))
        with tf1.name_scope("broadcast"):
            sent = [
                send(variable, self._job, self._next_instance())
                for variable in ordered
                if variable.shape.num_elements() != 0
            ]
            return tf.group(*sent)

    def _next_instance(self) -> int:
        """Return the number of a collective in a user's graph, the same on all hosts."""
        self._built += 1
        return FIRST_IN_GRAPHS + self._built - 1

    def note(self, operation: str, lines: Sequence[str]) -> None:
        """Note in the graph what is about to be built, in lines that all hosts must have."""
        graph = tf1.get_default_graph()
        # New numbers come after those in the graph, because an imported graph has collectives of an
        # earlier process, and TensorFlow would join equal numbers.
        self._built = max(self._built, highest_number(graph) - FIRST_IN_GRAPHS + 1)
        number = f"collective {self._built}, {operation}"
        memory_of(graph).shared_lines += [f"{number}, {line}" for line in lines]


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
