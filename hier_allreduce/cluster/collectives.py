"""TensorFlow's collectives: how a tensor gets from one host to the others."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.ops import collective_ops  # it has no public name

from ..graph import COLLECTED, CrossHostReduce, tf1

# Group and instance numbers are the server's, shared by all that use collectives in it: tensorpack counts from 42 and
# 100, tf.distribute from 1 and 100.
_BROADCASTS = 0x4840
_MAINS = 0x4841  # and one more for each tower that can be a main
_INSTANCES = 0x484100

_WIDER = {
    "bool": "int32",
    "int8": "int32",
    "uint8": "int32",
    "int16": "int32",
    "uint16": "int32",
    "float16": "float32",
    "bfloat16": "float32",
}


class Collectives(CrossHostReduce):
    """Chunks added up over the hosts' mains, and variables sent from the chief.

    Attributes:
        hosts: H, of which there are several.
        built: so many collectives there are, in all graphs. One meets another host's if as many were built before.
    """

    def __init__(self, hosts: int, is_chief: bool):
        self.hosts, self._is_chief = hosts, is_chief
        self.built = 0

    def all_reduce(self, tensor: Any, root: int, name: str) -> Any:
        if tensor.shape.num_elements() == 0:
            return tensor
        with tf1.name_scope(name):
            total = collective_ops.all_reduce(
                tf.cast(tensor, _wider(tensor.dtype)),
                self.hosts,
                _MAINS + root,
                self._instance(),
                "Add",
                "Id",
                communication_hint="ring",
            )
            total.set_shape(tensor.shape)
            return tf.cast(total, tensor.dtype)

    def broadcast(self, variable: Any) -> Any:
        """An op that gives a variable the chief's value."""
        dtype = variable.dtype.base_dtype
        wide = _wider(dtype)
        how = (self.hosts, _BROADCASTS, self._instance())
        if self._is_chief:
            value = tf.cast(tf.identity(variable), wide)
            return collective_ops.broadcast_send(value, value.shape, wide, *how, communication_hint="ring").op
        value = collective_ops.broadcast_recv(variable.shape, wide, *how, communication_hint="ring")
        return tf1.assign(variable, tf.cast(value, dtype)).op

    def _instance(self) -> int:
        """A number for one more collective."""
        self.built += 1
        return _INSTANCES + self.built - 1


def can_cross(dtype: Any) -> bool:
    """Whether tensors of a dtype can be added up over hosts."""
    return _wider(dtype).name in COLLECTED


def _wider(dtype: Any) -> Any:
    """The dtype in which a dtype crosses: itself, if collectives add it up."""
    name = dtype.base_dtype.name
    return tf.as_dtype(name if name in COLLECTED else _WIDER.get(name, name))
