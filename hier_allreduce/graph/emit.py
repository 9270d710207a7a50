"""Plan + tensors → TensorFlow ops: the readings of a plan in which a value is a tensor on a device.

Three kinds of chunk are read differently by the one interpreter (``plan.run``): :class:`Dense` adds tensors,
:class:`Narrow` adds 16-bit tensors in float32, :class:`Gather` concatenates sparse rows.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from ..planning import Copy, Ops, Plan, Reduce, run
from .compat import forget_colocation, tf1
from .packing import Constants


@dataclass(frozen=True)
class Emitted:
    """What one call added to a graph; ``audit`` holds the executed graph against it.

    Every op of chunk c is named ``scope + names[c] + "/…"``. Of several ``hosts`` this is what one of them did.
    """

    scope: str
    plan: Plan
    devices: Tuple[Any, ...]
    names: Tuple[str, ...]
    hosts: int = 1


_emitted: weakref.WeakKeyDictionary[Any, List[Emitted]] = weakref.WeakKeyDictionary()


def emitted_in(graph: Any) -> List[Emitted]:
    """The all-reduces built in ``graph``, in building order."""
    return list(_emitted.get(graph, ()))


class CrossHostReduce:
    """What becomes of a host's complete sum before it is copied: here nothing, there being one host."""

    hosts = 1

    def all_reduce(self, tensor: Any, root: int, name: str) -> Any:
        """The sum of all hosts' tensors; called under the root's device."""
        return tensor


class DeviceReduction(Ops[Any]):
    """What all readings share: where each tower is, whether the mean is wanted, and what chunks are called."""

    def __init__(
        self, devices: Sequence[Any], average: bool, names: Sequence[str], across: Optional[CrossHostReduce] = None
    ):
        self.devices, self.average, self.names = devices, average, names
        self.across = across or CrossHostReduce()
        self.towers = len(devices) * self.across.hosts
        self._constants = [Constants() for _ in devices]
        self._unread: Dict[Tuple[int, str], Any] = {}

    def start(self, value: Any) -> Any:
        """A tower's tensor as the value that is reduced."""
        return value

    def end(self, value: Any, dtype: Any) -> Any:
        """A reduced value as a tensor of its first dtype; called on the tower's device."""
        return value

    def finish(self, chunk: int, root: int, total: Any) -> Any:
        if self.towers > 1:
            return self.mean(chunk, root, self.everywhere(chunk, root, total))
        with tf1.device(self.devices[root]):  # one tower: its gradient may live elsewhere
            return tf.identity(total, name=f"{self.names[chunk]}/copy")

    def copy(self, step: Copy, value: Any) -> Any:
        with tf1.device(self.devices[step.dst]):
            return tf.identity(value, name=f"{self.names[step.chunk]}/copy")

    def added(self, chunk: int, values: Sequence[Any], places: Sequence[int]) -> Any:
        """The sum of ``values``, each of which is on the tower in ``places``, on the first one's.

        Grappler's memory optimizer expands an ``add_n`` of more than two inputs, one of them made on its own device,
        into one pass over memory for each input, if it knows their shape and finds the device's memory short, as it
        does on logical CPU devices: twice the time. So the inputs are reshaped to columns of a length that it cannot
        know (a vector's length it would find), which copies nothing.
        """
        name, shape = f"{self.names[chunk]}/sum", values[0].shape
        known = all(value.shape.is_fully_defined() for value in values)
        if known and len(values) > 2 and not tf.executing_eagerly():
            columns = [self._as_column(chunk, value, tower) for value, tower in zip(values, places)]
            with tf1.device(self.devices[places[0]]):
                total = tf.add_n(columns, name=name)
                return tf.reshape(total, self._constants[places[0]][tuple(shape.as_list())], name=name)
        with tf1.device(self.devices[places[0]]):
            # add would broadcast what add_n refuses: shapes that turn out to differ when the step runs
            total = tf.add(*values, name=name) if known and len(values) == 2 else tf.add_n(values, name=name)
        total.set_shape(shape.merge_with(total.shape))
        return total

    def _as_column(self, chunk: int, value: Any, tower: int) -> Any:
        with tf1.device(self.devices[tower]):
            return tf.reshape(value, self._hidden(tower, [-1, 1], "column"), name=f"{self.names[chunk]}/column")

    def _hidden(self, tower: int, numbers: Any, name: str) -> Any:
        """A constant that Grappler cannot read: it becomes one when the graph has been cut into devices.

        Called on the tower's device.
        """
        if (tower, name) not in self._unread:
            known = tf.constant(numbers, tf.int32)
            hidden = known if tf.executing_eagerly() else tf1.placeholder_with_default(known, known.shape, name)
            self._unread[tower, name] = hidden
        return self._unread[tower, name]

    def mean(self, chunk: int, root: int, total: Any) -> Any:
        """``total`` / the towers of all hosts, on the root: once, before the copies.

        A multiply on every tower would be folded into different consumers on different towers, and the
        replicas would differ in their last bits.
        """
        if not self.average:
            return total
        with tf1.device(self.devices[root]):
            return tf.multiply(total, 1.0 / self.towers, name=f"{self.names[chunk]}/mean")

    def everywhere(self, chunk: int, root: int, total: Any) -> Any:
        """``total`` of all hosts."""
        with tf1.device(self.devices[root]):
            return self.across.all_reduce(total, root, f"{self.names[chunk]}/across")


class Dense(DeviceReduction):
    """Adds tensors of one dtype."""

    def reduce(self, step: Reduce, own: Any, others: List[Any]) -> Any:
        return self.added(step.chunk, [own, *others], (step.dst, *step.srcs))


class _Part(NamedTuple):
    """A sum, or running mean, of so many towers."""

    value: Any
    towers: int


