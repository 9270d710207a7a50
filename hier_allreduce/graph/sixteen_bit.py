"""Chunks that travel in 16 bits."""

from __future__ import annotations

from typing import Any, List

import tensorflow as tf

from ..compat import tf1
from ..planning import Reduce
from .sums import Context, Sum

NARROW_DTYPES = ("float16", "bfloat16")


class SixteenBitSum(Sum):
    """The sum of one chunk whose tensors travel in 16 bits.

    Each sum is formed in float32, and rounded before it is sent. A mean travels as the running mean
    of the contributions so far. So it overflows nowhere if the gradients do not, and small
    gradients do not vanish. docs/how-it-works.md has the error bound.

    Args:
        name: the chunk's, in op names.
        context: of the all-reduce.
        wire: the 16-bit dtype.
        dtype: of the gradients.
    """

    def __init__(self, name: str, context: Context, wire: str, dtype: str):
        super().__init__(name, context)
        self._wire = wire
        self._dtype = dtype
        self._contributions = [1] * len(self.devices)  # in each tower's sum so far

    def reduce(self, step: Reduce, here: Any, others: List[Any]) -> Any:
        wide = self.terms(step, here, others)
        return self.add(wide, [step.dst] * len(wide), step.dst)

    def terms(self, step: Reduce, here: Any, others: List[Any]) -> List[Any]:
        towers = (step.dst, *step.srcs)
        contributions = sum(self._contributions[tower] for tower in towers)
        values = [here]
        for src, value in zip(step.srcs, others):
            values.append(self._narrowed(src, value))
        wide = []
        with tf1.device(self.devices[step.dst]):
            for tower, value in zip(towers, values):
                share = self._contributions[tower] / contributions
                wide.append(self._wide(value, share))
        self._contributions[step.dst] = contributions
        return wide

    def at_root(self, root: int, total: Any) -> Any:
        share = self._contributions[root] / self.context.contributions
        with tf1.device(self.devices[root]):
            wide = self._wide(total, share)
        return self.over_hosts(root, self._narrowed(root, wide))

    def as_result(self, tower: int, value: Any) -> Any:
        return tf.cast(value, self._dtype, name=f"{self.name}/widened")

    def _wide(self, tensor: Any, share: float) -> Any:
        """Return a tensor in float32.

        If it is a running mean, multiply it by its ``share``, which is its weight in the mean of
        more towers that it becomes a part of.
        """
        wide = tf.cast(tensor, tf.float32, name=f"{self.name}/sum")
        if self.context.average and share < 1:
            return tf.multiply(wide, share, name=f"{self.name}/sum")
        return wide

    def _narrowed(self, tower: int, tensor: Any) -> Any:
        """Return a tensor in 16 bits, cast before it leaves its tower."""
        with tf1.device(self.devices[tower]):
            return tf.cast(tensor, self._wire, name=f"{self.name}/sent")
