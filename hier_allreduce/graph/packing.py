"""One tower's gradients ↔ its chunks. Nothing here crosses devices.

::

    columns      0 (2×3)  1 (4)  2 (8)
    chunks       [0│1]           [2 first half]  [2 second half]
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Sequence, Tuple

import tensorflow as tf

from ..planning import Range
from .layout import Layout
from .sums import Shared


class Packing:
    """Packs and unpacks each tower's chunks. The methods are called under the tower's device."""

    def __init__(self, layout: Layout, shared: Shared):
        self._layout, self._shared = layout, shared
        self._ranges: List[List[Range]] = [[] for _ in layout.columns]  # of each column, in order
        for part in sorted(part for chunk in layout.chunks for part in chunk.ranges):
            self._ranges[part.number].append(part)

    def pack(self, tower: int, grads: Sequence[Any]) -> List[Any]:
        """Return the C chunks of N gradients; None for a chunk of None."""
        parts: Dict[Range, Any] = {}
        for grad, ranges in zip(grads, self._ranges):
            if grad is not None:
                flat = grad if ranges[0].stop is None else self._shaped(tower, grad, [-1])
                parts.update(self._split(tower, flat, ranges, "cut"))
        chunks = zip(self._layout.chunks, self._layout.names)
        return [self._joined(tower, parts, chunk.ranges, f"{name}/pack") for chunk, name in chunks]

    def unpack(self, tower: int, reduced: Sequence[Any]) -> List[Any]:
        """Return the N gradients in C reduced chunks; None for a gradient that is in none of them."""
        parts: Dict[Range, Any] = {}
        for chunk, name, value in zip(self._layout.chunks, self._layout.names, reduced):
            if value is not None:
                parts.update(self._split(tower, value, chunk.ranges, f"{name}/unpack"))
        results = []
        for ranges, column in zip(self._ranges, self._layout.columns):
            flat = self._joined(tower, parts, ranges, "joined")
            is_whole = flat is None or ranges[0].stop is None
            results.append(flat if is_whole else self._shaped(tower, flat, column.shape.as_list()))
        return results

    def _split(
        self, tower: int, flat: Any, ranges: Sequence[Range], name: str
    ) -> Iterable[Tuple[Range, Any]]:
        """Return the ranges in a gradient or chunk, each with its tensor."""
        if len(ranges) == 1:
            return [(ranges[0], flat)]
        sizes = tuple(part.stop - part.start for part in ranges if part.stop is not None)
        constants = self._shared.constant(tower, sizes), self._shared.constant(tower, 0)
        return zip(ranges, tf.split(flat, *constants, num=len(ranges), name=name))

    def _joined(
        self, tower: int, parts: Dict[Range, Any], ranges: Sequence[Range], name: str
    ) -> Any:
        """Return the tensor of some ranges; None if they have no tensors."""
        if not any(part in parts for part in ranges):
            return None
        tensors = [parts[part] for part in ranges]
        return (
            tf.concat(tensors, self._shared.constant(tower, 0), name=name)
            if len(tensors) > 1
            else tensors[0]
        )

    def _shaped(self, tower: int, tensor: Any, shape: List[int]) -> Any:
        if tensor.shape.ndims == 1 == len(shape):
            return tensor
        return tf.reshape(tensor, self._shared.constant(tower, tuple(shape)))
