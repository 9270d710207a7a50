"""A tower's gradients ↔ chunks, as ``planning.buckets`` laid them out. Nothing here crosses devices.

::

    units        0 (2×3)  1 (4)  2 (8)
    chunks       [0│1]           [2 first half]  [2 second half]

Every op used here has a kernel on GPUs for the dtypes it is used with: docs/gpus.md, tests/graph/test_gpu_kernels.py.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Sequence, Tuple, Union

import tensorflow as tf

from ..planning import Chunk, Piece
from .compat import carrier, tf1
from .devices import all_on_cpu
from .gradients import dtype_of

# GPUs have no Split for int64. A bitcast moves nothing.
_CARRIED_AS = {"int64": "float64"}

Tensors = Tuple[Any, ...]  # of one chunk or unit: one, or the parts of sparse gradients


class Constants(Dict[Tuple[int, ...], Any]):
    """The int32 vectors of a graph by their numbers. Each is made once, on the device where it is first needed."""

    def __missing__(self, numbers: Tuple[int, ...]) -> Any:
        self[numbers] = tf.constant(numbers, tf.int32, [len(numbers)])
        return self[numbers]


class Splitter:
    """Cuts tensors on one device. All the ops share the device's constants."""

    def __init__(self, device: Any):
        self.device, self._on_cpu = device, all_on_cpu([device])
        self.constants = Constants()

    def split(self, tensor: Any, sizes: Union[Sequence[int], Any], count: int, name: str = "split") -> List[Any]:
        """Return ``count`` pieces of a tensor along its first axis.

        Args:
            tensor: on this device.
            sizes: the sizes of the pieces: numbers, or an int32 tensor of them.
            count: how many there are.
            name: the name of the op.
        """
        if count == 1:
            return [tensor]
        dtype = dtype_of(tensor)
        through = dtype if self._on_cpu else _CARRIED_AS.get(dtype, dtype)
        with tf1.device(self.device):
            if isinstance(sizes, (list, tuple)):
                sizes = self.constants[tuple(int(size) for size in sizes)]
            whole = tensor if through == dtype else tf.bitcast(tensor, through)
            pieces = tf.split(whole, sizes, num=count, name=name)
            return list(pieces) if through == dtype else [tf.bitcast(piece, dtype) for piece in pieces]


class Packer:
    """Packs and unpacks chunks on one tower's device.

    Args:
        splitter: the tower's.
        chunks: C chunks.
        names: for each chunk the names of its parts.
    """

    def __init__(self, splitter: Splitter, chunks: Sequence[Chunk], names: Sequence[Tuple[str, ...]]):
        self._splitter, self._chunks = splitter, chunks
        self._names = [own[0] for own in names]

    def pack(self, units: Sequence[Tensors], wanted: Iterable[int]) -> Dict[int, Tensors]:
        """Return the tensors of each wanted chunk, in the dtypes that carry them; ``units`` are those of this tower."""
        chunks = {number: self._chunks[number] for number in wanted}
        used = sorted({piece.number for chunk in chunks.values() for piece in chunk.pieces})
        carried = {number: tuple(self._cast(t, carrier(dtype_of(t))) for t in units[number]) for number in used}
        with tf1.device(self._splitter.device):
            parts: Dict[Piece, Any] = {}
            for number, pieces in _cut(chunks.values()).items():
                parts.update(zip(pieces, self._split(self._flat(carried[number][0]), pieces, "cut")))
            return {
                number: carried[chunk.pieces[0].number]
                if chunk.alone
                else (_joined([parts[piece] for piece in chunk.pieces], f"{self._names[number]}/pack"),)
                for number, chunk in chunks.items()
            }

    def unpack(self, reduced: Dict[int, Tensors], units: Sequence[Tensors]) -> Dict[int, Tensors]:
        """Return the units in reduced chunks by number, with the shapes and dtypes of this tower's ``units``."""
        unpacked: Dict[int, Tensors] = {}
        parts: Dict[Piece, Any] = {}
        chunks = {number: self._chunks[number] for number in reduced}
        with tf1.device(self._splitter.device):
            for number, chunk in chunks.items():
                if chunk.alone:
                    unpacked[chunk.pieces[0].number] = reduced[number]
                else:
                    pieces = self._split(reduced[number][0], chunk.pieces, f"{self._names[number]}/unpack")
                    parts.update(zip(chunk.pieces, pieces))
            for number, cut in _cut(chunks.values()).items():
                flat = _joined([parts[piece] for piece in cut], "joined")
                unpacked[number] = (self._shaped(flat, tuple(units[number][0].shape.as_list())),)
        return {
            number: tuple(self._cast(tensor, dtype_of(own)) for tensor, own in zip(tensors, units[number]))
            for number, tensors in unpacked.items()
        }

    def _cast(self, tensor: Any, dtype: str) -> Any:
        if dtype_of(tensor) == dtype:
            return tensor
        with tf1.device(self._splitter.device):
            return tf.cast(tensor, dtype)

    def _split(self, flat: Any, pieces: Sequence[Piece], name: str) -> List[Any]:
        sizes = [piece.stop - piece.start for piece in pieces if piece.stop is not None]
        return self._splitter.split(flat, sizes, len(pieces), name=name)

    def _flat(self, grad: Any) -> Any:
        return grad if grad.shape.ndims == 1 else tf.reshape(grad, self._splitter.constants[(-1,)])

    def _shaped(self, flat: Any, shape: Tuple[int, ...]) -> Any:
        return flat if len(shape) == 1 else tf.reshape(flat, self._splitter.constants[shape])


def _cut(chunks: Iterable[Chunk]) -> Dict[int, List[Piece]]:
    """Return the pieces of each unit that is cut, in order."""
    cut: Dict[int, List[Piece]] = {}
    for piece in sorted(piece for chunk in chunks for piece in chunk.pieces if piece.stop is not None):
        cut.setdefault(piece.number, []).append(piece)
    return cut


def _joined(parts: List[Any], name: str) -> Any:
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0, name=name)
