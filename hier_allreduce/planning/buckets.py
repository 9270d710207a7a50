"""Which gradients travel together: gradients ↔ flat chunks, as integers. No tensors.

::

    variables      0 ────  1 ─  2 ──────────────────  3 ─  4 ──      (bytes)
    buckets        [4 3 1]  [0]  [2]                                 small ones share, in readiness order
    chunks         4│3│1     0    2a 2b                              a bucket may be cut for several mains

A chunk is a list of pieces; a piece is a range of elements of one flattened gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

# TensorFlow's allocator aligns to 64 bytes. A slice that starts at such an offset shares its parent's buffer.
ALIGNMENT = 64


class Spec(NamedTuple):
    """The size and dtype of one gradient; ``elements`` is None if the shape is known only at run time."""

    elements: Optional[int]
    itemsize: int
    dtype: str
    packable: bool = True  # False: it travels alone, whatever its size

    @property
    def bytes(self) -> int:
        """The size in bytes; 0 if it is unknown."""
        return (self.elements or 0) * self.itemsize


class Piece(NamedTuple):
    """Elements ``start:stop`` of gradient ``number``, flattened; if ``stop`` is None, the whole one, not flattened."""

    number: int
    start: int
    stop: Optional[int]


class Chunk(NamedTuple):
    """Pieces of one dtype that travel as one tensor, and their bytes (0 if known only at run time)."""

    pieces: Tuple[Piece, ...]
    bytes: int

    @property
    def alone(self) -> bool:
        """Whether this is one whole gradient, which needs no packing."""
        return len(self.pieces) == 1 and self.pieces[0].stop is None


@dataclass(frozen=True)
class Bucketing:
    """How gradients are grouped; all sizes in bytes."""

    pack_below: int = 64 << 10
    bucket_bytes: int = 10 << 20
    splits: int = 0


def make_buckets(specs: Sequence[Spec], bucketing: Bucketing) -> List[Chunk]:
    """Group N gradients in readiness order: the last variable's gradient is ready first.

    Args:
        specs: N gradients.
        bucketing: gradients smaller than ``pack_below`` share buckets of at most ``bucket_bytes``, one dtype each.
            Larger ones and those of unknown size travel alone. ``splits`` > 0 instead concatenates all gradients of a
            dtype and cuts them into that many equal chunks.

    Returns:
        Chunks that hold each element of each gradient exactly once.
    """
    readiness_order = range(len(specs) - 1, -1, -1)
    group = _by_dtype if bucketing.splits else _small_together
    chunks: List[Chunk] = []
    for numbers in group(readiness_order, specs, bucketing):
        chunks += cut(_bucket(numbers, specs), specs, [1] * max(1, bucketing.splits))
    return chunks


def _by_dtype(order: Iterable[int], specs: Sequence[Spec], bucketing: Bucketing) -> List[List[int]]:
    """Group all gradients of a dtype; those that cannot be packed are alone."""
    groups: Dict[str, List[int]] = {}
    for number in order:
        key = specs[number].dtype if _can_pack(specs[number]) else f"alone {number}"
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def _small_together(order: Iterable[int], specs: Sequence[Spec], bucketing: Bucketing) -> List[List[int]]:
    """Group small gradients of a dtype, up to ``bucket_bytes``; larger ones are alone."""
    groups: List[List[int]] = []
    open_bucket: Dict[str, List[int]] = {}
    room: Dict[str, int] = {}
    for number in order:
        spec = specs[number]
        if not _can_pack(spec) or spec.bytes >= bucketing.pack_below:
            groups.append([number])
            continue
        if spec.dtype not in open_bucket or spec.bytes > room[spec.dtype]:
            open_bucket[spec.dtype], room[spec.dtype] = [], bucketing.bucket_bytes
            groups.append(open_bucket[spec.dtype])
        open_bucket[spec.dtype].append(number)
        room[spec.dtype] -= spec.bytes
    return groups


def _can_pack(spec: Spec) -> bool:
    return spec.packable and spec.bytes > 0  # of known size, and not empty; strings have no size


def _bucket(numbers: Sequence[int], specs: Sequence[Spec]) -> Chunk:
    if len(numbers) == 1:
        return Chunk((Piece(numbers[0], 0, None),), specs[numbers[0]].bytes)
    return Chunk(tuple(Piece(v, 0, specs[v].elements) for v in numbers), sum(specs[v].bytes for v in numbers))


def cut(chunk: Chunk, specs: Sequence[Spec], shares: Sequence[float]) -> List[Chunk]:
    """Cut a chunk into consecutive ones in proportion to ``shares``.

    The offsets are multiples of 64 bytes. A chunk of unknown size, or with less than 64 bytes for each share, is not
    cut. A share that rounds to zero gives no chunk.
    """
    first = specs[chunk.pieces[0].number]
    if not _can_pack(first):
        return [chunk]
    itemsize = first.itemsize
    elements = chunk.bytes // itemsize
    step = max(1, ALIGNMENT // itemsize)
    if len(shares) < 2 or elements < len(shares) * step:
        return [chunk]
    total = float(sum(shares))
    ends = [min(elements, round(elements * reached / total / step) * step) for reached in accumulate(shares)]
    bounds = [0, *ends[:-1], elements]
    return [
        Chunk(_range(chunk.pieces, start, stop, elements), (stop - start) * itemsize)
        for start, stop in zip(bounds, bounds[1:])
        if stop > start
    ]


def _range(pieces: Sequence[Piece], start: int, stop: int, elements: int) -> Tuple[Piece, ...]:
    """Return the elements ``start:stop`` of the concatenated pieces."""
    selected, offset = [], 0
    for number, first, last in pieces:
        size = (elements if last is None else last) - first
        low, high = max(start - offset, 0), min(stop - offset, size)
        if low < high:
            selected.append(Piece(number, first + low, first + high))
        offset += size
    return tuple(selected)


def balanced(sizes: Sequence[int], mains: Sequence[int]) -> List[int]:
    """Return one of ``mains`` for each chunk so that all mains carry nearly the same bytes; equal sizes rotate.

    The largest chunk goes first, to the least loaded main. Source: Graham's longest-processing-time rule, whose largest
    load is at most 4/3 of the best possible.
    """
    load = [(0, 0, main) for main in mains]  # bytes, chunks, main
    chosen = [mains[0]] * len(sizes)
    for chunk in sorted(range(len(sizes)), key=lambda c: -sizes[c]):
        carried, count, main = min(load)
        chosen[chunk] = main
        load[main] = (carried + sizes[chunk], count + 1, main)
    return chosen
