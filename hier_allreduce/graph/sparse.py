"""Sparse and missing gradients: sums of slices, slices made dense, zeros.

::

    tower 0      tower 1           root, and then every tower
    7  1.0       3  1.0
    3  2.0       9  4.0     ──►    7  9.0,  3  3.0,  9  4.0        an index, and its slice
    7  8.0
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import tensorflow as tf

from ..compat import tf1
from ..planning.plan import Copy, Reduce
from .columns import Column, dtype_of, static_shape
from .devices import types_of
from .op_names import COPY, GATHER, SUM
from .sixteen_bit import NARROW_DTYPES
from .sums import Context, Sum


class SliceSum(Sum):
    """The sum of one sparse gradient, ``tf.IndexedSlices``: a slice for each index on any tower.

    Slices of equal index are added up here, once. CUDA adds them in an order that varies, so towers
    that each added up the same slices would part. Their values travel and are added in the dtypes
    of ``sum_of_values``.
    """

    def __init__(self, name: str, context: Context, sum_of_values: Sum):
        super().__init__(name, context)
        self._sum_of_values = sum_of_values

    def reduce(self, move: Reduce, here: Any, received: List[Any]) -> Any:
        received_values = [slices.values for slices in received]
        values = self._sum_of_values.terms(move, here.values, received_values)
        indices = [here.indices, *(slices.indices for slices in received)]
        axis = self.context.constant(move.dst, 0, is_hidden=True)
        with tf1.device(self.devices[move.dst]):
            all_values = _concat(values, axis, f"{self.name}.values/{GATHER}")
            all_indices = _concat(indices, axis, f"{self.name}.indices/{GATHER}")
            # TensorFlow 2 has this on GPUs. 1.15 has it on the CPU only, where indices then go.
            unique, places = tf.unique(all_indices, name=f"{self.name}.indices/unique")
            height = tf.size(unique, name=f"{self.name}.indices/height")
            total = tf.math.unsorted_segment_sum(
                all_values, places, height, name=f"{self.name}.values/{SUM}"
            )
        return tf.IndexedSlices(total, unique)

    def complete(self, root: int, total: Any) -> Any:
        return tf.IndexedSlices(self._sum_of_values.complete(root, total.values), total.indices)

    def copy(self, move: Copy, slices: Any) -> Any:
        with tf1.device(self.devices[move.dst]):
            indices = tf.identity(slices.indices, name=f"{self.name}.indices/{COPY}")
        return tf.IndexedSlices(self._sum_of_values.copy(move, slices.values), indices)

    def as_result(self, own: Any, total: Any) -> Any:
        values = self._sum_of_values.as_result(own.values, total.values)
        return tf.IndexedSlices(values, total.indices, own.dense_shape)


def _concat(tensors: Sequence[Any], axis: Any, name: str) -> Any:
    # Grappler fuses a concat into its only consumer, another concat, even across devices, and a
    # gradient may be one. Then its parts would be sent. An axis that Grappler cannot read prevents
    # this.
    joined = tf.concat(tensors, axis, name=name)
    joined.set_shape(tf.TensorShape([None]).concatenate(tensors[0].shape[1:]))
    return joined


def gradient_of(column: Column, grads: Sequence[Any], tower: int, devices: Sequence[Any]) -> Any:
    """Return a tower's gradient of a column as it travels; called under the tower's device.

    Slices of a column that is dense on some tower are made dense. None becomes zeros, or no slices,
    and stays None where no tower has a gradient. ``grads`` are those of K towers.
    """
    grad = grads[tower]
    if grad is None and column.towers:
        grad = _nothing(column, grads, devices)
    if column.is_sparse:
        # A tower without a dense_shape gets another tower's, because all have one variable.
        shapes = [slices.dense_shape for slices in (grad, *grads) if slices is not None]
        shape = next((shape for shape in shapes if shape is not None), None)
        # GPUs get indices in int64, because TensorFlow has int32 in host memory.
        is_on_gpu = "GPU" in types_of(devices)
        indices = tf.cast(grad.indices, tf.int64) if is_on_gpu else grad.indices
        return tf.IndexedSlices(grad.values, indices, shape)
    return made_dense(grad, column.shape)


def made_dense(grad: Any, shape: Optional[tf.TensorShape] = None) -> Any:
    """Return the dense gradient of ``tf.IndexedSlices`` with a ``dense_shape``; others as it is.

    Slices without one have the ``shape``, if that is given.
    """
    if not isinstance(grad, tf.IndexedSlices):
        return grad
    # Its shape when the training step runs is that of the slices' tower, so that sums can check it.
    if grad.dense_shape is not None:
        shape = static_shape(grad)
    if shape is None:
        return grad
    # Slices of equal indices are added here, and a sum of 16 bits is formed in float32 everywhere.
    values = grad.values
    if dtype_of(grad) in NARROW_DTYPES:
        values = tf.cast(values, tf.float32)
    known_height = shape[:1].num_elements()
    height = grad.dense_shape[0] if known_height is None else known_height
    total = tf.math.unsorted_segment_sum(values, grad.indices, height)
    dense = tf.cast(total, grad.dtype)
    dense.set_shape(shape)
    return dense


def _nothing(column: Column, grads: Sequence[Any], devices: Sequence[Any]) -> Any:
    """Return zeros, or no slices, in the shape of the first tower's gradient that there is."""
    home = column.towers[0]
    shape: Any = column.shape
    if column.is_sparse:
        shape = tf.TensorShape([0]).concatenate(column.shape[1:])
    if not shape.is_fully_defined():
        # The shape is taken on that tower's device, so that only a shape is copied from there.
        with tf1.device(devices[home]):
            if column.is_sparse:
                shape = tf.concat([[0], tf.shape(grads[home].values)[1:]], 0)
            else:
                shape = tf.shape(gradient_of(column, grads, home, devices))
    zeros = tf.zeros(shape, column.dtype)
    if not column.is_sparse:
        return zeros
    return tf.IndexedSlices(zeros, tf.zeros([0], grads[home].indices.dtype))
