"""Chunks that travel in 16 bits."""

from __future__ import annotations

from typing import Any, List

import tensorflow as tf

from ..compat import tf1
from ..planning.plan import Reduce
from .op_names import SENT, SUM
from .sums import Context, Sum

NARROW_DTYPES = ("float16", "bfloat16")


class SixteenBitSum(Sum):
    """The sum of one chunk whose tensors travel in 16 bits.

    Each sum is formed in float32, and rounded before it is sent. A mean travels as the running mean
    of the contributions so far. So it overflows nowhere if the gradients do not, and small
    gradients do not vanish. docs/how-it-works.md has the error bound. ``wire`` is the 16-bit dtype.
    """

    def __init__(self, name: str, context: Context, wire: str):
        super().__init__(name, context)
        self._wire = wire
        self._contributions = [1] * len(self.devices)  # in each tower's sum so far

    def terms(self, move: Reduce, here: Any, received: List[Any]) -> List[Any]:
        # Narrow each sum on the tower that sends it, because 16 bits shall cross.
        tensors = [here]
        for src, tensor in zip(move.srcs, received):
            tensors.append(self._narrowed(src, tensor))

        # Weigh each running mean by the towers that are in it, since all count the same in the end.
        towers = (move.dst, *move.srcs)
        contributions = sum(self._contributions[tower] for tower in towers)
        wide = []
        with tf1.device(self.devices[move.dst]):
            for tower, tensor in zip(towers, tensors):
                weight = self._contributions[tower] / contributions
                wide.append(self._wide(tensor, weight))
        self._contributions[move.dst] = contributions
        return wide

    def complete(self, root: int, total: Any) -> Any:
        # With several hosts the root's mean is a part of the mean over all of them.
        weight = self._contributions[root] / self.context.contributions
        with tf1.device(self.devices[root]):
            wide = self._wide(total, weight)
        return self.over_hosts(root, self._narrowed(root, wide))

    def as_result(self, own: Any, total: Any) -> Any:
        return tf.cast(total, own.dtype, name=f"{self.name}/widened")

    def _wide(self, tensor: Any, weight: float) -> Any:
        """Return a tensor in float32.

        If it is a running mean, multiply it by its weight in the mean that it becomes part of.
        """
        wide = tf.cast(tensor, tf.float32, name=f"{self.name}/{SUM}")
        if self.context.layout.average and weight < 1:
            return tf.multiply(wide, weight, name=f"{self.name}/{SUM}")
        return wide

    def _narrowed(self, tower: int, tensor: Any) -> Any:
        """Return a tensor in 16 bits, cast before it leaves its tower."""
        with tf1.device(self.devices[tower]):
            return tf.cast(tensor, self._wire, name=f"{self.name}/{SENT}")
