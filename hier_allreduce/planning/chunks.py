"""Gradients in chunks of one size: small ones packed up to it, larger ones cut evenly.

::

    variables   0 ────────────────  1 ─  2 ──  3 ─        (bytes; the last one is ready first)
    chunks      0a | 0b | 0c        [3 2 1]
"""

from __future__ import annotations

from collections import Counter
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from .plan import Plan, Schedule, root_of

# A slice at such an offset of a tensor, in bytes, shares the tensor's buffer, so cutting copies
# nothing.
ALIGNMENT = 64
# Where the last packed chunks are smaller, since no backward pass overlaps with the last one, each
# has at most a quarter of the bytes that are left, but not less than 256 KiB, which cost about one
# copy.
_OF_REST = 4
_LEAST_PACK = 256 << 10


class GradientSize(NamedTuple):
    """The size of one variable's gradient.

    Attributes:
        elements: the number of elements, of a sparse gradient its slices at most; None if only the
            training step will know.
        itemsize: bytes of an element, or of a slice with its index.
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
    """Elements ``start:stop`` of a gradient, given by its number, flattened.

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
        schedule: its moves; none on one tower.
        name: its name in op names.
    """

    ranges: Tuple[Range, ...]
    schedule: Schedule = ()
    name: str = ""

    @property
    def first(self) -> int:
        """The number of its first gradient."""
        return self.ranges[0].gradient

    @property
    def root(self) -> int:
        """The tower that has its sum first."""
        return root_of(self.schedule)


def chunks_of(gradients: Sequence[GradientSize], plan: Plan, order: Sequence[int]) -> List[Chunk]:
    """Return chunks that hold each element of N gradients once, in the order of their readiness.

    A plan of 0 bytes leaves each gradient alone and whole, in the order of the variables.

    Args:
        gradients: N gradients.
        plan: the size of chunks, and what is packed and cut.
        order: the numbers of the gradients, the one that is ready first at the front.
    """
    if not plan.chunk_bytes:
        order = range(len(gradients))
    # A pack is ready when its last gradient is, and chunks travel in this order.
    place_by_gradient = {n: place for place, n in enumerate(order)}
    packs = _packs(gradients, plan, order)
    chunks: List[Chunk] = []
    for pack in sorted(packs, key=lambda pack: place_by_gradient[pack[-1]]):
        first = gradients[pack[0]]
        pieces = 1
        if first.packable and first.bytes and not plan.whole:
            pieces = plan.chunks
            if first.bytes > plan.chunk_bytes > 0:
                # A full chunk is a multiple of 64 bytes.
                pieces = -(-first.bytes // (plan.chunk_bytes // ALIGNMENT * ALIGNMENT))
        if pieces == len(pack) == 1:
            chunks.append(Chunk((Range(pack[0], 0, None),)))
        else:
            chunks += _cut(pack, gradients, pieces)
    return chunks


def _packs(gradients: Sequence[GradientSize], plan: Plan, order: Sequence[int]) -> List[List[int]]:
    """Return the numbers of the gradients that share a chunk, or are cut."""
    packs: List[List[int]] = []
    open_packs: Dict[str, List[int]] = {}  # the pack of each dtype that has room
    room_by_dtype: Dict[str, int] = Counter()  # bytes that fit into it
    packed_below = min(plan.pack_below, plan.chunk_bytes)
    still_to_come = sum(gradient.bytes for gradient in gradients)
    for n in order:
        gradient = gradients[n]
        if gradient.packable and 0 < gradient.bytes < packed_below:
            if gradient.bytes > room_by_dtype[gradient.dtype]:
                open_packs[gradient.dtype] = []
                packs.append(open_packs[gradient.dtype])
                most = still_to_come // _OF_REST if plan.tapers else plan.chunk_bytes
                room_by_dtype[gradient.dtype] = min(plan.chunk_bytes, max(_LEAST_PACK, most))
            open_packs[gradient.dtype].append(n)
            room_by_dtype[gradient.dtype] -= gradient.bytes
        else:
            packs.append([n])
        still_to_come -= gradient.bytes
    return packs


def _cut(pack: Sequence[int], gradients: Sequence[GradientSize], pieces: int) -> List[Chunk]:
    """Return some gradients, one after another, in equal chunks of a multiple of 64 bytes."""
    itemsize = gradients[pack[0]].itemsize
    # Chunks are equal, because a small last one would cost as many copies as a full one.
    total = sum(gradients[n].bytes for n in pack)
    size = -(-total // (pieces * ALIGNMENT)) * ALIGNMENT // itemsize  # elements of a chunk
    ranges_by_chunk: List[List[Range]] = [[]]
    room = size  # elements that fit into the last one
    for n in pack:
        start = 0
        elements = gradients[n].bytes // itemsize
        while start < elements:
            if not room:
                ranges_by_chunk.append([])
                room = size
            stop = min(start + room, elements)
            ranges_by_chunk[-1].append(Range(n, start, stop))
            room -= stop - start
            start = stop
    return [Chunk(tuple(ranges)) for ranges in ranges_by_chunk]