class Narrow(DeviceReduction):
    """Adds tensors that travel in 16 bits: each addition is done in float32, each transfer rounds once.

    A mean is carried as the running mean of the contributions so far, so that it overflows nowhere if the inputs do
    not. With h hops on the longest way to the root and u = 2^-11 (float16) or 2^-7 (bfloat16, which TensorFlow
    1.15 truncates), a sum is off by at most (h + 1)·u·Σ|xᵢ|, a mean by that over K, besides float32's own rounding
    and, for float16, 2^-24 a hop where values are below its normal range.
    """

    def __init__(
        self,
        devices: Sequence[Any],
        average: bool,
        names: Sequence[str],
        wire: Any,
        across: Optional[CrossHostReduce] = None,
    ):
        super().__init__(devices, average, names, across)
        self._wire = wire

    def start(self, value: Any) -> Any:
        return _Part(value, 1)

    def end(self, value: Any, dtype: Any) -> Any:
        return tf.cast(value.value, dtype)

    def reduce(self, step: Reduce, own: Any, others: List[Any]) -> Any:
        sent = [self._sent(step.chunk, src, part) for src, part in zip(step.srcs, others)]
        name = f"{self.names[step.chunk]}/sum"
        with tf1.device(self.devices[step.dst]):
            parts = [_Part(tf.cast(part.value, tf.float32, name=name), part.towers) for part in (own, *sent)]
            count = sum(part.towers for part in parts)
            values = [self._weighted(part, count, name) for part in parts]
        return _Part(self.added(step.chunk, values, [step.dst] * len(values)), count)

    def _weighted(self, part: _Part, count: int, name: str) -> Any:
        if not self.average or part.towers == count:
            return part.value
        return tf.multiply(part.value, part.towers / count, name=name)

    def finish(self, chunk: int, root: int, total: Any) -> Any:
        with tf1.device(self.devices[root]):
            share = self._weighted(total, total.towers * self.across.hosts, f"{self.names[chunk]}/share")
        sent = self._sent(chunk, root, _Part(share, total.towers))
        return _Part(self.everywhere(chunk, root, sent.value), self.towers)

    def copy(self, step: Copy, value: Any) -> Any:
        return _Part(super().copy(step, value.value), value.towers)

    def _sent(self, chunk: int, src: int, part: _Part) -> _Part:
        """``part`` in its travelling dtype, cast before it leaves ``src``."""
        with tf1.device(self.devices[src]):
            return _Part(tf.cast(part.value, self._wire, name=f"{self.names[chunk]}/sent"), part.towers)


class Gather(DeviceReduction):
    """Concatenates rows: the values, or (``average`` being False) the indices, of sparse gradients.

    Grappler merges a concat into another one that alone reads it, though they be on different devices, and everybody
    would send to the root directly. It does not where it cannot read the axis.
    """

    def reduce(self, step: Reduce, own: Any, others: List[Any]) -> Any:
        values = [own, *others]
        with tf1.device(self.devices[step.dst]):
            joined = tf.concat(values, self._hidden(step.dst, 0, "axis"), name=f"{self.names[step.chunk]}/gather")
        shapes = [value.shape.as_list() for value in values if value.shape.ndims]
        if shapes:
            rows = [shape[0] for shape in shapes] + [None] * (len(shapes) < len(values))
            joined.set_shape([None if None in rows else sum(rows), *shapes[0][1:]])
        return joined


class _ByChunk(Ops[Any]):
    """Each chunk by its own reading."""

    def __init__(self, readings: Sequence[DeviceReduction]):
        self._readings = readings

    def start(self, chunk: int, value: Any) -> Any:
        return self._readings[chunk].start(value)

    def reduce(self, step: Reduce, own: Any, others: List[Any]) -> Any:
        return self._readings[step.chunk].reduce(step, own, others)

    def finish(self, chunk: int, root: int, total: Any) -> Any:
        return self._readings[chunk].finish(chunk, root, total)

    def copy(self, step: Copy, value: Any) -> Any:
        return self._readings[step.chunk].copy(step, value)


def emit(
    plan: Plan,
    tensors: Sequence[Sequence[Any]],
    devices: Sequence[Any],
    readings: Sequence[DeviceReduction],
    only_roots: bool = False,
) -> List[List[Any]]:
    """Add the plan's ops to the default graph (or run them, eagerly).

    Args:
        plan: a verified plan of K devices and C chunks.
        tensors: ``tensors[tower][chunk]``, K×C.
        devices: K devices, one for each tower.
        readings: C readings, one for each chunk.
        only_roots: of each chunk only the root's result is wanted, as after the reduce half of a plan.

    Returns:
        K×C tensors, entry (k, c) on ``devices[k]``; None where it is not wanted.
    """
    ops = _ByChunk(readings)
    values = [[ops.start(chunk, tensor) for chunk, tensor in enumerate(row)] for row in tensors]
    result = run(plan, values, ops)
    ended: List[List[Any]] = [[None] * plan.chunks for _ in devices]
    for tower, device in enumerate(devices):
        with tf1.device(device):
            for chunk, root in enumerate(plan.roots):
                if tower == root or not only_roots:
                    ended[tower][chunk] = readings[chunk].end(result[tower][chunk], tensors[tower][chunk].dtype)
    return ended


@contextlib.contextmanager
def recorded(name: str, plan: Plan, devices: Sequence[Any], names: Sequence[str], hosts: int = 1) -> Iterator[None]:
    """The name scope of one call, free of outer colocation, and the record of it that ``audit`` reads."""
    with forget_colocation(), tf1.name_scope(name) as scope:
        yield
    if not tf.executing_eagerly():
        record = Emitted(scope, plan, tuple(devices), tuple(names), hosts)
        _emitted.setdefault(tf1.get_default_graph(), []).append(record)
