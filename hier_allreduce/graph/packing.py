"""Entries ↔ chunk tensors on one tower, as ``planning.buckets`` laid them out. Nothing here crosses devices.

::

    entries      0 (2×3)  1 (4)  2 (8)
    chunks       [0│1]           [2 first half]  [2 second half]
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

import tensorflow as tf

from ..planning import Chunk, Piece
from .compat import tf1


class Constants(Dict[Tuple[int, ...], Any]):
    """The int32 vectors of a graph by their numbers. Each is made once, on the device where it is first needed."""

    def __missing__(self, numbers: Tuple[int, ...]) -> Any:
        self[numbers] = tf.constant(numbers, tf.int32, [len(numbers)])
        return self[numbers]


class Packer:
    """Packing and unpacking on one tower's device. All the ops share the tower's constants."""

    def __init__(self, device: Any, chunks: Sequence[Chunk], names: Sequence[str]):
        self._device, self._chunks, self._names = device, chunks, names
        self._constants = Constants()
        self._cut: Dict[int, List[Piece]] = {}
        for piece in sorted(piece for chunk in chunks for piece in chunk.pieces if piece.stop is not None):
            self._cut.setdefault(piece.variable, []).append(piece)

    def pack(self, entries: Sequence[Any]) -> List[Any]:
        """Return the C chunk tensors of this tower's E entries."""
        if all(chunk.alone for chunk in self._chunks):
            return [entries[chunk.pieces[0].variable] for chunk in self._chunks]
        with tf1.device(self._device):
            parts: Dict[Piece, Any] = {}
            for variable, pieces in self._cut.items():
                parts.update(zip(pieces, self._split(self._flat(entries[variable]), pieces, "cut")))
            return [
                entries[chunk.pieces[0].variable]
                if chunk.alone
                else _joined([parts[piece] for piece in chunk.pieces], f"{name}/pack")
                for chunk, name in zip(self._chunks, self._names)
            ]

    def unpack(self, tensors: Sequence[Any], entries: Sequence[Any]) -> Dict[int, Any]:
        """Return the entries in these chunks by number, with the shapes of ``entries``."""
        unpacked: Dict[int, Any] = {}
        parts: Dict[Piece, Any] = {}
        with tf1.device(self._device):
            for chunk, tensor, name in zip(self._chunks, tensors, self._names):
                if chunk.alone:
                    unpacked[chunk.pieces[0].variable] = tensor
                else:
                    parts.update(zip(chunk.pieces, self._split(tensor, chunk.pieces, f"{name}/unpack")))
            for variable, pieces in self._cut.items():
                flat = _joined([parts[piece] for piece in pieces], "joined")
                unpacked[variable] = self._shaped(flat, tuple(entries[variable].shape.as_list()))
        return unpacked

    def _split(self, flat: Any, pieces: Sequence[Piece], name: str) -> List[Any]:
        if len(pieces) == 1:
            return [flat]
        sizes = tuple(piece.stop - piece.start for piece in pieces if piece.stop is not None)
        return list(tf.split(flat, self._constants[sizes], num=len(sizes), name=name))

    def _flat(self, grad: Any) -> Any:
        return grad if grad.shape.ndims == 1 else tf.reshape(grad, self._constants[(-1,)])

    def _shaped(self, flat: Any, shape: Tuple[int, ...]) -> Any:
        return flat if len(shape) == 1 else tf.reshape(flat, self._constants[shape])


def _joined(parts: List[Any], name: str) -> Any:
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0, name=name)
