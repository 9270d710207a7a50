"""Sparse and missing gradients: gathered rows, rows made dense, zeros.

The "sum" of sparse gradients is all towers' rows, one tower's after another's. TensorFlow's optimizers add up rows of
equal indices.
"""

from __future__ import annotations

from typing import Any, List, Sequence

import tensorflow as tf

from ..compat import tf1
from ..planning import Copy, Reduce
from .half import NARROW_DTYPES
from .matrix import Column, dtype_of, static_shape
from .sums import Shared, Sum


class Rows(Sum):
    """The rows of one sparse gradient: ``tf.IndexedSlices``."""

    def __init__(self, name: str, shared: Shared, column: Column):
        super().__init__(name, shared)
        self._column = column

    def end(self, tower: int, value: Any) -> Any:
        # a tower without dense_shape gets another tower's
        shapes = (
            getattr(grad, "dense_shape", None)
            for grad in (self._column.grads[tower], *self._column.grads)
        )
        return tf.IndexedSlices(
            value.values, value.indices, next((s for s in shapes if s is not None), None)
        )

    def reduce(self, step: Reduce, here: Any, others: List[Any]) -> Any:
        rows, axis = (here, *others), self.shared.constant(step.dst, 0, is_hidden=True)
        with tf1.device(self.devices[step.dst]):
            values = _concat([slices.values for slices in rows], axis, f"{self.name}.values/gather")
            return tf.IndexedSlices(
                values, _concat([s.indices for s in rows], axis, f"{self.name}.indices/gather")
            )

    def copy(self, step: Copy, value: Any) -> Any:
        with tf1.device(self.devices[step.dst]):
            values = tf.identity(value.values, name=f"{self.name}.values/copy")
            return tf.IndexedSlices(
                values, tf.identity(value.indices, name=f"{self.name}.indices/copy")
            )

    def mean(self, root: int, total: Any) -> Any:
        if not self.shared.average:
            return total
        share = 1.0 / self.shared.contributions
        with tf1.device(self.devices[root]):
            values = tf.multiply(total.values, share, name=f"{self.name}.values/mean")
        return tf.IndexedSlices(values, total.indices)  # indices have no mean


def _concat(tensors: Sequence[Any], axis: Any, name: str) -> Any:
    # Grappler fuses a concat into its only consumer, another concat, even across devices, which would make every tower
    # send straight to the root. An axis that it cannot read prevents this.
    joined = tf.concat(tensors, axis, name=name)
    joined.set_shape(tf.TensorShape([None]).concatenate(tensors[0].shape[1:]))
    return joined


def gradient(column: Column, tower: int, devices: Sequence[Any]) -> Any:
    """Return a tower's gradient in the form in which it travels; called under the tower's device.

    Rows of a column that is dense on some tower are made dense; None becomes zeros, or no rows.
    """
    grad = column.grads[tower]
    if column.dtype == "" or (
        grad is not None and isinstance(grad, tf.IndexedSlices) == column.is_sparse
    ):
        return grad
    return _nothing(column, devices) if grad is None else _dense(column, grad)


def _dense(column: Column, grad: Any) -> Any:
    """Return a dense gradient. Its shape when the step runs is that of the rows' tower, so that sums can check it."""
    # rows with equal indices are added, in float32 as everything else that is added
    wide = tf.cast(grad.values, tf.float32) if dtype_of(grad) in NARROW_DTYPES else grad.values
    shape = column.shape if grad.dense_shape is None else static_shape(grad)
    known = shape[:1].num_elements()
    height = grad.dense_shape[0] if known is None else known
    dense = tf.cast(tf.math.unsorted_segment_sum(wide, grad.indices, height), grad.dtype)
    dense.set_shape(shape)
    return dense


def _nothing(column: Column, devices: Sequence[Any]) -> Any:
    """Return zeros, or no rows, in the shape of the first tower's gradient that there is."""
    home, other = next((tower, grad) for tower, grad in enumerate(column.grads) if grad is not None)
    shape: Any = (
        tf.TensorShape([0]).concatenate(column.shape[1:]) if column.is_sparse else column.shape
    )
    if not shape.is_fully_defined():
        with tf1.device(devices[home]):  # so that only a shape is copied from there
            if column.is_sparse:
                shape = tf.concat([[0], tf.shape(other.values)[1:]], 0)
            else:
                shape = tf.shape(gradient(column, home, devices))
    zeros = tf.zeros(shape, column.dtype)
    return (
        tf.IndexedSlices(zeros, tf.zeros([0], other.indices.dtype)) if column.is_sparse else zeros
    )
