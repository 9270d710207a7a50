"""A stand-in for the backward pass: matrix products on each tower, after which gradients are ready one after another.

::

    tower k    product ─► product ─► product ─► …        as many as there are stages, each as long
                  ┊          ┊          ┊
               last       …          first variables     a gradient is ready after the product of its stage

The products keep a tower's device as busy as a backward pass does: sums and copies compete with them.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any, List

import tensorflow as tf

from ..bench import Case, Rows, session
from ..graph import is_sparse, tf1

STAGES = 16
_FIRST, _LEAST, _MOST = 256, 16, 8192  # rows of the matrices
_STEPS = 5  # timed steps of a calibration


class Backward:
    """The stand-in for a backward pass of ``seconds`` on all towers together; 0 makes all gradients ready at once.

    Attributes:
        rows: of the square matrices that are multiplied.
    """

    def __init__(self, case: Case, seconds: float):
        self._case = case
        self.rows = _calibrated(case, seconds) if seconds else 0

    def gate(self, grads: Rows) -> Rows:
        """Return K×N gradients, each ready after its stage; the last variable's is the first."""
        if not self.rows:
            return grads
        gated = []
        for device, row in zip(self._case.devices, grads):
            with tf.device(device):
                done = _products(self.rows)
                last = max(1, len(row) - 1)
                stages = [(last - number) * (STAGES - 1) // last for number in range(len(row))]
                gated.append([_after(done[stage], grad) for stage, grad in zip(stages, row)])
        return gated


def _products(rows: int) -> List[Any]:
    """Return the product of each stage on the current device; each needs the one before."""
    # entries of 1/rows keep the numbers at their size; random ones cannot be folded
    weights = tf.random.uniform([rows, rows], 0.9 / rows, 1.1 / rows, seed=1)
    product = tf.random.uniform([rows, rows], seed=2)
    products = []
    for _ in range(STAGES):
        product = tf.matmul(product, weights)
        products.append(product)
    return products


def _after(product: Any, grad: Any) -> Any:
    with tf1.control_dependencies([product]):
        if is_sparse(grad):
            return tf.IndexedSlices(tf.identity(grad.values), tf.identity(grad.indices), grad.dense_shape)
        return tf.identity(grad)


def _calibrated(case: Case, seconds: float) -> int:
    """Return the size of the matrices with which all towers together take about ``seconds``."""
    rows = _FIRST
    for _ in range(2):  # the second time from near by: the rate depends on the size
        measured = _measured(case, rows)
        rows = max(_LEAST, min(_MOST, round(rows * (seconds / measured) ** (1 / 3))))
    return rows


def _measured(case: Case, rows: int) -> float:
    """Return the median seconds of all towers' products."""
    graph = tf.Graph()
    with graph.as_default():
        ends: List[Any] = []
        for device in case.devices:
            with tf.device(device):
                ends.append(_products(rows)[-1].op)
        step = tf.group(*ends)
    with contextlib.closing(session(graph, case)) as alone:
        run = alone.make_callable(step)
        run()
        taken = []
        for _ in range(_STEPS):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)
