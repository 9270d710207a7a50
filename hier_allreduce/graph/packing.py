"""One tower's gradients ↔ its chunks. Nothing here crosses devices.

::

    columns      0 (2×3)  1 (4)  2 (8)
    chunks       [0│1]           [2 first half]  [2 second half]
"""

from __future__ import annotations

from functools import partial
from typing import Any, Dict, List, Sequence

import tensorflow as tf

from ..planning import Range
from .layout import Layout
from .sums import Shared


class Tower:
    """Packs and unpacks one tower's chunks. The methods are called under its device."""

    def __init__(self, tower: int, layout: Layout, shared: Shared):
        self._layout, self._constant = layout, partial(shared.constant, tower)
        # of each column that is packed or cut, its ranges in order
        self._ranges: Dict[int, List[Range]] = {}
        for part in sorted(part for chunk in layout.chunks if not chunk.is_alone for part in chunk.ranges):
            self._ranges.setdefault(part.number, []).append(part)

    def pack(self, grads: Sequence[Any]) -> List[Any]:
        """Return the C chunks of N gradients; None for a chunk of None."""
        parts: Dict[Range, Any] = {}
        for number, ranges in self._ranges.items():
            if grads[number] is not None:
                parts.update(zip(ranges, self._split(self._shaped(grads[number], [-1]), ranges, "cut")))
        return [
            grads[chunk.ranges[0].number]
            if chunk.is_alone or grads[chunk.ranges[0].number] is None
            else _joined([parts[part] for part in chunk.ranges], f"{name}/pack")
            for chunk, name in zip(self._layout.chunks, self._layout.names)
        ]

    def unpack(self, reduced: Sequence[Any]) -> List[Any]:
        """Return the N gradients in C reduced chunks; None for a gradient that is in none of them."""
        results: List[Any] = [None] * len(self._layout.columns)
        parts: Dict[Range, Any] = {}
        for chunk, name, value in zip(self._layout.chunks, self._layout.names, reduced):
            if chunk.is_alone:
                results[chunk.ranges[0].number] = value
            elif value is not None:
                parts.update(zip(chunk.ranges, self._split(value, chunk.ranges, f"{name}/unpack")))
        for number, ranges in self._ranges.items():
            if ranges[0] in parts:
                flat = _joined([parts[part] for part in ranges], "joined")
                results[number] = self._shaped(flat, self._layout.columns[number].shape.as_list())
        return results

    def _split(self, flat: Any, ranges: Sequence[Range], name: str) -> List[Any]:
        if len(ranges) == 1:
            return [flat]
        sizes = self._constant([part.stop - part.start for part in ranges if part.stop is not None])
        return list(tf.split(flat, sizes, num=len(ranges), name=name))

    def _shaped(self, tensor: Any, shape: List[int]) -> Any:
        return tensor if tensor.shape.ndims == 1 == len(shape) else tf.reshape(tensor, self._constant(shape))


def _joined(parts: List[Any], name: str) -> Any:
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0, name=name)
