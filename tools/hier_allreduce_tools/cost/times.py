"""The times of a traced step: of each tower without a hole, of each chunk, of each link.

::

    a tower   kernel │◄─ towers ─► scheduled ◄─ processor ─► launched ◄─ between ─►│ kernel
    a chunk   ready ─► sent ─► summed ─► copied ─► updated

All times are ms after the first kernel of the step.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

from .step import SUM, UPDATE, Input, Step, TowerCopy, reached

# Why a tower had no kernel: what another tower sends was missing; the processor launched too late,
# or had no value for it; the next kernel had been launched already.
TOWERS, PROCESSOR, BETWEEN = "towers", "processor", "between"


class TowerTimes(NamedTuple):
    """The step on one tower, up to the end of the last tower's pass and after it, in ms."""

    device: str
    pass_end: float  # the end of its last kernel that makes a gradient
    end: float  # the end of its last kernel
    busy: Dict[str, float]  # up to then: with a kernel, by kind
    gaps: Dict[str, float]  # up to then: without one, by reason
    after: Dict[str, float]  # after it: of waiting for other ``towers``, and by kind all others
    late_launches: float  # of ``after``: what waited for the processor

    @property
    def place(self) -> str:
        """The short name of its device: ``GPU 5``."""
        return self.device.rpartition("device:")[2].replace(":", " ")


class ChunkTimes(NamedTuple):
    """The way of one chunk; a time is None if it was not seen, as that of copies on CPU devices."""

    name: str  # with which the names of its ops begin
    root: Optional[int]  # the tower that has the sum first; None if nothing was summed
    ready: Optional[float]  # all towers have the gradient
    sent: Optional[float]  # the last copy of a gradient has arrived
    summed: Optional[float]  # the root has the sum, or the mean
    copied: Optional[float]  # the last copy of the sum has arrived
    updated: Optional[float]  # the last update that reads it has ended

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


# ---- towers ------------------------------------------------------------------------------------


def tower_of(step: Step, device: str, last_pass_end: float) -> TowerTimes:
    """Return the times of one tower, up to the end of the last tower's pass and after it."""
    busy: Dict[str, float] = defaultdict(float)
    gaps: Dict[str, float] = defaultdict(float)
    after: Dict[str, float] = defaultdict(float)
    late_launches = 0.0
    done = 0.0
    for kind, reason, end in _segments(step, device):
        early = min(end, last_pass_end) - done
        late = end - max(done, last_pass_end)
        if early > 0 and reason:
            gaps[reason] += early
        elif early > 0:
            busy[kind] += early
        if late > 0:
            after[TOWERS if reason == TOWERS else kind] += late
            late_launches += late if reason == PROCESSOR else 0.0
        done = end
    ends = [kernel.end for kernel in step.kernels[device]]
    times = (pass_end_of(step, device), max(ends, default=0.0))
    return TowerTimes(device, *times, dict(busy), dict(gaps), dict(after), late_launches)


def _segments(step: Step, device: str) -> Iterator[Tuple[str, str, float]]:
    """Yield a tower's step without a hole: a kernel's kind, why it did not run yet, and until when.

    The reason is empty while the kernel runs.
    """
    done = 0.0  # ms up to which the segments tell what the tower did
    for kernel in step.kernels[device]:
        node = step.nodes[kernel.node]
        # A kernel is launched when it begins at the latest, though the call that launches it may
        # return later.
        launched = min(node.end, kernel.begin)
        scheduled = min(node.scheduled, launched)
        reason = _reason(step, kernel.node, done) if scheduled > done else ""
        waits = [(reason, scheduled), (PROCESSOR, launched), (BETWEEN, kernel.begin)]
        # Kernels of several streams overlap, so that only what is after `done` is new.
        for why, end in [*waits, ("", kernel.end)]:
            if end > done:
                yield step.kind(kernel.node), why, end
                done = end


def _reason(step: Step, waiting: str, since: float) -> str:
    """Return why the processor had not begun a node at a time: the chain of what came last."""

    # A value from another tower is there when its copy ends, not when its op does.
    def arrival(read: Input) -> float:
        return step.arrivals.get((read.node, read.receive), step.nodes[read.node].end)

    seen = {waiting}
    while step.nodes[waiting].scheduled > since and step.nodes[waiting].inputs:
        last_read = max(step.nodes[waiting].inputs, key=arrival)
        if last_read.receive:
            return PROCESSOR if step.tower(last_read.node) is None else TOWERS
        if last_read.node in seen:  # a loop of the graph
            break
        waiting = last_read.node
        seen.add(waiting)
    return PROCESSOR


def pass_end_of(step: Step, device: str) -> float:
    """Return when the last kernel that makes a gradient ended on a tower."""
    made = [kernel.end for kernel in step.kernels[device] if kernel.node in step.gradients]
    return max(made, default=0.0)


# ---- chunks and links --------------------------------------------------------------------------


def chunks_in(step: Step) -> List[ChunkTimes]:
    """Return the chunks of a step in the order in which they are ready."""
    # A node without a kernel is a view, whose result is there when its sources' are.
    views = {node: [] if node in step.ends else srcs for node, srcs in step.sources.items()}
    chunks = []
    for built in step.all_reduces:
        for tensor in built.tensors:
            chunk = _chunk(step, tensor.name, f"{built.scope}{tensor.name}/", views)
            # A chunk of which nothing ran stays out, because Grappler folds sums of constants.
            if any(time is not None for time in chunk[2:]):
                chunks.append(chunk)
    return sorted(chunks, key=lambda chunk: chunk.ready or 0.0)


def _chunk(step: Step, name: str, prefix: str, views: Dict[str, List[str]]) -> ChunkTimes:
    own = {node for node in step.nodes if node.startswith(prefix)}
    sums = {node for node in own if step.kind(node) == SUM}
    gradients = {source for node in sums for source in step.sources[node]} - sums
    updates = {node for node in reached(own, step.readers) if step.kind(node) == UPDATE}
    # A copy that a sum reads is on the way up, and all others of the chunk bring the sum back.
    up: List[float] = []
    down: List[float] = []
    for copy in step.copies:
        if not sums.isdisjoint(copy.readers):
            up.append(copy.end)
        elif copy.node in own or not own.isdisjoint(copy.readers):
            down.append(copy.end)
    end_by_sum = {node: step.ends[node] for node in sums if node in step.ends}
    return ChunkTimes(
        name,
        step.tower(max(end_by_sum, key=lambda node: end_by_sum[node])) if end_by_sum else None,
        ready=_last_end(step, gradients | reached(gradients, views)),
        sent=max(up, default=None),
        summed=_last_end(step, sums),
        copied=max(down, default=None),
        updated=_last_end(step, updates),
    )


def _last_end(step: Step, nodes: Iterable[str]) -> Optional[float]:
    return max((step.ends[node] for node in nodes if node in step.ends), default=None)


def links_in(copies: Iterable[TowerCopy]) -> List[Link]:
    """Return the links over which copies went."""
    copies_by_pair: Dict[Tuple[int, int], List[TowerCopy]] = defaultdict(list)
    for copy in copies:
        copies_by_pair[copy.src, copy.dst].append(copy)
    links = []
    for pair, of_pair in sorted(copies_by_pair.items()):
        ms = sum(copy.end - copy.begin for copy in of_pair)
        links.append(Link(*pair, len(of_pair), sum(copy.bytes for copy in of_pair), ms))
    return links
