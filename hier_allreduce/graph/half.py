"""Chunks that travel in 16 bits."""

from __future__ import annotations

from typing import Any, List

import tensorflow as tf

from ..compat import tf1
from ..planning import Reduce
from .sums import Sum

NARROW_DTYPES = ("float16", "bfloat16")


class Half(Sum):
    """The sum of one chunk whose tensors travel in 16 bits: it is formed in float32, and rounded for each copy.

    A mean travels as the running mean of the contributions so far. So it overflows nowhere if the gradients do not,
    and small gradients do not vanish. docs/how-it-works.md has the error bound.

    Args:
        inside: the sum in float32.
        wire: the 16-bit dtype.
        dtype: of the gradients.
    """

    def __init__(self, inside: Sum, wire: str, dtype: str):
        super().__init__(inside.name, inside.shared)
        self._inside, self._wire, self._dtype = inside, wire, dtype
        self._towers = [1] * len(self.devices)  # the number of towers in each tower's sum so far

    def end(self, tower: int, value: Any) -> Any:
        return tf.cast(value, self._dtype, name=f"{self.name}/widened")

    def reduce(self, step: Reduce, here: Any, others: List[Any]) -> Any:
        added = (step.dst, *step.srcs)
        towers = sum(self._towers[tower] for tower in added)
        sent = [self._narrowed(src, tensor) for src, tensor in zip(step.srcs, others)]
        with tf1.device(self.devices[step.dst]):
            wide = [
                self._wide(tensor, self._towers[tower] / towers)
                for tower, tensor in zip(added, (here, *sent))
            ]
        self._towers[step.dst] = towers
        return self._inside.add(wide, [step.dst] * len(wide), step.dst)

    def finish(self, root: int, total: Any) -> Any:
        with tf1.device(self.devices[root]):
            share = self._wide(total, self._towers[root] / self.shared.contributions)
        return self.over_hosts(root, self._narrowed(root, share))

    def _wide(self, tensor: Any, weight: float) -> Any:
        """Return a sum in float32; of a running mean its share, by weight, in that of more towers."""
        wide = tf.cast(tensor, tf.float32, name=f"{self.name}/sum")
        return (
            tf.multiply(wide, weight, name=f"{self.name}/sum")
            if self.shared.average and weight < 1
            else wide
        )

    def _narrowed(self, tower: int, tensor: Any) -> Any:
        """Return a tensor in 16 bits, cast before it leaves its tower."""
        with tf1.device(self.devices[tower]):
            return tf.cast(tensor, self._wire, name=f"{self.name}/sent")
