"""What the graphs of all hosts have in common: sums and broadcasts, numbered in one order.

::

    host 0   … announce ─► all_reduce, number 5 ─► all_reduce, number 6 …
                  │              │                      │           TensorFlow joins equal numbers
    host 1   … announce ─► all_reduce, number 5 ─► all_reduce, number 6 …
                  └─► lines in the graph, which hosts compare before the first step
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence, Tuple

import tensorflow as tf

from ..compat import is_of_function, tf1
from ..errors import ClusterError
from ..graphs import memory_of
from .collectives import (
    FIRST_IN_GRAPHS,
    ON_ROOTS,
    TYPES,
    add_up,
    crossing_dtype,
    send,
)
from .environment import Job


class SharedOps:
    """What the graph of one host has in common with those of the others."""

    def __init__(self, job: Job):
        self._job = job
        self._last = FIRST_IN_GRAPHS - 1  # the number of the last collective in users' graphs

    def announce(
        self,
        name: str,
        gradients: Sequence[Tuple[str, str, Any]],
        settings: Mapping[str, Any],
    ) -> None:
        """Check an all-reduce before its first op is added, and note it: hosts compare their notes.

        Args:
            name: the name of the all-reduce.
            gradients: name, dtype and shape of N gradients; a dtype is empty if there is none.
            settings: what else must be equal on all hosts.

        Raises:
            ClusterError: there are several hosts, and no graph for a session, or a gradient that
                cannot cross.
        """
        if self._job.size == 1:
            return
        # All checks come before the first note, so that an error leaves the graph unchanged.
        _check_graph()
        lines = []
        for n, (gradient, dtype, shape) in enumerate(gradients):
            what = f"gradient {n}: {gradient}"
            lines.append(_described(what, dtype, shape) if dtype else f"{what}: None")
        lines += [f"{key}: {setting}" for key, setting in settings.items()]
        self._note(f"all-reduce ({name})", lines)

    def all_reduce(self, tensor: Any, root: int, name: str) -> Any:
        """Return the sum of the tensors that all hosts give in this place of their programs.

        It is called under the device of tower ``root``, after :meth:`announce`.
        """
        if self._job.size == 1 or tensor.shape.num_elements() == 0:
            return tensor
        with tf1.name_scope(name):
            # TensorFlow 1 needs to know the device.
            here = tf.identity(tensor)
            wide = tf.cast(here, crossing_dtype(tensor.dtype.name, name))
            total = add_up(wide, self._job, ON_ROOTS + root, self._next_instance())
            return tf.cast(total, tensor.dtype)

    def broadcast(self, variables: Sequence[Any]) -> Any:
        """Return the op of :meth:`.Cluster.broadcast`; raises its errors."""
        if self._job.size == 1:
            return tf.no_op()
        _check_graph()
        # Variables are sent in the order of their names, because hosts may list them in any.
        ordered = sorted(variables, key=lambda variable: str(variable.op.name))
        lines = []
        for variable in ordered:
            dtype = variable.dtype.base_dtype.name
            lines.append(_described(f"variable {variable.op.name}", dtype, variable.shape))
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
        self._last += 1
        return self._last

    def _note(self, operation: str, lines: Sequence[str]) -> None:
        """Note in the graph what is about to be built, in lines that all hosts must have."""
        graph = tf1.get_default_graph()
        # New numbers come after those in the graph, because an imported graph has collectives of an
        # earlier process, and TensorFlow would join equal numbers.
        for op in graph.get_operations():
            if op.type in TYPES:
                self._last = max(self._last, op.get_attr("instance_key"))
        number = f"after collective {self._last}, {operation}"
        memory_of(graph).shared_lines += [f"{number}, {line}" for line in lines]


def _described(what: str, dtype: str, shape: Any) -> str:
    """Return ``"WHAT: float32 [5, 7]"``.

    Raises:
        ClusterError: it cannot cross; it begins with ``what`` it is.
    """
    crossing_dtype(dtype, what)
    # Collectives compare sizes only, and would add up a 2×3 and a 3×2 gradient.
    if not shape.is_fully_defined():
        raise ClusterError(f"{what}: no known shape; leave it out, or give it one by set_shape()")
    return f"{what}: {dtype} {shape.as_list()}"


def _check_graph() -> None:
    """Raise a ClusterError if there is no graph, or it is a function's."""
    if tf.executing_eagerly() or is_of_function(tf1.get_default_graph()):
        raise ClusterError(
            "several hosts need a graph and a session, and no function. TensorFlow 2 makes one of a"
            " tf.cond or loop: call tf.compat.v1.disable_control_flow_v2() before"
        )
