"""Chunks that travel in 16 bits."""

from __future__ import annotations

from typing import Any, List, NamedTuple

import tensorflow as tf

from ..planning import Copy, Reduce
from .sums import Sum
from .tf import tf1

NARROW_DTYPES = ("float16", "bfloat16")


class _Partial(NamedTuple):
    """The sum, or running mean, of ``towers`` contributions."""

    tensor: Any
    towers: int


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

    def start(self, tower: int, tensor: Any) -> Any:
        return _Partial(tensor, 1)

    def end(self, tower: int, value: Any) -> Any:
        return tf.cast(value.tensor, self._dtype, name=f"{self.name}/widened")

    def reduce(self, step: Reduce, here: Any, others: List[Any]) -> Any:
        sent = [self._narrowed(src, partial) for src, partial in zip(step.srcs, others)]
        towers = sum(partial.towers for partial in (here, *sent))
        with tf1.device(self.devices[step.dst]):
            weighted = [self._weighted(partial, towers) for partial in (here, *sent)]
        return _Partial(self._inside.add(weighted, [step.dst] * len(weighted), step.dst), towers)

    def copy(self, step: Copy, value: Any) -> Any:
        return value._replace(tensor=super().copy(step, value.tensor))

    def finish(self, root: int, total: Any) -> Any:
        contributions = self.shared.contributions
        with tf1.device(self.devices[root]):
            share = self._weighted(total, contributions)
        narrow = self._narrowed(root, _Partial(share, contributions))
        return narrow._replace(tensor=self.over_hosts(root, narrow.tensor))

    def _weighted(self, partial: _Partial, towers: int) -> Any:
        """Return a sum in float32; of a running mean its share in the mean over ``towers``."""
        name = f"{self.name}/sum"
        wide = tf.cast(partial.tensor, tf.float32, name=name)
        if not self.shared.average or partial.towers == towers:
            return wide
        return tf.multiply(wide, partial.towers / towers, name=name)

    def _narrowed(self, tower: int, partial: _Partial) -> _Partial:
        """Return ``partial`` in 16 bits, cast before it leaves its tower."""
        with tf1.device(self.devices[tower]):
            return partial._replace(tensor=tf.cast(partial.tensor, self._wire, name=f"{self.name}/sent"))
