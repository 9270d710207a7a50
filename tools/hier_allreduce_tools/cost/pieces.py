"""The pieces of a traced step: towers, chunks, links."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import DefaultDict, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from hier_allreduce.graph.record import SentTensor
from hier_allreduce.planning.plan import Schedule, root_of
from .gaps import COPIES, INPUT, PROCESSOR, Segment
from .trace import reached
from .traced import SUM, UPDATE, TowerCopy, TracedStep


class TowerTimes(NamedTuple):
    """The step on one tower. Times are ms after the first kernel of the step.

    Attributes:
        device: its name.
        pass_end: the end of the last kernel that makes a gradient.
        end: the end of its last kernel.
        busy: of the pass's time, ms with a kernel by kind: ``pass``, ``pack``, ``sum``, ``unpack``,
            ``update``.
        gaps: of the pass's time, ms without a kernel by reason: ``copies`` from other towers that
            had not arrived; ``input`` from a device that is no tower; ``processor``, which launched
            too late; ``between`` a launch and its kernel, or two kernels.
        after: ms from ``pass_end`` to ``end``: ``copies`` or input, for which it waited, and by
            kind all other time.
        processor_after: the part of ``after`` in which it waited for the processor, ms by kind.
        updates_after: the updates that began after the pass.
    """

    device: str
    pass_end: float
    end: float
    busy: Dict[str, float]
    gaps: Dict[str, float]
    after: Dict[str, float]
    processor_after: Dict[str, float]
    updates_after: int

    @property
    def place(self) -> str:
        """The short name of its device: ``GPU 5``."""
        return self.device.rpartition("device:")[2].replace(":", " ")


class ChunkTimes(NamedTuple):
    """The way of one chunk. Times are ms after the first kernel of the step; None: not seen.

    Attributes:
        name: with which the names of its ops begin.
        root: the tower that has the sum first.
        hops: copies one after the other, up and down.
        ready: all towers have the gradient.
        sent: the last copy of a gradient has arrived.
        summed: the root has the sum, or the mean.
        copied: the last copy of the sum has arrived.
        updated: the last update that reads it has ended.
    """

    name: str
    root: int
    hops: int
    ready: Optional[float]
    sent: Optional[float]
    summed: Optional[float]
    copied: Optional[float]
    updated: Optional[float]

    @property
    def times(self) -> Tuple[Optional[float], ...]:
        """The five times."""
        return self.ready, self.sent, self.summed, self.copied, self.updated

    @property
    def complete(self) -> float:
        """When all towers have the sum."""
        return max(self.copied or 0.0, self.summed or 0.0)


class Link(NamedTuple):
    """The copies from tower ``src`` to tower ``dst``: how many, their bytes, their ms together."""

    src: int
    dst: int
    copies: int
    bytes: int
    ms: float

    @property
    def speed(self) -> float:
        """Bytes/s while a copy runs."""
        return 1e3 * self.bytes / self.ms if self.ms else 0.0


# ---- towers --------------------------------------------------------------------------------------


def tower_of(step: TracedStep, device: str, segments: Sequence[Segment]) -> TowerTimes:
    """Return the pieces of one tower, from the segments of its time."""
    kernels = step.trace.kernels[device]
    made = [kernel.end for kernel in kernels if kernel.node in step.gradients]
    pass_end = max(made, default=0.0)
    busy: DefaultDict[str, float] = defaultdict(float)
    gaps: DefaultDict[str, float] = defaultdict(float)
    after: DefaultDict[str, float] = defaultdict(float)
    processor_after: DefaultDict[str, float] = defaultdict(float)
    # What lies on both sides of the end of the pass counts in both, by its ms on each side.
    for segment in segments:
        early = min(segment.end, pass_end) - segment.begin
        late = segment.end - max(segment.begin, pass_end)
        if early > 0 and segment.reason:
            gaps[segment.reason] += early
        elif early > 0:
            busy[segment.kind] += early
        if late > 0:
            after[COPIES if segment.reason in (COPIES, INPUT) else segment.kind] += late
        if late > 0 and segment.reason == PROCESSOR:
            processor_after[segment.kind] += late
    # An update may have several kernels, and counts once.
    late_nodes = {kernel.node for kernel in kernels if kernel.begin >= pass_end}
    updates = sum(step.kind(node) == UPDATE for node in late_nodes)
    end = max((kernel.end for kernel in kernels), default=0.0)
    return TowerTimes(
        device, pass_end, end, dict(busy), dict(gaps), dict(after), dict(processor_after), updates
    )


# ---- chunks --------------------------------------------------------------------------------------


def chunks_in(step: TracedStep) -> List[ChunkTimes]:
    """Return the chunks of a step in the order in which they are ready."""
    chunks = []
    for built in step.all_reduces:
        for tensor in built.tensors:
            prefix = f"{built.scope}{tensor.name}/"
            own = {node for node in step.trace.nodes if node.startswith(prefix)}
            root = step.tower_on(built.devices[root_of(tensor.schedule)])
            chunk = _chunk(step, tensor, root, own)
            # A chunk of which nothing ran stays out, because Grappler folds sums of constants.
            if any(time is not None for time in chunk.times):
                chunks.append(chunk)
    return sorted(chunks, key=lambda chunk: chunk.ready or 0.0)


def _chunk(step: TracedStep, tensor: SentTensor, root: int, own: Set[str]) -> ChunkTimes:
    """Return a chunk whose nodes are ``own``."""
    sums = {node for node in own if step.kind(node) == SUM}
    gradients = {source for node in sums for source in step.trace.sources[node]} - sums
    updates = [node for node in reached(own, step.trace.readers) if step.kind(node) == UPDATE]
    # A copy that a sum reads is on the way up, and all others of the chunk bring the sum back.
    up: List[float] = []
    down: List[float] = []
    for copy in step.copies:
        if sums & set(copy.readers):
            up.append(copy.end)
        elif copy.node in own or own & set(copy.readers):
            down.append(copy.end)
    return ChunkTimes(
        tensor.name,
        root,
        hops_in(tensor.schedule),
        max(filter(None, (_made(step, node) for node in gradients)), default=None),
        max(up, default=None),
        _last_end(step, sums),
        max(down, default=None),
        _last_end(step, updates),
    )


def _last_end(step: TracedStep, nodes: Iterable[str]) -> Optional[float]:
    return max((step.ends[node] for node in nodes if node in step.ends), default=None)


def _made(step: TracedStep, maker: str) -> Optional[float]:
    """Return when a node's result was there; that of a node without a kernel is a view."""
    made: Optional[float] = None
    waiting = [maker]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node in step.ends:
            made = max(step.ends[node], made or 0.0)
            continue
        views = [source for source in step.trace.sources[node] if source not in seen]
        seen.update(views)
        waiting += views
    return made


def hops_in(schedule: Schedule) -> int:
    """Return the copies that follow one another in a schedule.

    >>> from hier_allreduce import Copy, Reduce
    >>> hops_in((Reduce((1, 2), 0), Copy(0, 1), Copy(0, 2)))
    2
    """
    hops: Counter = Counter()
    for step in schedule:
        # A step waits for all its sources, so that the longest way to one of them counts.
        before = max(hops[src] for src in step.srcs) + 1
        hops[step.dst] = max(hops[step.dst], before)
    return max(hops.values(), default=0)


# ---- links ---------------------------------------------------------------------------------------


def links_in(copies: Iterable[TowerCopy]) -> List[Link]:
    """Return the links over which copies went."""
    copies_by_pair: Dict[Tuple[int, int], List[TowerCopy]] = defaultdict(list)
    for copy in copies:
        copies_by_pair[copy.src, copy.dst].append(copy)
    links = []
    for (src, dst), of_pair in sorted(copies_by_pair.items()):
        ms = sum(copy.end - copy.begin for copy in of_pair)
        links.append(Link(src, dst, len(of_pair), sum(copy.bytes for copy in of_pair), ms))
    return links
