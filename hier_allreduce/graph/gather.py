"""How the rows of sparse gradients are collected: tower by tower on the way, gradient by gradient from the root on."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import tensorflow as tf

from ..planning import Reduce, Step
from .compat import tf1
from .devices import Places
from .layout import Rows
from .pieces import Splitter
from .reductions import DeviceReduction


class _Gathered(NamedTuple):
    """Rows of several towers on one device, not joined yet: tensors, and of each the towers whose rows it holds."""

    parts: Tuple[Tuple[Any, Tuple[int, ...]], ...]

    @property
    def towers(self) -> Tuple[int, ...]:
        return tuple(tower for _, towers in self.parts for tower in towers)


class OnRoots:
    """What one chunk of sparse gradients needs to know of others: what these were on their roots."""

    def __init__(self) -> None:
        self.order: Dict[int, Tuple[int, ...]] = {}  # by variable: the order of the towers in its values
        self.counts: Dict[int, List[Any]] = {}  # by chunk of counts: its parts


class Gather(DeviceReduction):
    """Rows of sparse gradients, one tower's after another's: their values.

    The rows of joined gradients arrive tower by tower, and are put in the order of the gradients on the root::

        tower 0: a0 b0 c0    tower 1: a1 b1 c1    ─►    a0 a1 b0 b1 c0 c1

    ``rows`` says which chunks hold which rows, and how many rows there are, or which chunk brings these numbers.
    """

    def __init__(self, places: Places, average: bool, names: Sequence[str], rows: Dict[int, Rows], on_roots: OnRoots):
        super().__init__(places, average, names)
        self.rows, self.on_roots = rows, on_roots
        self.splitters = [Splitter(device) for device in self.devices]

    def start(self, tower: int, value: Any) -> Any:
        return _Gathered(((value, (tower,)),))

    def end(self, chunk: int, value: Any, dtype: Any) -> Any:
        return value.parts[0][0]

    def sent(self, step: Step, src: int, value: Any) -> Any:
        tensor = super().sent(step, src, self.concatenated(step.chunk, src, value))
        return _Gathered(((tensor, value.towers),))

    def arriving(self, step: Step, value: Any) -> Any:
        return _Gathered(((super().arriving(step, value.parts[0][0]), value.towers),))

    def joined(self, step: Reduce, values: Sequence[Any], devices: Sequence[int]) -> Any:
        return _Gathered(tuple(part for value in values for part in value.parts))

    def finish(self, chunk: int, root: int, total: Any) -> Any:
        self.note_order(chunk, total.towers)
        is_joined = len(self.rows[chunk].variables) > 1
        tensor = (self._by_variable if is_joined else self.concatenated)(chunk, root, total)
        return _Gathered(((super().finish(chunk, root, tensor), total.towers),))

    def note_order(self, chunk: int, towers: Tuple[int, ...]) -> None:
        """Note the order of the towers in these values; their indices, which come later, have the same."""
        self.on_roots.order.update(dict.fromkeys(self.rows[chunk].variables, towers))

    def concatenated(self, chunk: int, device: int, value: Any) -> Any:
        """Return the rows as one tensor, on the device that has them."""
        tensors = [tensor for tensor, _ in value.parts]
        if len(tensors) == 1:
            return tensors[0]
        with tf1.device(self.devices[device]):
            # Grappler fuses a concat into its only consumer, another concat, even across devices, which would make
            # every tower send straight to the root. An axis that it cannot read prevents this.
            joined = tf.concat(tensors, self._hidden(device, 0, "axis"), name=f"{self.names[chunk]}/gather")
        joined.set_shape(_joined_shape(tensors))
        return joined

    def _by_variable(self, chunk: int, root: int, value: Any) -> Any:
        """Return the rows of joined gradients on the root, all of one gradient before those of the next."""
        variables, known, counts = self.rows[chunk]
        pieces: Dict[Tuple[int, int], Any] = {}  # by tower and variable
        for number, (tensor, towers) in enumerate(value.parts):
            whose = [(tower, variable) for tower in towers for variable in variables]
            sizes = [n for tower in towers for n in known[tower]] if known else self.on_roots.counts[counts][number]
            split = self.splitters[root].split(tensor, sizes, len(whose), name=f"{self.names[chunk]}/rows")
            pieces.update(zip(whose, split))
        with tf1.device(self.devices[root]):
            ordered = [pieces[tower, variable] for variable in variables for tower in self.on_roots.order[variable]]
            return tf.concat(ordered, 0, name=f"{self.names[chunk]}/gather")


class GatherIndices(Gather):
    """The indices of the rows. They have no mean; joined ones are put in the order of their values."""

    def __init__(self, places: Places, names: Sequence[str], rows: Dict[int, Rows], on_roots: OnRoots):
        super().__init__(places, False, names, rows, on_roots)

    def note_order(self, chunk: int, towers: Tuple[int, ...]) -> None:
        """Indices follow the order of their values."""


class Count(GatherIndices):
    """The numbers of rows of V joined sparse gradients: each tower's until the root, there their sums."""

    def finish(self, chunk: int, root: int, total: Any) -> Any:
        variables, name = len(self.rows[chunk].variables), self.names[chunk]
        numbers = self.concatenated(chunk, root, total)
        sizes = [variables * len(towers) for _, towers in total.parts]
        parts = self.splitters[root].split(numbers, sizes, len(sizes), name=f"{name}/parts")
        self.on_roots.counts[chunk] = parts
        with tf1.device(self.devices[root]):
            constants = self.splitters[root].constants
            sums = tf.reduce_sum(tf.reshape(numbers, constants[(-1, variables)]), constants[(0,)], name=f"{name}/sum")
        return _Gathered(((sums, total.towers),))


def _joined_shape(values: Sequence[Any]) -> tf.TensorShape:
    """Return the shape of tensors joined along their first axis, as far as it is known."""
    shapes = [value.shape.as_list() for value in values if value.shape.ndims]
    if not shapes:
        return tf.TensorShape(None)
    rows = [shape[0] for shape in shapes]
    all_known = len(shapes) == len(values) and None not in rows
    return tf.TensorShape([sum(rows) if all_known else None, *shapes[0][1:]])
