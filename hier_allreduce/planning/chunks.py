"""Gradients in chunks of one size: small ones packed up to it, larger ones cut evenly.

::

    variables   0 ────────────────  1 ─  2 ──  3 ─        (bytes; the last one is ready first)
    chunks      0a | 0b | 0c        [3 2 1]
"""

from __future__ import annotations

from itertools import accumulate
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from .plan import Schedule, root_of

ALIGNMENT = 64  # bytes: a slice at such an offset of a tensor shares the tensor's buffer
# The last packed chunks are smaller, since no backward pass overlaps with the last one: each has at
# most a quarter of the bytes that are left, but not less than 256 KiB, which cost about one copy.
_OF_REST = 4
_LEAST = 256 << 10
_PACKED = 0.4  # of a chunk: two gradients below this share are packed into one chunk


class GradientSize(NamedTuple):
    """The size of one variable's gradient.

    Attributes:
        elements: of a sparse gradient its rows, at most; None if only the step will know.
        itemsize: bytes of an element, or of a row with its index.
        dtype: a chunk has one dtype.
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
    """Elements ``start:stop`` of gradient ``number``, flattened.

    With ``stop`` None it is the whole gradient, in its shape.
    """

    number: int
    start: int
    stop: Optional[int]


class Chunk(NamedTuple):
    """Gradients of one dtype that travel as one tensor, and how.

    Attributes:
        ranges: of its gradients.
        bytes: of all ranges; 0 if unknown.
        steps: its schedule; none on one tower.
        name: in op names.
    """

    ranges: Tuple[Range, ...]
    bytes: int
    steps: Schedule = ()
    name: str = ""

    @property
    def first(self) -> int:
        """The number of its first gradient."""
        return self.ranges[0].number

    @property
    def root(self) -> int:
        """The tower that has its sum first."""
        return root_of(self.steps)


class Load(NamedTuple):
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
        return [_alone(number, gradient) for number, gradient in enumerate(gradients)]
    below = _PACKED * chunk_bytes if pack_below is None else pack_below
    groups: List[List[int]] = []  # gradients that share a chunk
    open_groups: Dict[str, List[int]] = {}  # the one of each dtype that has room
    room: Dict[str, int] = {}  # and the bytes that fit into it
    left = list(accumulate(gradient.bytes for gradient in gradients))  # from each one to the end
    for number in reversed(range(len(gradients))):
        gradient = gradients[number]
        if not gradient.packable or not gradient.bytes or gradient.bytes >= below:
            groups.append([number])
            continue
        if gradient.bytes > room.get(gradient.dtype, 0):
            group: List[int] = []
            groups.append(group)
            open_groups[gradient.dtype] = group
            late = max(_LEAST, left[number] // _OF_REST)
            room[gradient.dtype] = chunk_bytes if pack_below else min(chunk_bytes, late)
        open_groups[gradient.dtype].append(number)
        room[gradient.dtype] -= gradient.bytes
    chunks: List[Chunk] = []
    for group in sorted(groups, key=lambda group: -group[-1]):  # its last gradient makes it ready
        first = group[0]
        if len(group) > 1:
            ranges = tuple(Range(number, 0, gradients[number].elements) for number in group)
            chunks.append(Chunk(ranges, sum(gradients[number].bytes for number in group)))
        elif whole:
            chunks.append(_alone(first, gradients[first]))
        else:
            chunks += _cut(first, gradients[first], chunk_bytes)
    return chunks


def _alone(number: int, gradient: GradientSize) -> Chunk:
    """Return the chunk of one gradient that travels whole and in its shape."""
    return Chunk((Range(number, 0, None),), gradient.bytes)


def _cut(number: int, gradient: GradientSize, chunk_bytes: int) -> List[Chunk]:
    """Return one gradient in equal chunks of at most ``chunk_bytes`` and a multiple of 64 bytes."""
    if not gradient.packable or gradient.bytes <= chunk_bytes:
        return [_alone(number, gradient)]
    elements = gradient.elements or 0
    step = ALIGNMENT // gradient.itemsize  # elements
    most = max(1, chunk_bytes // ALIGNMENT) * step  # elements of a chunk
    pieces = -(-elements // most)
    size = -(-elements // pieces // step) * step
    chunks = []
    for start in range(0, elements, size):
        stop = min(start + size, elements)
        chunks.append(Chunk((Range(number, start, stop),), (stop - start) * gradient.itemsize))
    return chunks
