"""All-gather of sparse gradients. Rows are ordered by tower on the way to the root, and by gradient from there on."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from ..planning import Copy, Ops, Plan, Reduce, run
from .compat import tf1
from .packing import Splitter, Tensors
from .reductions import Context, DeviceReduction
from .units import COUNTS, VALUES, Unit

Towers = Tuple[int, ...]


class _Gathered(NamedTuple):
    """Rows of several towers on one device, not joined yet: a unit's tensors, and the towers whose rows they hold."""

    parts: Tuple[Tuple[Tensors, Towers], ...]

    @property
    def towers(self) -> Towers:
        return tuple(tower for _, towers in self.parts for tower in towers)


class Gather(DeviceReduction):
    """Rows of sparse gradients, one tower's after another's: their values, their indices, and how many there are.

    The rows of joined gradients arrive tower by tower, and are put in the order of the gradients on the root::

        tower 0: a0 b0 c0    tower 1: a1 b1 c1    ─►    a0 a1 b0 b1 c0 c1

    Args:
        context: what all chunks share.
        units: the unit of each chunk with rows.
        orders: the order of the towers in the values of variables whose indices travel apart from them.
    """

    def __init__(self, context: Context, units: Dict[int, Unit], orders: Dict[int, Towers]):
        super().__init__(context)
        self._units, self._orders = units, orders
        self._splitters = [Splitter(device) for device in self.devices]

    def start(self, tower: int, tensors: Tensors) -> Any:
        return _Gathered(((tensors, (tower,)),))

    def end(self, chunk: int, value: Any, dtype: str) -> Tensors:
        return value.parts[0][0]

    def reduce(self, step: Reduce, own: Any, others: List[Any]) -> Any:
        wholes = [self._concatenated(step.chunk, src, value) for src, value in zip(step.srcs, others)]
        sent = [  # part by part, as these copies are numbered
            [self.leaving(name, src, tensors[part]) for src, tensors in zip(step.srcs, wholes)]
            for part, name in enumerate(self.context.names[step.chunk])
        ]
        arrived = tuple((tensors, value.towers) for tensors, value in zip(zip(*sent), others))
        if own is None and len(arrived) == 1:
            return self._arriving(step.chunk, step.dst, *arrived[0])
        return _Gathered((own or _Gathered(())).parts + arrived)

    def copy(self, step: Copy, value: Any) -> Any:
        ((tensors, towers),) = value.parts
        named = zip(self.context.names[step.chunk], tensors)
        sent = tuple(self.leaving(name, step.src, tensor) for name, tensor in named)
        return self._arriving(step.chunk, step.dst, sent, towers)

    def _arriving(self, chunk: int, dst: int, tensors: Tensors, towers: Towers) -> _Gathered:
        named = zip(self.context.names[chunk], tensors)
        with tf1.device(self.devices[dst]):
            return _Gathered(((tuple(tf.identity(tensor, name=f"{name}/copy") for name, tensor in named), towers),))

    def finish(self, chunk: int, root: int, total: Any) -> Any:
        unit = self._units[chunk]
        is_joined = len(unit.columns) > 1
        tensors = (self._by_variable if is_joined else self._concatenated)(chunk, root, total)
        if self.contributions == 1:
            return self._arriving(chunk, root, tensors, total.towers)
        if unit.parts[0] == VALUES:  # indices have no mean
            tensors = (self.mean(chunk, root, tensors[0]), *tensors[1:])
        return _Gathered(((tensors, total.towers),))

    def _concatenated(self, chunk: int, device: int, value: _Gathered) -> Tensors:
        """Return the rows as one tensor of each part, on the device that has them."""
        if len(value.parts) == 1:
            return value.parts[0][0]
        by_part = zip(*(tensors for tensors, _ in value.parts))
        return tuple(self._concat(device, part, name) for part, name in zip(by_part, self.context.names[chunk]))

    def _concat(self, device: int, tensors: Sequence[Any], name: str) -> Any:
        with tf1.device(self.devices[device]):
            # Grappler fuses a concat into its only consumer, another concat, even across devices, which would make
            # every tower send straight to the root. An axis that it cannot read prevents this.
            joined = tf.concat(tensors, self._hidden(device, 0, "axis"), name=f"{name}/gather")
        joined.set_shape(_joined_shape(tensors))
        return joined

    def _by_variable(self, chunk: int, root: int, value: _Gathered) -> Tensors:
        """Return the rows of joined gradients on the root, all of one gradient before those of the next."""
        unit, done = self._units[chunk], []
        sizes: List[Any] = [[column.rows[t] for t in towers for column in unit.columns] for _, towers in value.parts]
        if COUNTS in unit.parts:
            numbers, sizes = self._counts(chunk, root, value)
        for number, name in enumerate(self.context.names[chunk][:2]):
            pieces: Dict[Tuple[int, int], Any] = {}  # by tower and variable
            for (tensors, towers), own in zip(value.parts, sizes):
                whose = [(tower, variable) for tower in towers for variable in unit.variables]
                split = self._splitters[root].split(tensors[number], own, len(whose), name=f"{name}/rows")
                pieces.update(zip(whose, split))
            orders = [(variable, self._orders.get(variable, value.towers)) for variable in unit.variables]
            with tf1.device(self.devices[root]):
                ordered = [pieces[tower, variable] for variable, towers in orders for tower in towers]
                done.append(tf.concat(ordered, 0, name=f"{name}/gather"))
        return (*done, numbers) if COUNTS in unit.parts else tuple(done)

    def _counts(self, chunk: int, root: int, value: _Gathered) -> Tuple[Any, List[Any]]:
        """Return the number of rows of each variable, and for each part of ``value`` those by tower and variable."""
        width, name = len(self._units[chunk].columns), self.context.names[chunk][-1]
        tensors = [tensors[-1] for tensors, _ in value.parts]
        numbers = self._concat(root, tensors, name) if len(tensors) > 1 else tensors[0]
        of_parts = [width * len(towers) for _, towers in value.parts]
        sizes = self._splitters[root].split(numbers, of_parts, len(of_parts), name=f"{name}/parts")
        constants = self._splitters[root].constants
        with tf1.device(self.devices[root]):
            by_tower = tf.reshape(numbers, constants[(-1, width)])
            return tf.reduce_sum(by_tower, constants[(0,)], name=f"{name}/sum"), sizes


class _Arrivals(Ops[Towers]):
    """The interpretation that tells in which order contributions are joined."""

    def reduce(self, step: Reduce, own: Optional[Towers], others: List[Towers]) -> Towers:
        return sum(others, own or ())


def arrival_orders(plan: Plan, units: Dict[int, Unit]) -> Dict[int, Towers]:
    """Return the order of the towers in the values of variables whose indices travel apart from them.

    Args:
        plan: of units.
        units: the unit of each chunk with rows.
    """
    apart = {chunk: unit for chunk, unit in units.items() if unit.parts == (VALUES,)}
    if not apart:
        return {}
    towers = run(plan, [[(tower,)] * plan.chunks for tower in range(plan.towers)], _Arrivals())[0]
    return {variable: towers[chunk] for chunk, unit in apart.items() for variable in unit.variables}


def _joined_shape(values: Sequence[Any]) -> tf.TensorShape:
    """Return the shape of tensors joined along their first axis, as far as it is known."""
    shapes = [value.shape.as_list() for value in values if value.shape.ndims]
    if not shapes:
        return tf.TensorShape(None)
    rows = [shape[0] for shape in shapes]
    all_known = len(shapes) == len(values) and None not in rows
    return tf.TensorShape([sum(rows) if all_known else None, *shapes[0][1:]])
