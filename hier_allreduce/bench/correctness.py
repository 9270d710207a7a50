"""The error of a contender's results, compared with the same sum (or mean) in float64.

Only a sample of each result is compared: evenly spaced elements of a dense one, all touched rows of a sparse one.
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import numpy as np
import tensorflow as tf

from .case import Case, Rows, session, variables

# Relative. Half precision stays within it; leaving out a tower changes a sum of about K/2 by up to 1.
TOLERANCE = 0.05
_SAMPLES = 4096  # compared elements of each dense result
_HOST = "/cpu:0"  # where rows are compared: GPUs of TensorFlow 1.15 cannot search or sort
_SMALLEST = 1e-3  # the divisor of the relative error where the exact result is smaller


def exact_result(case: Case) -> List[Any]:
    """Return a sample of each variable's sum (or mean), added up in float64: N vectors."""
    graph = tf.Graph()
    with graph.as_default():
        grads, fill = variables(case)
        with session(graph, case) as running:
            running.run(fill)
            rows = running.run(samples(grads, grads, case))
    divisor = len(case.devices) if case.average else 1
    return [sum(vector.astype(np.float64) for vector in column) / divisor for column in zip(*rows)]


def largest_error(running: Any, grads: Rows, reduced: Rows, case: Case, exact: Sequence[Any]) -> float:
    """Return the largest relative error of any tower's result; infinity if a result has another shape.

    Args:
        running: the session to run in.
        grads: the K×N gradients.
        reduced: the contender's K×N results.
        case: what is reduced.
        exact: what :func:`exact_result` returns for it.
    """
    largest = 0.0
    for row in running.run(samples(reduced, grads, case)):
        for result, expected in zip(row, exact):
            if result.shape != expected.shape:
                return float("inf")
            error = np.abs(result.astype(np.float64) - expected) / np.maximum(np.abs(expected), _SMALLEST)
            largest = max(largest, float(np.max(error, initial=0.0)))
    return largest


def samples(rows: Rows, grads: Rows, case: Case) -> List[List[Any]]:
    """Return a vector of samples of each of the K×N values: on its device, rows of sparse ones on the host."""
    with tf.device(_HOST):
        touched_rows = [_touched_rows(column) for column in zip(*grads)]
        flat = tf.constant([-1])
        start = tf.constant([0])
        strides = [tf.constant([max(1, shape.elements // _SAMPLES)]) for shape in case.shapes]

    def sample(value: Any, touched: Optional[Any], stride: Any) -> Any:
        if touched is not None:
            return _rows_of(value, touched)
        vector = tf.reshape(value, flat)
        return tf.raw_ops.StridedSlice(input=vector, begin=start, end=start, strides=stride, end_mask=1)

    taken = []
    for device, row in zip(case.devices, rows):
        with tf.device(device):
            taken.append([sample(*arguments) for arguments in zip(row, touched_rows, strides)])
    return taken


def _touched_rows(column: Sequence[Any]) -> Optional[Any]:
    """Return the sorted indices of the rows that any tower has, or None for a dense gradient."""
    if not isinstance(column[0], tf.IndexedSlices):
        return None
    return tf.sort(tf.unique(tf.concat([grad.indices for grad in column], 0))[0])


def _rows_of(value: Any, touched: Any) -> Any:
    """Return the rows ``touched`` of a dense or sparse value; equal indices of a sparse one are added up."""
    if not isinstance(value, tf.IndexedSlices):
        return tf.gather(value, touched)
    with tf.device(_HOST):
        places = tf.searchsorted(touched, tf.cast(value.indices, touched.dtype))
        return tf.math.unsorted_segment_sum(tf.cast(value.values, tf.float64), places, tf.size(touched))
