"""Gradients in chunks of one size: small ones packed up to it, larger ones cut evenly.

::

    variables   0 ────────────────  1 ─  2 ──  3 ─        (bytes; the last one is ready first)
    chunks      0a | 0b | 0c        [3 2 1]
"""

from __future__ import annotations

from itertools import accumulate
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from .plan import Schedule, root_of

# A slice at such an offset of a tensor, in bytes, shares the tensor's buffer, so cutting copies
# nothing.
ALIGNMENT = 64
# The last packed chunks are smaller, since no backward pass overlaps with the last one: each has at
# most a quarter of the bytes that are left, but not less than 256 KiB, which cost about one copy.
_OF_REST = 4
_LEAST_PACK = 256 << 10
# Gradients below this part of a chunk are packed, because two of them or more then fit into one.
_PACKED_SHARE = 0.4


class GradientSize(NamedTuple):
    """The size of one variable's gradient.

    Attributes:
        elements: the number of elements, of a sparse gradient its rows at most; None if only the
            training step will know.
        itemsize: bytes of an element, or of a row with its index.
        dtype: the gradient's dtype; a chunk has one.
        packable: False for a gradient that travels alone and whole: sparse ones, integers, strings.
    """

    elements: Optional[int]
    itemsize: int
    dtype: str
    packable: bool = True

    @property
    def bytes(self) -> int:
        """The size in bytes; 0 if it is not known."""
        return (self.elements or 0) * self.itemsize


class Range(NamedTuple):
    """Elements ``start:stop`` of a gradient, given by its place in a row, flattened.

    With ``stop`` None it is the whole gradient, in its shape.
    """

    gradient: int
    start: int
    stop: Optional[int]

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole gradient, in its shape."""
        return self.stop is None


class Chunk(NamedTuple):
    """Gradients of one dtype that travel as one tensor, and how.

    Attributes:
        ranges: the ranges of its gradients.
        bytes: the bytes of all ranges; 0 if unknown.
        schedule: its moves; none on one tower.
        name: its name in op names.
    """

    ranges: Tuple[Range, ...]
    bytes: int
    schedule: Schedule = ()
    name: str = ""

    @property
    def first(self) -> int:
        """The place of its first gradient in a row."""
        return self.ranges[0].gradient

    @property
    def root(self) -> int:
        """The tower that has its sum first."""
        return root_of(self.schedule)


class OwnedBytes(NamedTuple):
    """The bytes on each tower when every variable is updated on one of K towers.

    Attributes:
        variables: bytes of each of N variables.
        towers: bytes of the variables that each of K towers updates already.
    """

    variables: Sequence[int]
    towers: Sequence[int]


def chunks_of(
    gradients: Sequence[GradientSize],
    chunk_bytes: int,
    pack_below: Optional[int] = None,
    whole: bool = False,
) -> List[Chunk]:
    """Return chunks that hold each element of N gradients once, in the order of their readiness.

    Args:
        gradients: N gradients; the last one is ready first.
        chunk_bytes: the size of chunks; the last packed ones are smaller. 0: each gradient alone
            and whole, in the order of the variables.
        pack_below: bytes below which gradients share chunks; None: 0.4 × ``chunk_bytes``.
        whole: whether large gradients are not cut.
    """
    if not chunk_bytes:
        return [_alone(n, gradient) for n, gradient in enumerate(gradients)]
    small = _PACKED_SHARE * chunk_bytes if pack_below is None else pack_below
    packs: List[List[int]] = []  # numbers of the gradients that share a chunk
    open_packs: Dict[str, List[int]] = {}  # the pack of each dtype that has room
    room_by_dtype: Dict[str, int] = {}  # bytes that fit into it
    still_to_come = list(accumulate(gradient.bytes for gradient in gradients))

    # Begin with the last gradient, because the backward pass computes it first.
    for n in reversed(range(len(gradients))):
        gradient = gradients[n]
        if not gradient.packable or not gradient.bytes or gradient.bytes >= small:
            packs.append([n])
            continue
        if gradient.bytes > room_by_dtype.get(gradient.dtype, 0):
            open_packs[gradient.dtype] = []
            packs.append(open_packs[gradient.dtype])
            late = max(_LEAST_PACK, still_to_come[n] // _OF_REST)
            room_by_dtype[gradient.dtype] = chunk_bytes if pack_below else min(chunk_bytes, late)
        open_packs[gradient.dtype].append(n)
        room_by_dtype[gradient.dtype] -= gradient.bytes

    # A pack is ready when its last gradient is, and chunks travel in this order.
    chunks: List[Chunk] = []
    for pack in sorted(packs, key=lambda pack: -pack[-1]):
        if len(pack) > 1:
            ranges = tuple(Range(n, 0, gradients[n].elements) for n in pack)
            chunks.append(Chunk(ranges, sum(gradients[n].bytes for n in pack)))
        elif whole:
            chunks.append(_alone(pack[0], gradients[pack[0]]))
        else:
            chunks += _cut(pack[0], gradients[pack[0]], chunk_bytes)
    return chunks


def _alone(n: int, gradient: GradientSize) -> Chunk:
    """Return the chunk of gradient n, which travels whole and in its shape."""
    return Chunk((Range(n, 0, None),), gradient.bytes)


def _cut(n: int, gradient: GradientSize, chunk_bytes: int) -> List[Chunk]:
    """Return gradient n in equal chunks of at most ``chunk_bytes`` and a multiple of 64 bytes."""
    if not gradient.packable or gradient.bytes <= chunk_bytes:
        return [_alone(n, gradient)]
    elements = gradient.elements or 0
    per_line = ALIGNMENT // gradient.itemsize  # elements in 64 bytes
    most = max(1, chunk_bytes // ALIGNMENT) * per_line  # elements of a chunk
    # Chunks are equal, because a small last one would cost as many copies as a full one.
    pieces = -(-elements // most)
    size = -(-elements // pieces // per_line) * per_line
    chunks = []
    for start in range(0, elements, size):
        stop = min(start + size, elements)
        chunks.append(Chunk((Range(n, start, stop),), (stop - start) * gradient.itemsize))
    return chunks
