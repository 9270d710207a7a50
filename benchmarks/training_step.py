"""The graph of a training step on emulated GPUs, around any all-reduce.

::

    forward ─► kernel of the last layer ─► … ─► kernel of the first layer      on each of K GPUs
                      │ gradient                     │ gradient
                      └────────── all-reduce, K×N ───┘ ─► ResourceApplyGradientDescent

A kernel computes nothing and takes as long as its name says. Its launch keeps the host busy.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence

import tensorflow as tf
from baselines import Build, Matrix
from shapes import GradientShape

tf1 = tf.compat.v1
raw = tf.raw_ops

FORWARD_KERNELS = 60
BYTES_PER_MS = 1.7e6  # of gradients in a backward pass: ResNet-50's on a V100 takes about 60 ms


class Pass(NamedTuple):
    """The computation of a training step: shapes of N gradients, and the backward pass in ms."""

    shapes: Sequence[GradientShape]
    backward_ms: float

    @property
    def kernels(self) -> int:
        """The kernels of the forward and the backward pass on one GPU."""
        return FORWARD_KERNELS + len(self.shapes)

    @property
    def kernels_ms(self) -> float:
        """The time of these kernels; the forward pass takes half of the backward pass."""
        return 1.5 * self.backward_ms


def usual_pass(shapes: Sequence[GradientShape]) -> Pass:
    """Return a pass whose backward half takes a second for 1.7 GB of gradients."""
    return Pass(shapes, sum(shape.bytes for shape in shapes) / BYTES_PER_MS)


class TrainingStep(NamedTuple):
    """A graph, the op that runs a step, and the op that fills the variables."""

    graph: Any
    step: Any
    fill: Any


def training_step(
    work: Pass, devices: List[str], reduce: Optional[Build], average: bool
) -> TrainingStep:
    """Return the step with an all-reduce, or without one if ``reduce`` is None."""
    fills: List[Any] = []
    with tf.Graph().as_default() as graph:
        rows: Matrix = [_tower(work, tower, device, fills) for tower, device in enumerate(devices)]
        if reduce is not None:
            rows = reduce(rows, devices, average)
        updates = []
        for tower, (device, row) in enumerate(zip(devices, rows)):
            with tf.device(device):
                updates += [_update(tower, n, grad, fills) for n, grad in enumerate(row)]
        return TrainingStep(graph, tf.group(*updates), tf.group(*fills))


def _tower(work: Pass, tower: int, device: str, fills: List[Any]) -> List[Any]:
    """Return the N gradients of a tower; the last one is ready first."""
    grads: List[Any] = []
    total = sum(shape.bytes for shape in work.shapes)
    even = 500 * work.backward_ms / len(work.shapes)  # µs: half of the pass evenly, half by bytes
    with tf.device(device), tf.name_scope(f"tower{tower}"):
        # a chain begins at variables, since Grappler computes what it knows beforehand
        value, one = _scalar(f"value{tower}", fills), _scalar(f"one{tower}", fills)
        for number in range(FORWARD_KERNELS):
            value = _kernel(
                value, one, f"forward{number}", 500 * work.backward_ms / FORWARD_KERNELS
            )
        for number, shape in reversed(list(enumerate(work.shapes))):
            by_bytes = 500 * work.backward_ms * shape.bytes / total
            value = _kernel(value, one, f"backward{number}", even + by_bytes)
            grads.append(tf.fill(shape.shape, value, name=f"grad{number}_burn_1"))
    return grads[::-1]


def _kernel(value: Any, one: Any, name: str, microseconds: float) -> Any:
    return tf.maximum(value, one, name=f"{name}_burn_{microseconds:.1f}")


def _scalar(name: str, fills: List[Any]) -> Any:
    handle = raw.VarHandleOp(dtype=tf.float32, shape=[], shared_name=name)
    fills.append(raw.AssignVariableOp(resource=handle, value=1.0))
    value = raw.ReadVariableOp(resource=handle, dtype=tf.float32)
    value.set_shape([])
    return value


def _update(tower: int, number: int, grad: Any, fills: List[Any]) -> Any:
    name = f"variable{number}_of_tower{tower}"
    handle = raw.VarHandleOp(dtype=tf.float32, shape=grad.shape, shared_name=name)
    value = raw.Empty(shape=grad.shape.as_list(), dtype=tf.float32)
    fills.append(raw.AssignVariableOp(resource=handle, value=value))
    return raw.ResourceApplyGradientDescent(var=handle, alpha=0.1, delta=grad)


def chains(devices: List[str], length: int) -> TrainingStep:
    """Return a step of a chain of ``length`` kernels without time on each device."""
    fills: List[Any] = []
    ends = []
    with tf.Graph().as_default() as graph:
        for tower, device in enumerate(devices):
            with tf.device(device):
                value, one = _scalar(f"value{tower}", fills), _scalar(f"one{tower}", fills)
                for number in range(length):
                    value = tf.minimum(value, one, name=f"chain{number}_burn_0")
                ends.append(_update(tower, 0, value, fills))  # else Grappler would drop the chain
        return TrainingStep(graph, tf.group(*ends), tf.group(*fills))
