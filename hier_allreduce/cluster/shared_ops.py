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

from ..compat import tf1
from ..errors import ClusterError
from ..graphs import memory_of
from .collectives import (
    FIRST_IN_GRAPHS,
    NCCL,
    ON_ROOTS,
    add_up,
    crossing_dtype,
    gather,
    highest_number,
    send,
)
from .environment import Job

# A tensor has so many dimensions at most: TensorShape::MaxDimensions() in TensorFlow.
_MOST_DIMENSIONS = 254


class SharedOps:
    """What the graph of one host has in common with those of the others."""

    def __init__(self, job: Job, devices_per_host: int, communication: str):
        self.size = len(job.hosts)  # H
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
                several hosts, and no graph for a session, or a dtype that cannot cross.
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
        lines = []
        for variable, (gradient, dtype, shape) in enumerate(gradients):
            described = "None"
            if dtype:
                crossing_dtype(dtype, f"variable {variable} ({gradient!r})")
                described = _dtype_and_shape(dtype, shape)
            lines.append(f"gradient {variable}: {gradient}: {described}")
        lines.append(f"communication: {self._communication}")
        lines += [f"{key}: {setting}" for key, setting in settings.items()]
        self._note(f"all-reduce ({name})", lines)
        self._last_over_nccl = {}

    def all_reduce(self, tensor: Any, root: int, name: str) -> Any:
        """Return the sum of the tensors that all hosts give in this place of their programs.

        It is called under the device of tower ``root``, after :meth:`announce`. NCCL matches calls
        by their order. So the calls of one all-reduce with the same root run one after another, in
        the order in which they were built.
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
            wide = tf.cast(here, crossing_dtype(tensor.dtype.name, name))
            with tf1.control_dependencies(before):
                instance = self._next_instance()
                total = add_up(wide, self._job, ON_ROOTS + root, instance, self._communication)
            if self._communication == NCCL:
                self._last_over_nccl[root] = total.op
            total.set_shape(tensor.shape)
            return tf.cast(total, tensor.dtype)

    def broadcast(self, variables: Sequence[Any]) -> Any:
        """Return the op of :meth:`.Cluster.broadcast`; raises its errors."""
        if self.size == 1:
            return tf.no_op()
        _check_graph()
        # Variables are sent in the order of their names, because hosts may list them in any.
        ordered = sorted(variables, key=lambda variable: str(variable.op.name))
        lines = []
        for variable in ordered:
            dtype = variable.dtype.base_dtype.name
            described = _dtype_and_shape(dtype, variable.shape)
            lines.append(f"variables: {variable.op.name}: {described}")
            crossing_dtype(dtype, f"variable {variable.op.name!r}")
            if not variable.shape.is_fully_defined():
                raise ClusterError(f"variable {variable.op.name!r}: no known shape; leave it out")
        self._note("broadcast", lines)
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

    def _note(self, operation: str, lines: Sequence[str]) -> None:
        """Note in the graph what is about to be built, in lines that all hosts must have."""
        graph = tf1.get_default_graph()
        # New numbers come after those in the graph, because an imported graph has collectives of an
        # earlier process, and TensorFlow would join equal numbers.
        self._built = max(self._built, highest_number(graph) - FIRST_IN_GRAPHS + 1)
        number = f"collective {self._built}, {operation}"
        memory_of(graph).shared_lines += [f"{number}, {line}" for line in lines]


def _dtype_and_shape(dtype: str, shape: Any) -> str:
    """Return ``"float32 [5, 7]"`` or ``"float32 ?"``."""
    sizes = "?" if shape.ndims is None else shape.as_list()
    return f"{dtype} {sizes}"


def _check_graph() -> None:
    """Raise a ClusterError if there is no graph, or it is a function's."""
    if tf.executing_eagerly() or hasattr(tf1.get_default_graph(), "capture"):
        raise ClusterError(
            "several hosts need a graph and a session, and no function. TensorFlow 2 makes one of a"
            " tf.cond or loop: call tf.compat.v1.disable_control_flow_v2() before"
        )
