"""Entries ↔ chunk tensors on one tower, as ``planning.buckets`` laid them out. Nothing here crosses devices.

::

    entries      0 (2×3)  1 (4)  2 (8)
    chunks       [0│1]           [2 first half]  [2 second half]

Every op used here has a kernel on GPUs for the dtypes it is used with: docs/gpus.md, tests/graph/test_gpu_kernels.py.
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

import tensorflow as tf

from ..planning import Chunk, Piece
from .compat import carrier, tf1
from .gradients import dtype_of
from .pieces import Splitter


class Packer:
    """Packing and unpacking on one tower's device. All the ops share the tower's constants."""

    def __init__(self, device: Any, chunks: Sequence[Chunk], names: Sequence[str]):
        self._device, self._chunks, self._names = device, chunks, names
        self.splitter = Splitter(device)
        self._constants = self.splitter.constants
        self._cut: Dict[int, List[Piece]] = {}
        for piece in sorted(piece for chunk in chunks for piece in chunk.pieces if piece.stop is not None):
            self._cut.setdefault(piece.variable, []).append(piece)

    def pack(self, entries: Sequence[Any]) -> List[Any]:
        """Return the C chunk tensors of this tower's E entries, in the dtypes that carry them."""
        used = sorted({piece.variable for chunk in self._chunks for piece in chunk.pieces})
        carried = {variable: self._cast(entries[variable], carrier(dtype_of(entries[variable]))) for variable in used}
        if all(chunk.alone for chunk in self._chunks):
            return [carried[chunk.pieces[0].variable] for chunk in self._chunks]
        with tf1.device(self._device):
            parts: Dict[Piece, Any] = {}
            for variable, pieces in self._cut.items():
                parts.update(zip(pieces, self._split(self._flat(carried[variable]), pieces, "cut")))
            return [
                carried[chunk.pieces[0].variable]
                if chunk.alone
                else _joined([parts[piece] for piece in chunk.pieces], f"{name}/pack")
                for chunk, name in zip(self._chunks, self._names)
            ]

    def unpack(self, tensors: Sequence[Any], entries: Sequence[Any]) -> Dict[int, Any]:
        """Return the entries in these chunks by number, with the shapes and dtypes of ``entries``."""
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
        return {variable: self._cast(tensor, dtype_of(entries[variable])) for variable, tensor in unpacked.items()}

    def _cast(self, tensor: Any, dtype: str) -> Any:
        if dtype_of(tensor) == dtype:
            return tensor
        with tf1.device(self._device):
            return tf.cast(tensor, dtype)

    def _split(self, flat: Any, pieces: Sequence[Piece], name: str) -> List[Any]:
        sizes = [piece.stop - piece.start for piece in pieces if piece.stop is not None]
        return self.splitter.split(flat, sizes, len(pieces), name=name)

    def _flat(self, grad: Any) -> Any:
        return grad if grad.shape.ndims == 1 else tf.reshape(grad, self._constants[(-1,)])

    def _shaped(self, flat: Any, shape: Tuple[int, ...]) -> Any:
        return flat if len(shape) == 1 else tf.reshape(flat, self._constants[shape])


def _joined(parts: List[Any], name: str) -> Any:
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0, name=name)
