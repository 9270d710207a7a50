"""The kernels of a pass on a real GPU.

::

    host: an addition of n int32 ─► scan ─► host: addition ─► scan ─► …        of one tower
                                       └─► gradient

A scan of one row occupies one block of a GPU, so the passes of logical GPUs do not compete for
their chip. The additions keep the host busy; how long they are is fed in each step.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Sequence

import tensorflow as tf
from training_step import Tower, Variable

tf1 = tf.compat.v1
raw = tf.raw_ops

LONGEST = 1 << 20  # elements of a scan: 0.8 ms on an H100
SIZES = sorted({int(LONGEST / 1.28**step) for step in range(24)})
CALIBRATED = (SIZES[0], LONGEST)
HOST_WORK = "host_work"  # the placeholder


class Scans:
    """How long scans take, by their number of elements: a line through the two calibrated ones."""

    def __init__(self, microseconds: Dict[int, float]):
        """Take the µs of two sizes."""
        least, most = min(microseconds), max(microseconds)
        self._slope = (microseconds[most] - microseconds[least]) / (most - least)
        self._base = microseconds[least] - self._slope * least

    def lasting(self, microseconds: float) -> List[int]:
        """Return the sizes of scans that take so long, one after another."""
        pieces = max(1, math.ceil(microseconds / (self._base + self._slope * LONGEST)))
        wanted = (microseconds / pieces - self._base) / self._slope
        return [min(SIZES, key=lambda size: abs(size - wanted))] * pieces


class RealTower(Tower):
    """A chain of scans on a GPU. Each waits for the one before, and for the host's work."""

    def __init__(self, number: int, device: str, scans: Optional[Scans]):
        """Begin the chain. The first tower of a graph makes the placeholder.

        Without scans there is no pass.
        """
        super().__init__(number, device)
        self._scans = scans
        self._rows: Dict[int, Any] = {}
        graph = tf1.get_default_graph()
        if number == 0:
            tf1.placeholder(tf.int32, [None], HOST_WORK)
        self._work = self._worked = graph.get_tensor_by_name(f"{HOST_WORK}:0")
        self._last: List[Any] = []  # at most one op
        self._number = number

    def launch(self, name: str, microseconds: float) -> None:
        """Add the next kernels."""
        with tf.control_dependencies(self._last):
            self._worked = raw.AddV2(x=self._worked, y=self._work)
        self._last = [self._worked.op]
        assert self._scans is not None
        for size in self._scans.lasting(microseconds):
            with tf.control_dependencies(self._last):
                scan = raw.Cumsum(x=self._row(size), axis=0, exclusive=False, reverse=False)
            self._last = [scan.op]

    def gradient(self, name: str, shape: Sequence[int]) -> Any:
        """Return a gradient that is ready when the last scan has run."""
        with tf.control_dependencies(self._last):
            return tf.fill(shape, self._value, name=name)

    def _row(self, size: int) -> Any:
        """Return the row that scans of a size read."""
        if size not in self._rows:
            variable = Variable(f"row{size}_{self._number}", (size,), self.device, 1.0)
            self.variables.append(variable)
            with tf.control_dependencies(None):
                self._rows[size] = variable.read()
        return self._rows[size]
