"""One tower's gradients ↔ its chunks. Nothing here crosses devices.

::

    columns      0 (2×3)  1 (4)  2 (8)
    chunks       [0│1]           [2, first part]  [2, second part]
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

import tensorflow as tf

from ..planning import Range
from .layout import Layout
from .sums import Context


class Packing:
    """Packs and unpacks each tower's chunks. The methods are called under the tower's device."""

    def __init__(self, layout: Layout, context: Context):
        self._layout = layout
        self._context = context
        self._ranges: List[List[Range]] = [[] for _ in layout.columns]  # of each column, in order
        for chunk in layout.chunks:
            for part in chunk.ranges:
                self._ranges[part.number].append(part)
        for ranges in self._ranges:
            ranges.sort()

    def pack(self, tower: int, grads: Sequence[Any]) -> List[Any]:
        """Return the C chunks of N gradients; None for a chunk of None."""
        parts: Dict[Range, Any] = {}
        for grad, ranges in zip(grads, self._ranges):
            if grad is not None:
                flat = grad if ranges[0].stop is None else self._shaped(tower, grad, [-1])
                parts.update(self._split(tower, flat, ranges, "cut"))
        chunks = []
        for chunk in self._layout.chunks:
            chunks.append(self._joined(tower, parts, chunk.ranges, f"{chunk.name}/pack"))
        return chunks

    def unpack(self, tower: int, chunks: Sequence[Any]) -> List[Any]:
        """Return the N gradients in C reduced chunks; None for one that is in none of them."""
        parts: Dict[Range, Any] = {}
        for chunk, value in zip(self._layout.chunks, chunks):
            if value is not None:
                parts.update(self._split(tower, value, chunk.ranges, f"{chunk.name}/unpack"))
        results = []
        for ranges, column in zip(self._ranges, self._layout.columns):
            result = self._joined(tower, parts, ranges, "joined")
            if result is not None and ranges[0].stop is not None:
                result = self._shaped(tower, result, column.shape.as_list())
            results.append(result)
        return results

    def _split(self, tower: int, flat: Any, ranges: Sequence[Range], name: str) -> Dict[Range, Any]:
        """Return the tensor of each range in a gradient or chunk."""
        if len(ranges) == 1:
            return {ranges[0]: flat}
        sizes = [part.stop - part.start for part in ranges if part.stop is not None]
        lengths = self._context.constant(tower, tuple(sizes))
        axis = self._context.constant(tower, 0)
        return dict(zip(ranges, tf.split(flat, lengths, axis, num=len(ranges), name=name)))

    def _joined(
        self, tower: int, parts: Dict[Range, Any], ranges: Sequence[Range], name: str
    ) -> Optional[Any]:
        """Return the tensor of some ranges; None if one has no tensor."""
        if not ranges or not all(part in parts for part in ranges):
            return None
        tensors = [parts[part] for part in ranges]
        if len(tensors) == 1:
            return tensors[0]
        return tf.concat(tensors, self._context.constant(tower, 0), name=name)

    def _shaped(self, tower: int, tensor: Any, shape: List[int]) -> Any:
        """Return a tensor in a shape; a vector is one already."""
        if tensor.shape.ndims == 1 == len(shape):
            return tensor
        return tf.reshape(tensor, self._context.constant(tower, tuple(shape)))
