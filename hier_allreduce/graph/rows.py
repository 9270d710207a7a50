"""Sparse and missing gradients: gathered rows, rows made dense, zeros.

The "sum" of sparse gradients is all towers' rows, one tower's after another's. TensorFlow's optimizers add up rows of
equal indices.
"""

from __future__ import annotations

from typing import Any, List, Sequence, Tuple

import tensorflow as tf

from ..planning import Copy, Reduce
from .half import NARROW_DTYPES
from .matrix import Column, dtype_of, height_of, is_sparse
from .sums import Shared, Sum
from .tf import tf1

_PARTS = ("values", "indices")


class Rows(Sum):
    """The rows of one sparse gradient; a value is its (values, indices)."""

    parts = tuple(f".{part}" for part in _PARTS)

    def __init__(self, name: str, shared: Shared, column: Column):
        super().__init__(name, shared)
        self._column = column

    def start(self, tower: int, tensor: Any) -> Any:
        return tuple(getattr(tensor, part) for part in _PARTS)

    def end(self, tower: int, value: Any) -> Any:
        # a tower without dense_shape gets another tower's
        shapes = (getattr(grad, "dense_shape", None) for grad in (self._column.grads[tower], *self._column.grads))
        return tf.IndexedSlices(*value, dense_shape=next((shape for shape in shapes if shape is not None), None))

    def reduce(self, step: Reduce, here: Any, others: List[Any]) -> Any:
        axis = self.shared.constant(step.dst, 0, is_hidden=True)
        with tf1.device(self.devices[step.dst]):
            by_part = zip(zip(here, *others), self.parts)
            return tuple(_concat(tensors, axis, f"{self.name}{part}/gather") for tensors, part in by_part)

    def copy(self, step: Copy, value: Any) -> Any:
        return self.copied(step.dst, value)

    def copied(self, tower: int, value: Any) -> Any:
        with tf1.device(self.devices[tower]):
            return tuple(tf.identity(t, name=f"{self.name}{part}/copy") for t, part in zip(value, self.parts))

    def mean(self, root: int, total: Any) -> Any:
        values, indices = total  # indices have no mean
        return super().mean(root, values), indices


def _concat(tensors: Sequence[Any], axis: Any, name: str) -> Any:
    # Grappler fuses a concat into its only consumer, another concat, even across devices, which would make every tower
    # send straight to the root. An axis that it cannot read prevents this.
    joined = tf.concat(tensors, axis, name=name)
    shapes = [tensor.shape.as_list() for tensor in tensors if tensor.shape.ndims]
    if shapes:
        counts = [shape[0] for shape in shapes]
        rows = None if None in counts or len(counts) < len(tensors) else sum(counts)
        joined.set_shape([rows, *shapes[0][1:]])
    return joined


def gradient(column: Column, tower: int, devices: Sequence[Any]) -> Any:
    """Return a tower's gradient in the form in which it travels; called under the tower's device.

    Rows of a column that is dense on some tower are made dense; None becomes zeros, or no rows.
    """
    grad = column.grads[tower]
    if column.dtype == "" or (grad is not None and is_sparse(grad) == column.is_sparse):
        return grad
    if grad is not None:
        return _dense(column, grad)
    return _no_rows(column, devices) if column.is_sparse else _zeros(column, devices)


def _dense(column: Column, grad: Any) -> Any:
    # rows with equal indices are added, in float32 as everything else that is added
    wide = tf.cast(grad.values, tf.float32) if dtype_of(grad) in NARROW_DTYPES else grad.values
    height = height_of(column.shape)
    dense = tf.math.unsorted_segment_sum(wide, grad.indices, grad.dense_shape[0] if height is None else height)
    dense = tf.cast(dense, grad.dtype)
    dense.set_shape(column.shape)
    return dense


def _no_rows(column: Column, devices: Sequence[Any]) -> Any:
    home, other = _first(column, is_shaped=False)
    row: Any = column.shape[1:]
    if row.is_fully_defined():
        shape: Any = [0, *row.as_list()]
    else:
        with tf1.device(devices[home]):  # so that only a shape is copied from there
            shape = tf.concat([[0], tf.shape(other.values)[1:]], 0)
    return tf.IndexedSlices(tf.zeros(shape, other.values.dtype), tf.zeros([0], other.indices.dtype))


def _zeros(column: Column, devices: Sequence[Any]) -> Any:
    shape: Any = column.shape
    if not column.shape.is_fully_defined():
        home, other = _first(column, is_shaped=True)
        with tf1.device(devices[home]):
            shape = other.dense_shape if is_sparse(other) else tf.shape(other)
    return tf.zeros(shape, column.dtype)


def _first(column: Column, is_shaped: bool) -> Tuple[int, Any]:
    """Return the first tower with a gradient, one that tells its shape if asked, and the gradient."""
    return next(
        (tower, grad)
        for tower, grad in enumerate(column.grads)
        if grad is not None and not (is_shaped and is_sparse(grad) and grad.dense_shape is None)
    )
