"""One tower's gradients ↔ its chunks. Nothing here crosses devices.

::

    columns      0 (2×3)  1 (4)  2 (8)
    chunks       [0│1]           [2, first part]  [2, second part]

Both functions are called under the tower's device.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

import tensorflow as tf

from ..planning.chunks import Range
from .op_names import CUT, FLAT, JOINED, PACK, SHAPED, UNPACK
from .sums import Context


def pack(context: Context, tower: int, grads: Sequence[Any]) -> List[Any]:
    """Return the C chunks of a tower's N gradients; None for a chunk of None."""
    tensor_by_range: Dict[Range, Any] = {}
    for grad, ranges in zip(grads, context.ranges):
        if grad is not None:
            # A vector is flat already, and a whole gradient keeps its shape.
            if not ranges[0].is_whole and grad.shape.ndims != 1:
                grad = tf.reshape(grad, context.constant(tower, (-1,)), name=FLAT)
            tensor_by_range.update(_split(context, tower, grad, ranges, CUT))
    chunks = []
    for chunk in context.layout.chunks:
        op_name = f"{chunk.name}/{PACK}"
        chunks.append(_joined(context, tower, tensor_by_range, chunk.ranges, op_name))
    return chunks


def unpack(context: Context, tower: int, chunks: Sequence[Any]) -> List[Any]:
    """Return the N gradients in a tower's C reduced chunks; None for one that is in none."""
    tensor_by_range: Dict[Range, Any] = {}
    for chunk, reduced in zip(context.layout.chunks, chunks):
        if reduced is not None:
            op_name = f"{chunk.name}/{UNPACK}"
            tensor_by_range.update(_split(context, tower, reduced, chunk.ranges, op_name))
    grads = []
    for ranges, column in zip(context.ranges, context.layout.columns):
        grad = _joined(context, tower, tensor_by_range, ranges, JOINED)
        if grad is not None and not ranges[0].is_whole and column.shape.ndims != 1:
            lengths = context.constant(tower, tuple(column.shape.as_list()))
            grad = tf.reshape(grad, lengths, name=SHAPED)
        grads.append(grad)
    return grads


def _split(
    context: Context, tower: int, flat: Any, ranges: Sequence[Range], op_name: str
) -> Dict[Range, Any]:
    """Return the tensor of each range in a gradient or chunk."""
    if len(ranges) == 1:
        return {ranges[0]: flat}
    # Several ranges of one tensor all have an end, because a whole gradient is alone.
    sizes = [span.stop - span.start for span in ranges if span.stop is not None]
    lengths = context.constant(tower, tuple(sizes))
    axis = context.constant(tower, 0)
    return dict(zip(ranges, tf.split(flat, lengths, axis, num=len(ranges), name=op_name)))


def _joined(
    context: Context,
    tower: int,
    tensor_by_range: Dict[Range, Any],
    ranges: Sequence[Range],
    op_name: str,
) -> Optional[Any]:
    """Return the tensor of some ranges; None if one has no tensor."""
    if not ranges or not all(span in tensor_by_range for span in ranges):
        return None
    tensors = [tensor_by_range[span] for span in ranges]
    if len(tensors) == 1:
        return tensors[0]
    return tf.concat(tensors, context.constant(tower, 0), name=op_name)
