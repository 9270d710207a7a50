"""What would help most, where a traced step shows it."""

from __future__ import annotations

from statistics import median
from typing import Iterable, Iterator, List, NamedTuple, Sequence, Tuple

from hier_allreduce.formatting import rate, rounded
from hier_allreduce.graph.devices import is_gpu
from .gaps import COPIES, PROCESSOR, Segment
from .pieces import ChunkTimes, Link, TowerTimes
from .traced import PACK, SUM, UNPACK, UPDATE, TowerCopy

# A remedy must be worth this fraction of a step.
_LEAST_GAIN = 0.03
# A link is slow below this fraction of the other links' median speed.
_SLOW = 0.5


class Remedy(NamedTuple):
    """A sentence, and the ms for which the last tower waited that it explains."""

    text: str
    ms: float


def remedy_for(
    towers: Sequence[TowerTimes],
    ends_last: int,
    segments: Sequence[Segment],
    chunks: Sequence[ChunkTimes],
    links: Sequence[Link],
    copies: Sequence[TowerCopy],
) -> str:
    """Return the remedy that explains most of what the last tower waited; empty if none does.

    Args:
        towers: the K towers.
        ends_last: the tower that ends last.
        segments: its time.
        chunks: those of all all-reduces.
        links: the pairs of towers with copies.
        copies: those between the towers.
    """
    places = [tower.place for tower in towers]
    # Only what the last tower waited for can make the step shorter.
    waits = [segment for segment in segments if segment.reason == COPIES]
    remedies = [
        *_slow_link(links, copies, waits, places),
        *_one_root(chunks, copies, waits, places),
        *_processor(towers[ends_last]),
    ]
    best = max(remedies, key=lambda remedy: remedy.ms, default=None)
    return best.text if best is not None and best.ms >= _LEAST_GAIN * towers[ends_last].end else ""


def _slow_link(
    links: Sequence[Link],
    copies: Sequence[TowerCopy],
    waits: Sequence[Segment],
    places: Sequence[str],
) -> Iterator[Remedy]:
    """Yield a remedy if one link is slow, and copies were on it while the last tower waited."""
    slowest = min(links, key=lambda link: link.speed, default=None)
    # Of two links nobody can tell which one is unusual.
    if slowest is None or len(links) < 3:
        return
    usual = median(link.speed for link in links if link is not slowest)
    if slowest.speed >= _SLOW * usual:
        return
    pair = (slowest.src, slowest.dst)
    ms = _overlap(waits, [copy for copy in copies if (copy.src, copy.dst) == pair])
    yield Remedy(
        f"The copies from {places[slowest.src]} to {places[slowest.dst]} reach"
        f" {rate(slowest.speed)}, others {rate(usual)}: look at this link with"
        " `hier-allreduce doctor --copies`, or choose groups that avoid it",
        ms,
    )


def _one_root(
    chunks: Sequence[ChunkTimes],
    copies: Sequence[TowerCopy],
    waits: Sequence[Segment],
    places: Sequence[str],
) -> Iterator[Remedy]:
    """Yield a remedy if all chunks have one root, and the last tower waited for its copies."""
    roots = {chunk.root for chunk in chunks}
    if len(roots) != 1 or len(chunks) < 2 or len(places) < 3:
        return
    (root,) = roots
    ms = _overlap(waits, [copy for copy in copies if root in (copy.src, copy.dst)])
    yield Remedy(
        f"{places[root]} receives all gradients, and sends all sums: let the roots rotate, as they"
        " do by default",
        ms,
    )


def _processor(last_tower: TowerTimes) -> Iterator[Remedy]:
    """Yield remedies for the time in which the last tower, a GPU, waited for the processor."""
    if not is_gpu(last_tower.device):  # the threads of a CPU device are the processor
        return
    early = last_tower.gaps.get(PROCESSOR, 0.0)
    late = last_tower.processor_after
    # Each wait has a sentence of its own, because each has another cure.
    of_chunks = sum(late.get(kind, 0.0) for kind in (PACK, SUM, UNPACK))
    of_updates = late.get(UPDATE, 0.0)
    yield Remedy(
        f"The pass waited {rounded(early)} ms for the processor, which launches its kernels too"
        " late: fewer or larger ops in the model help, another all-reduce does not",
        early,
    )
    yield Remedy(
        f"The last chunks waited {rounded(of_chunks)} ms for the processor: larger chunks help",
        of_chunks,
    )
    yield Remedy(
        f"The updates waited {rounded(of_updates)} ms for the processor, which launches"
        f" {last_tower.updates_after} of them after the pass: fewer variables, or fewer ops in an"
        " update, help",
        of_updates,
    )


def _overlap(waits: Iterable[Segment], copies: Iterable[TowerCopy]) -> float:
    """Return the ms of the waits in which one of the copies ran, or more."""
    # Copies that overlap become one span, because each ms counts once.
    spans: List[Tuple[float, float]] = []
    for begin, end in sorted((copy.begin, copy.end) for copy in copies):
        if spans and begin <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((begin, end))
    ms = 0.0
    for wait in waits:
        for begin, end in spans:
            ms += max(0.0, min(end, wait.end) - max(begin, wait.begin))
    return ms
