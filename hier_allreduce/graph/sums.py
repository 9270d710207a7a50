"""The sum, the mean and the copies of one chunk: tensors as the values of ``planning.run``."""

from __future__ import annotations

from itertools import chain
from typing import Any, Dict, List, Sequence, Tuple, Union

import tensorflow as tf

from ..compat import hidden, tf1
from ..planning.chunks import Range
from ..planning.plan import Copy, Reduce
from .devices import hosts_of, types_of
from .layout import Layout
from .op_names import ACROSS, COLUMN, COPY, MEAN, SUM

LEAST_HIDDEN = 1 << 20  # bytes of a tensor whose shape is hidden, see Sum.add


class Context:
    """What the chunks of one all-reduce share: their layout, and constants on the towers."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.devices = layout.devices
        # The gradients in each sum.
        self.contributions = len(layout.devices) * hosts_of(layout.cluster)
        self.hides_sums = not tf.executing_eagerly() and types_of(layout.devices) == {"CPU"}
        self._constants: Dict[Tuple[int, Any, bool], Any] = {}
        self.ranges: List[List[Range]] = [[] for _ in layout.columns]  # of each column, in order
        for span in sorted(chain(*(chunk.ranges for chunk in layout.chunks))):
            self.ranges[span.gradient].append(span)

    def constant(
        self, tower: int, integers: Union[int, Tuple[int, ...]], is_hidden: bool = False
    ) -> Any:
        """Return an int32 constant on a tower, made once.

        Grappler does not use the value of a hidden one when it infers shapes or fuses ops.
        """
        # A constant is kept, because many chunks of a tower need the same few sizes.
        key = (tower, integers, is_hidden)
        if key not in self._constants:
            with tf1.device(self.devices[tower]):
                constant = tf.constant(integers, tf.int32)
                if is_hidden and not tf.executing_eagerly():
                    constant = hidden(constant)
            self._constants[key] = constant
        return self._constants[key]


class Sum:
    """The sum of one chunk's tensors, in their dtype; ``name`` is the chunk's in op names.

    ``run`` calls ``reduce``, ``at_root`` and ``copy`` for the moves of the chunk's schedule.
    """

    def __init__(self, name: str, context: Context):
        self.name = name
        self.context = context
        self.devices = context.devices

    def reduce(self, move: Reduce, here: Any, received: List[Any]) -> Any:
        return self.add(self.terms(move, here, received), move.dst)

    def terms(self, move: Reduce, here: Any, received: List[Any]) -> List[Any]:
        """Return what a step adds up: the tensors of its destination and of its sources."""
        return [here, *received]

    def at_root(self, root: int, total: Any) -> Any:
        # A lone tower's gradient is copied, because it may be on another device than its tower.
        if self.context.contributions == 1:
            return self.copy(Copy(root, root), total)
        return self.complete(root, total)

    def complete(self, root: int, total: Any) -> Any:
        """Return the sum, or mean, over all hosts, from this host's sum on its root."""
        total = self.over_hosts(root, total)
        if not self.context.layout.average:
            return total
        # The mean is taken here, before the copies. A multiply on each tower would be fused with
        # different consumers, and the towers would differ in their last bits.
        weight = 1.0 / self.context.contributions
        with tf1.device(self.devices[root]):
            return tf.multiply(total, weight, name=f"{self.name}/{MEAN}")

    def copy(self, move: Copy, tensor: Any) -> Any:
        with tf1.device(self.devices[move.dst]):
            return tf.identity(tensor, name=f"{self.name}/{COPY}")

    def as_result(self, own: Any, total: Any) -> Any:
        """Return a sum as the result of a tower that gave ``own``; called under its device."""
        return total

    def add(self, terms: Sequence[Any], dst: int) -> Any:
        """Return the sum of two tensors or more on a tower."""
        name = f"{self.name}/{SUM}"
        shape = terms[0].shape
        are_known = all(term.shape.is_fully_defined() for term in terms)
        with tf1.device(self.devices[dst]):
            # Shapes may turn out to differ when the training step runs. Then add would broadcast
            # them, and add_n raises an error.
            if are_known and len(terms) == 2:
                return tf.add(*terms, name=name)
            size = terms[0].dtype.size * shape.num_elements() if are_known else 0
            if not self.context.hides_sums or size < LEAST_HIDDEN:
                total = tf.add_n(terms, name=name)
            else:
                # Grappler's memory optimizer replaces an add_n of more than two inputs, one of
                # which is made on the same device, by one pass over memory for each input. On CPU
                # devices this takes twice the time. It does so only where it knows the shape of the
                # inputs, and so a reshape to columns of unknown height hides it. The reshape copies
                # nothing. GPUs, and small tensors, would pay more for the further ops.
                height = self.context.constant(dst, (-1, 1), is_hidden=True)
                upright = [tf.reshape(term, height, f"{self.name}/{COLUMN}") for term in terms]
                lengths = self.context.constant(dst, tuple(shape.as_list()))
                total = tf.reshape(tf.add_n(upright, name=name), lengths, name=name)
        total.set_shape(shape.merge_with(total.shape))
        return total

    def over_hosts(self, root: int, total: Any) -> Any:
        """Return the sum of all hosts' totals."""
        cluster = self.context.layout.cluster
        if cluster is None:
            return total
        with tf1.device(self.devices[root]):
            return cluster.ops.all_reduce(total, root, f"{self.name}/{ACROSS}")
