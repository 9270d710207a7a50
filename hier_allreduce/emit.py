"""Plan + tensors → TensorFlow ops. The reading of a plan in which a value is a tensor on a device."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, List, Sequence, Tuple

import tensorflow as tf

from .compat import forget_colocation, tf1
from .plan import Copy, Ops, Plan, Reduce, run


@dataclass(frozen=True)
class Emitted:
    """What one call added to a graph: its name scope, its plan, and the device of each tower. ``audit`` reads it."""

    scope: str
    plan: Plan
    devices: Tuple[Any, ...]
    names: Tuple[str, ...]


_emitted: weakref.WeakKeyDictionary[Any, List[Emitted]] = weakref.WeakKeyDictionary()


def emitted_in(graph: Any) -> List[Emitted]:
    """The all-reduces built in ``graph``, in building order."""
    return list(_emitted.get(graph, ()))


class DenseOps(Ops[Any]):
    """Tensors under ``tf.device``: ``add_n`` on the receiving device, ``identity`` for a copy."""

    def __init__(self, devices: Sequence[Any], average: bool):
        self._devices = devices
        self._average = average

    def reduce(self, step: Reduce, own: Any, others: List[Any]) -> Any:
        with tf.device(self._devices[step.dst]):
            return tf.add_n([own, *others], name="sum")

    def finish(self, chunk: int, root: int, total: Any) -> Any:
        # Once, here: a multiply on every device would be folded into different consumers on different
        # towers, and the replicas would differ in their last bits.
        with tf.device(self._devices[root]):
            return tf.divide(total, len(self._devices), name="mean") if self._average else tf.identity(total)

    def copy(self, step: Copy, value: Any) -> Any:
        with tf.device(self._devices[step.dst]):
            return tf.identity(value, name="copy")


def emit(
    plan: Plan, tensors: Sequence[Sequence[Any]], devices: Sequence[Any], average: bool, name: str, names: Sequence[str]
) -> List[List[Any]]:
    """Add the plan's ops to the default graph (or run them, eagerly).

    Args:
        plan: a verified plan of K devices and C chunks.
        tensors: ``tensors[tower][chunk]``, K×C.
        devices: K device strings, one for each tower.
        average: divide each sum by K on the chunk's root, before it is copied.
        name: the name scope of all ops.
        names: what the C chunks are called in op names.

    Returns:
        K×C tensors, entry (k, c) on ``devices[k]``.
    """
    with forget_colocation(), tf1.name_scope(name) as scope:
        result = run(plan, tensors, DenseOps(devices, average))
    if not tf.executing_eagerly():
        record = Emitted(scope, plan, tuple(devices), tuple(names))
        _emitted.setdefault(tf1.get_default_graph(), []).append(record)
    return result
