"""Sparse and missing gradients: gathered rows, rows made dense, zeros.

The "sum" of sparse gradients is the rows of all towers, one tower's after another's. TensorFlow's
optimizers add up the rows of equal indices.
"""

from __future__ import annotations

from typing import Any, List, Sequence

import tensorflow as tf

from ..compat import tf1
from ..planning import Copy, Reduce
from .columns import Column, dtype_of, static_shape
from .sixteen_bit import NARROW_DTYPES
from .sums import Context, Sum


class SparseSum(Sum):
    """The rows of one sparse gradient: ``tf.IndexedSlices``.

    Args:
        name: the chunk's, in op names.
        context: of the all-reduce.
        column: of the gradient.
    """

    def __init__(self, name: str, context: Context, column: Column):
        super().__init__(name, context)
        self._column = column

    def reduce(self, step: Reduce, here: Any, others: List[Any]) -> Any:
        slices = [here, *others]
        axis = self.context.constant(step.dst, 0, is_hidden=True)
        with tf1.device(self.devices[step.dst]):
            rows = [each.values for each in slices]
            values = _concat(rows, axis, f"{self.name}.values/gather")
            numbers = [each.indices for each in slices]
            indices = _concat(numbers, axis, f"{self.name}.indices/gather")
        return tf.IndexedSlices(values, indices)

    def copy(self, step: Copy, value: Any) -> Any:
        with tf1.device(self.devices[step.dst]):
            values = tf.identity(value.values, name=f"{self.name}.values/copy")
            indices = tf.identity(value.indices, name=f"{self.name}.indices/copy")
        return tf.IndexedSlices(values, indices)

    def mean(self, root: int, total: Any) -> Any:
        if not self.context.average:
            return total
        share = 1.0 / self.context.contributions
        with tf1.device(self.devices[root]):
            values = tf.multiply(total.values, share, name=f"{self.name}.values/mean")
        return tf.IndexedSlices(values, total.indices)  # indices have no mean

    def as_result(self, tower: int, value: Any) -> Any:
        # a tower without dense_shape gets another tower's
        for grad in (self._column.grads[tower], *self._column.grads):
            shape = getattr(grad, "dense_shape", None)
            if shape is not None:
                break
        return tf.IndexedSlices(value.values, value.indices, shape)


def _concat(tensors: Sequence[Any], axis: Any, name: str) -> Any:
    # Grappler fuses a concat into its only consumer, another concat, even across devices. Then each
    # tower would send straight to the root. An axis that Grappler cannot read prevents this.
    joined = tf.concat(tensors, axis, name=name)
    joined.set_shape(tf.TensorShape([None]).concatenate(tensors[0].shape[1:]))
    return joined


def gradient(column: Column, tower: int, devices: Sequence[Any]) -> Any:
    """Return a tower's gradient in the form in which it travels; called under the tower's device.

    Rows of a column that is dense on some tower are made dense; None becomes zeros, or no rows.
    """
    grad = column.grads[tower]
    if column.dtype == "":
        return grad
    if grad is None:
        return _nothing(column, devices)
    if isinstance(grad, tf.IndexedSlices) and not column.is_sparse:
        return _dense(column, grad)
    return grad


def _dense(column: Column, grad: Any) -> Any:
    """Return the dense gradient of ``tf.IndexedSlices``.

    Its shape when the step runs is that of the slices' tower, so that sums can check it.
    """
    values = grad.values
    if dtype_of(grad) in NARROW_DTYPES:
        values = tf.cast(values, tf.float32)  # rows of equal indices are added, in float32 too
    shape = column.shape if grad.dense_shape is None else static_shape(grad)
    known_height = shape[:1].num_elements()
    height = grad.dense_shape[0] if known_height is None else known_height
    total = tf.math.unsorted_segment_sum(values, grad.indices, height)
    dense = tf.cast(total, grad.dtype)
    dense.set_shape(shape)
    return dense


def _nothing(column: Column, devices: Sequence[Any]) -> Any:
    """Return zeros, or no rows, in the shape of the first tower's gradient that there is."""
    present = [tower for tower, grad in enumerate(column.grads) if grad is not None]
    home = present[0]
    other = column.grads[home]
    shape: Any = column.shape
    if column.is_sparse:
        shape = tf.TensorShape([0]).concatenate(column.shape[1:])
    if not shape.is_fully_defined():
        with tf1.device(devices[home]):  # so that only a shape is copied from there
            if column.is_sparse:
                shape = tf.concat([[0], tf.shape(other.values)[1:]], 0)
            else:
                shape = tf.shape(gradient(column, home, devices))
    zeros = tf.zeros(shape, column.dtype)
    if column.is_sparse:
        return tf.IndexedSlices(zeros, tf.zeros([0], other.indices.dtype))
    return zeros
