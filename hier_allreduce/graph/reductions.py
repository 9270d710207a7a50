"""How chunks of dense gradients are added up on devices: as they are, or in float32 where they have 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from ..planning import Copy, Ops, Reduce, Step
from .compat import tf1
from .copy_order import CopyOrder
from .devices import Places
from .hosts import CrossHostReduce
from .packing import Constants, Tensors


@dataclass(frozen=True)
class Context:
    """What all chunks of one all-reduce share.

    Attributes:
        places: the towers' devices and their lanes.
        average: whether the mean is wanted.
        across: what adds up the sums of several hosts.
        names: for each chunk the names of its parts.
        order: what gives copies their turn; None if TensorFlow chooses an order.
        is_large: whether all chunks together may make a device's memory short.
    """

    places: Places
    average: bool
    across: CrossHostReduce
    names: Sequence[Tuple[str, ...]]
    order: Optional[CopyOrder] = None
    is_large: bool = False


class DeviceReduction(Ops[Any]):
    """What all ways of adding up share."""

    def __init__(self, context: Context):
        self.context, self.devices = context, context.places.devices
        self.names = [names[0] for names in context.names]
        self.contributions = len(context.places.towers) * context.across.hosts
        self._constants = [Constants() for _ in self.devices]
        self._hidden_constants: Dict[Tuple[int, str], Any] = {}

    def start(self, tower: int, tensors: Tensors) -> Any:
        """Return a tower's tensors of one chunk as the value that is reduced."""
        return tensors[0]

    def end(self, chunk: int, value: Any, dtype: str) -> Tensors:
        """Return a reduced value as the chunk's tensors; ``dtype`` is the gradients'; called on the tower's device."""
        return (value,)

    def finish(self, chunk: int, root: int, total: Any) -> Any:
        if self.contributions > 1:
            return self.mean(chunk, root, self.over_hosts(chunk, root, total))
        with tf1.device(self.devices[root]):  # one tower: its gradient may be on another device
            return tf.identity(total, name=f"{self.names[chunk]}/copy")

    def leaving(self, name: str, src: int, value: Any) -> Any:
        """Return ``value`` as it leaves ``src`` for another device: in its turn, where the order matters."""
        return value if self.context.order is None else self.context.order.turn(src, value, f"{name}/turn")

    def copy(self, step: Copy, value: Any) -> Any:
        return self.arriving(step, self.sent(step, step.src, value))

    def sent(self, step: Step, src: int, value: Any) -> Any:
        """Return ``value`` as it leaves ``src``, on that device."""
        return self.leaving(self.names[step.chunk], src, value)

    def arriving(self, step: Step, value: Any) -> Any:
        """Return ``value`` on the step's destination."""
        with tf1.device(self.devices[step.dst]):
            return tf.identity(value, name=f"{self.names[step.chunk]}/copy")

    def reduce(self, step: Reduce, own: Any, others: List[Any]) -> Any:
        """Return the step's sum on its destination; ``own`` is None on a lane that holds nothing yet."""
        sent = [self.sent(step, src, value) for src, value in zip(step.srcs, others)]
        if own is not None:
            return self.joined(step, [own, *sent], (step.dst, *step.srcs))
        return self.arriving(step, sent[0]) if len(sent) == 1 else self.joined(step, sent, step.srcs)

    def joined(self, step: Reduce, values: Sequence[Any], devices: Sequence[int]) -> Any:
        """Return what several values become on the step's destination, each from its number in ``devices``."""
        raise NotImplementedError

    def add(self, chunk: int, values: Sequence[Any], devices: Sequence[int], dst: int) -> Any:
        """Return the sum of ``values`` on device ``dst``; ``devices`` has the number of each value's device."""
        name, shape = f"{self.names[chunk]}/sum", values[0].shape
        shapes_known = all(value.shape.is_fully_defined() for value in values)
        if self.context.is_large and shapes_known and len(values) > 2 and not tf.executing_eagerly():
            # Grappler's memory optimizer expands an add_n of more than two inputs, one of them made on its own device,
            # into one pass over memory for each input, if it knows their shape and finds the device's memory short:
            # twice the time. Columns of a length that it cannot know prevent this (a vector's length it would find),
            # and the reshape copies nothing.
            columns = [self._as_column(chunk, value, device) for value, device in zip(values, devices)]
            with tf1.device(self.devices[dst]):
                total = tf.add_n(columns, name=name)
                return tf.reshape(total, self._constants[dst][tuple(shape.as_list())], name=name)
        with tf1.device(self.devices[dst]):
            # add would broadcast shapes that turn out to differ when the step runs; add_n raises an error
            total = tf.add(*values, name=name) if shapes_known and len(values) == 2 else tf.add_n(values, name=name)
        total.set_shape(shape.merge_with(total.shape))
        return total

    def _as_column(self, chunk: int, value: Any, device: int) -> Any:
        with tf1.device(self.devices[device]):
            return tf.reshape(value, self._hidden(device, [-1, 1], "column"), name=f"{self.names[chunk]}/column")

    def _hidden(self, device: int, numbers: Any, name: str) -> Any:
        """Return a constant that Grappler cannot read before the graph is cut into devices.

        Called on that device.
        """
        if (device, name) not in self._hidden_constants:
            constant = tf.constant(numbers, tf.int32)
            if not tf.executing_eagerly():
                constant = tf1.placeholder_with_default(constant, constant.shape, name)
            self._hidden_constants[device, name] = constant
        return self._hidden_constants[device, name]

    def mean(self, chunk: int, root: int, total: Any) -> Any:
        """Return ``total`` divided by the towers of all hosts if the mean is wanted: on the root, before the copies."""
        # A multiply on every tower would be folded into different consumers on different towers, and the replicas
        # would differ in their last bits.
        if not self.context.average:
            return total
        with tf1.device(self.devices[root]):
            return tf.multiply(total, 1.0 / self.contributions, name=f"{self.names[chunk]}/mean")

    def over_hosts(self, chunk: int, root: int, total: Any) -> Any:
        """Return the sum of all hosts' ``total``."""
        with tf1.device(self.devices[root]):
            return self.context.across.all_reduce(total, root, f"{self.names[chunk]}/across")


