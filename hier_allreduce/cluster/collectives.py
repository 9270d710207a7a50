"""TensorFlow's collectives: how a tensor gets from one host to the others.

::

    all_reduce   cast ─► CollectiveReduce (ring over the hosts) ─► cast       one for each chunk, on its main
    broadcast    chief: CollectiveBcastSend ─► others: CollectiveBcastRecv ─► assign
    meeting      CollectiveReduce of one number: it ends when all hosts have come to it

float16, bfloat16 and small integers are cast to a dtype that the collectives can add up, where they cannot add their
own.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.ops import collective_ops  # it has no public name

from ..errors import ClusterError
from ..graph import COLLECTIVE_DTYPES, CrossHostReduce, tf1

# Group and instance numbers belong to the server, and everything that uses its collectives shares them: tensorpack
# counts from 42 and 100, tf.distribute from 1 and 100.
_BROADCASTS = 0x4840
_MAINS = 0x4841  # and one more for each tower that can be a main
_INSTANCES = 0x484100
_MEETING = _INSTANCES - 1
_MOST_DIMENSIONS = 254  # of a tensor: TensorShape::MaxDimensions() in TensorFlow
_NO_GRADIENT = "HierAllreduceOverHosts"  # TensorFlow's name for the function that refuses one

_WIDER = {
    "bool": "int32",
    "int8": "int32",
    "uint8": "int32",
    "int16": "int32",
    "uint16": "int32",
    "float16": "float32",
    "bfloat16": "float32",
}


@tf.RegisterGradient(_NO_GRADIENT)
def _refuse_gradient(op: Any, grad: Any) -> Any:
    """Raise an error that says more than TensorFlow's, which has no gradient for collectives.

    Raises:
        ClusterError: always.
    """
    raise ClusterError(
        f"{op.name!r}: the result of an all-reduce over several hosts has no gradient. Take gradients of what each"
        " tower computes before it, or put tf.stop_gradient around the result"
    )


class Collectives(CrossHostReduce):
    """Sums of chunks over the mains of all hosts, and broadcasts of variables from the chief.

    Attributes:
        hosts: H, 2 or more.
        built: number of collectives built so far, in all graphs. A collective meets the one with the same number on
            the other hosts.
    """

    def __init__(self, hosts: int, task: int):
        self.hosts, self._task = hosts, task
        self.built = 0

    def all_reduce(self, tensor: Any, root: int, name: str) -> Any:
        """Return the sum of all hosts' tensors, by a ring over the hosts."""
        if tensor.shape.num_elements() == 0:
            return tensor
        checks = [] if tensor.shape.is_fully_defined() else [self._equal_shapes(tensor, name.rpartition("/")[0])]
        overridden = tf1.get_default_graph().gradient_override_map({"CollectiveReduce": _NO_GRADIENT})
        with tf1.name_scope(name), tf1.control_dependencies(checks), overridden:
            here = tensor if tensor.device else tf.identity(tensor)  # TensorFlow 1 needs to know the device
            total = self._ring(tf.cast(here, _collective_dtype(tensor.dtype)), _MAINS + root, self._next_instance())
            total.set_shape(tensor.shape)
            return tf.cast(total, tensor.dtype)

    def _equal_shapes(self, tensor: Any, name: str) -> Any:
        """Return an op that fails on every host if the hosts' tensors differ in shape: the ring compares only sizes."""
        with tf1.name_scope("shapes_across"):  # not in the chunk's scope, where the audit counts what crosses
            shape = tf.shape(tensor)
            with tf1.device("/cpu:0"):
                # a row for each host, of which this one fills its own; no size becomes 0
                margins = [[self._task, self.hosts - self._task - 1], [0, _MOST_DIMENSIONS - tf.size(shape)]]
                rows = self._ring(tf.pad([shape + 1], margins), _BROADCASTS, self._next_instance())
                told = f"{name}: the shape of its gradient differs between the hosts; on this host it is"
                return tf.raw_ops.Assert(condition=tf.reduce_all(tf.equal(rows, rows[:1])), data=[told, shape])

    def broadcast(self, variable: Any) -> Any:
        """Return an op that gives a variable the chief's value."""
        dtype = variable.dtype.base_dtype
        wide = _collective_dtype(dtype)
        group = (self.hosts, _BROADCASTS, self._next_instance())
        if self._task == 0:
            value = tf.cast(tf.identity(variable), wide)
            return collective_ops.broadcast_send(value, value.shape, wide, *group, communication_hint="ring").op
        value = collective_ops.broadcast_recv(variable.shape, wide, *group, communication_hint="ring")
        return tf1.assign(variable, tf.cast(value, dtype)).op

    def meeting(self) -> Any:
        """Return an op that no host ends before all have begun it."""
        with tf1.device("/cpu:0"):
            return self._ring(tf.zeros([1]), _BROADCASTS, _MEETING).op

    def _ring(self, tensor: Any, group: int, instance: int) -> Any:
        return collective_ops.all_reduce(tensor, self.hosts, group, instance, "Add", "Id", communication_hint="ring")

    def _next_instance(self) -> int:
        self.built += 1
        return _INSTANCES + self.built - 1


def can_cross(dtype: Any) -> bool:
    """Whether tensors of a dtype can be added up across hosts."""
    return _collective_dtype(dtype).name in COLLECTIVE_DTYPES


def _collective_dtype(dtype: Any) -> Any:
    """Return the dtype in which a tensor crosses: its own if collectives can add that, else a wider one."""
    name = dtype.base_dtype.name
    return tf.as_dtype(name if name in COLLECTIVE_DTYPES else _WIDER.get(name, name))
