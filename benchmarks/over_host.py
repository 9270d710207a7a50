"""Copies over the host: between GPUs of one chip, links are slow then, as without peer access.

::

    GPU 0 ─► sum on GPU 1           becomes           GPU 0 ─► CPU device 1 ─► sum on GPU 1

TensorFlow copies to the host's memory, and from there. All GPUs share the bus to the host. Each
reading GPU has a CPU device of its own, because TensorFlow sends a tensor once to each device: so a
tensor that 7 GPUs read crosses the bus 7 times in each direction.
"""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Tuple

import tensorflow as tf
from real_devices import Devices

tf1 = tf.compat.v1
LOCAL = "/job:localhost/replica:0/task:0"


class Edges(NamedTuple):
    """What goes over the host in a step."""

    tensors: int
    bytes: int


def send_over_host(graph: Any, devices: Devices) -> Edges:
    """Let each float tensor that another device reads take the way over the host."""
    numbers = {_short(name): number for number, name in enumerate(devices.names)}
    stages = devices.stages()
    staged: Dict[Tuple[str, int], Any] = {}
    size = 0
    for op in graph.get_operations():
        reader = numbers.get(_short(op.device))
        for place, tensor in enumerate(op.inputs):
            sender = numbers.get(_short(tensor.op.device))
            if None in (reader, sender) or reader == sender or not tensor.dtype.is_floating:
                continue
            assert reader is not None
            if (tensor.name, reader) not in staged:
                staged[tensor.name, reader] = _stage(tensor, stages[reader])
                size += tensor.shape.num_elements() * tensor.dtype.size
            op._update_input(place, staged[tensor.name, reader])
    return Edges(len(staged), size)


def _stage(tensor: Any, device: str) -> Any:
    """Return the tensor on the host; Grappler would drop an identity."""
    with tensor.graph.as_default(), tf.device(device), tf.control_dependencies(None):
        return tf1.placeholder_with_default(tensor, tensor.shape, name="over_host")


def _short(device: str) -> str:
    return device.lower().replace(LOCAL, "").replace("device:", "")
