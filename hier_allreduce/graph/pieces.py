"""Cutting a tensor into pieces on one device, for every dtype that can be added up."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple, Union

import tensorflow as tf

from .compat import tf1
from .devices import all_on_cpu
from .gradients import dtype_of

# GPUs have no Split for int64. A bitcast moves nothing.
_CARRIED_AS = {"int64": "float64"}


class Constants(Dict[Tuple[int, ...], Any]):
    """The int32 vectors of a graph by their numbers. Each is made once, on the device where it is first needed."""

    def __missing__(self, numbers: Tuple[int, ...]) -> Any:
        self[numbers] = tf.constant(numbers, tf.int32, [len(numbers)])
        return self[numbers]


class Splitter:
    """Cuts tensors on one device. All the ops share the device's constants."""

    def __init__(self, device: Any):
        self._device, self._on_cpu = device, all_on_cpu([device])
        self.constants = Constants()

    def split(self, tensor: Any, sizes: Union[Sequence[int], Any], count: int, name: str = "split") -> List[Any]:
        """Return ``count`` pieces of a tensor along its first axis.

        Args:
            tensor: on this device.
            sizes: the sizes of the pieces: numbers, or an int32 tensor of them.
            count: how many there are.
            name: the name of the op.
        """
        if count == 1:
            return [tensor]
        dtype = dtype_of(tensor)
        through = dtype if self._on_cpu else _CARRIED_AS.get(dtype, dtype)
        with tf1.device(self._device):
            if isinstance(sizes, (list, tuple)):
                sizes = self.constants[tuple(int(size) for size in sizes)]
            whole = tensor if through == dtype else tf.bitcast(tensor, through)
            pieces = tf.split(whole, sizes, num=count, name=name)
            return list(pieces) if through == dtype else [tf.bitcast(piece, dtype) for piece in pieces]
