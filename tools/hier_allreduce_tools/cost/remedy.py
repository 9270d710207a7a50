"""What would help most, where a traced step shows it."""

from __future__ import annotations

from statistics import median
from typing import List, Sequence, Tuple

from ..text import rate, rounded
from .step import TowerCopy, is_gpu
from .times import PROCESSOR, TOWERS, ChunkTimes, Link, Segment, TowerTimes

_LEAST_GAIN = 0.03  # of a step, that a remedy must be worth
_SLOW = 0.5  # of the other links' median speed, below which a link is slow

Remedies = List[Tuple[float, str]]  # the ms that each explains, and a sentence


def remedy_for(
    towers: Sequence[TowerTimes],
    late: Sequence[Segment],
    chunks: Sequence[ChunkTimes],
    links: Sequence[Link],
    copies: Sequence[TowerCopy],
) -> str:
    """Return the remedy that explains most of a step's waits; empty if none is worth it.

    Args:
        towers: the K towers.
        late: what the tower that ends last did after the end of the last pass.
        chunks, links, copies: those of the step.
    """
    least = _LEAST_GAIN * max(tower.end for tower in towers)
    of_copies = _slow_link(towers, late, links, copies) + _one_root(towers, late, chunks, copies)
    # A late pass comes first, because all else waits for it.
    for remedies in (_late_pass(towers), of_copies + _processor(towers, late)):
        ms, text = max(remedies, default=(0.0, ""))
        if ms >= least:
            return text
    return ""


def _late_pass(towers: Sequence[TowerTimes]) -> Remedies:
    *others, last = sorted(towers, key=lambda tower: tower.pass_end)
    if not others:
        return []
    ms = last.pass_end - median(tower.pass_end for tower in others)
    text = (
        f"{last.place} ends its pass {rounded(ms)} ms after the others (in the median): compare its"
        " work, input and clock with theirs; another all-reduce does not help"
    )
    return [(ms, text)]


def _slow_link(
    towers: Sequence[TowerTimes],
    late: Sequence[Segment],
    links: Sequence[Link],
    copies: Sequence[TowerCopy],
) -> Remedies:
    if len(links) < 3:  # of two links nobody can tell which one is unusual
        return []
    slowest, *others = sorted(links, key=lambda link: link.speed)
    usual = median(link.speed for link in others)
    if slowest.speed >= _SLOW * usual:
        return []
    text = (
        f"The copies from {towers[slowest.src].place} to {towers[slowest.dst].place} reach"
        f" {rate(slowest.speed)}, others {rate(usual)}: look at this link with"
        " `hier-allreduce doctor --copies`, or choose groups that avoid it"
    )
    on_link = [copy for copy in copies if (copy.src, copy.dst) == slowest[:2]]
    return [(_waited(late, on_link), text)]


def _one_root(
    towers: Sequence[TowerTimes],
    late: Sequence[Segment],
    chunks: Sequence[ChunkTimes],
    copies: Sequence[TowerCopy],
) -> Remedies:
    roots = {chunk.root for chunk in chunks}
    root = roots.pop() if len(roots) == 1 else None
    if root is None or len(chunks) < 2 or len(towers) < 3:
        return []
    text = (
        f"{towers[root].place} receives all gradients, and sends all sums: let the roots rotate, as"
        " they do by default"
    )
    of_root = [copy for copy in copies if root in (copy.src, copy.dst)]
    return [(_waited(late, of_root), text)]


def _waited(late: Sequence[Segment], copies: Sequence[TowerCopy]) -> float:
    """Return the ms in which a tower waited for others, and one of the copies ran, or more."""
    ms = 0.0
    for segment in late:
        done = segment.begin if segment.reason == TOWERS else segment.end
        for copy in copies:  # in order of their begin, so that each ms counts once
            end = min(segment.end, copy.end)
            ms += max(0.0, end - max(done, copy.begin))
            done = max(done, end)
    return ms


def _processor(towers: Sequence[TowerTimes], late: Sequence[Segment]) -> Remedies:
    if not is_gpu(towers[0].device):  # the threads of a CPU device are the processor
        return []
    early = max(towers, key=lambda tower: tower.pass_end).gaps.get(PROCESSOR, 0.0)
    of_pass = (
        f"The pass waited {rounded(early)} ms for the processor, which launches its kernels too"
        " late: fewer or larger ops in the model, or a faster input, help; another all-reduce does"
        " not"
    )
    ms = sum(segment.end - segment.begin for segment in late if segment.reason == PROCESSOR)
    of_updates = (
        f"The kernels after the pass waited {rounded(ms)} ms for the processor: fewer variables,"
        " fewer ops in an update, or larger chunks help"
    )
    return [(early, of_pass), (ms, of_updates)]