class Dense(DeviceReduction):
    """The sum of tensors of one dtype."""

    def joined(self, step: Reduce, values: Sequence[Any], devices: Sequence[int]) -> Any:
        return self.add(step.chunk, values, devices, step.dst)


class _Partial(NamedTuple):
    """The sum, or running mean, of ``towers`` contributions."""

    value: Any
    towers: int


class Narrow(DeviceReduction):
    """The sum of tensors that travel in 16 bits: each addition is done in float32, each transfer rounds once.

    What a tower hands to a lane of its own is not rounded, so that lanes round nothing more.

    A mean is carried as the running mean of the contributions so far, so that it overflows nowhere if the inputs do
    not. docs/cost-model.md has the error bound.
    """

    def __init__(self, context: Context, wire: Any):
        super().__init__(context)
        self._wire = wire

    def start(self, tower: int, tensors: Tensors) -> Any:
        return _Partial(tensors[0], 1)

    def end(self, chunk: int, value: Any, dtype: str) -> Tensors:
        return (tf.cast(value.value, dtype, name=f"{self.names[chunk]}/widened"),)

    def sent(self, step: Step, src: int, value: Any) -> Any:
        stays = self.context.places.is_lane_of(step.dst, src)
        partial = value if stays else self._narrowed(step.chunk, src, value)
        return partial._replace(value=super().sent(step, src, partial.value))

    def arriving(self, step: Step, value: Any) -> Any:
        return value._replace(value=super().arriving(step, value.value))

    def joined(self, step: Reduce, values: Sequence[Any], devices: Sequence[int]) -> Any:
        name = f"{self.names[step.chunk]}/sum"
        with tf1.device(self.devices[step.dst]):
            wide = [_Partial(tf.cast(part.value, tf.float32, name=name), part.towers) for part in values]
            towers = sum(part.towers for part in wide)
            weighted = [self._weighted(part, towers, name) for part in wide]
        return _Partial(self.add(step.chunk, weighted, [step.dst] * len(weighted), step.dst), towers)

    def _weighted(self, partial: _Partial, towers: int, name: str) -> Any:
        """Return a sum as it is, and a running mean by its share in the mean of ``towers``."""
        if not self.context.average or partial.towers == towers:
            return partial.value
        return tf.multiply(partial.value, partial.towers / towers, name=name)

    def finish(self, chunk: int, root: int, total: Any) -> Any:
        with tf1.device(self.devices[root]):
            share = self._weighted(total, total.towers * self.context.across.hosts, f"{self.names[chunk]}/share")
        narrow = self._narrowed(chunk, root, _Partial(share, total.towers))
        return _Partial(self.over_hosts(chunk, root, narrow.value), self.contributions)

    def _narrowed(self, chunk: int, src: int, partial: _Partial) -> _Partial:
        """Return ``partial`` in the 16-bit dtype, cast before it leaves ``src``."""
        with tf1.device(self.devices[src]):
            return partial._replace(value=tf.cast(partial.value, self._wire, name=f"{self.names[chunk]}/sent"))
