"""The times of a traced step: of each tower without a hole, of each chunk, of each link.

::

    a tower   kernel │◄─ towers ─► scheduled ◄─ processor ─► launched ◄─ between ─►│ kernel

All times are ms after the first kernel of the step.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Dict, Iterable, Iterator, List, NamedTuple, Tuple

from .step import SUM, Read, Step, TowerCopy

# Why a tower had no kernel: what another tower sends was missing; the processor launched too late,
# or had no value for it; the next kernel had been launched already.
TOWERS, PROCESSOR, BETWEEN = "towers", "processor", "between"


class TowerTimes(NamedTuple):
    """The step on one tower, up to the end of the last tower's pass and after it, in ms."""

    device: str
    pass_end: float  # the end of its last kernel that makes a gradient
    end: float  # the end of its last kernel
    before: Dict[str, float]  # with kernels, by kind, and without one, by reason
    after: Dict[str, float]  # the same, after the end of the last pass

    @property
    def place(self) -> str:
        """The short name of its device: ``GPU 5``."""
        return self.device.rpartition("device:")[2].replace(":", " ")


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
    before: Dict[str, float] = defaultdict(float)
    after: Dict[str, float] = defaultdict(float)
    done = 0.0
    for what, end in _segments(step, device):
        middle = min(max(done, last_pass_end), end)
        if done < middle:
            before[what] += middle - done
        if middle < end:
            after[what] += end - middle
        done = end
    return TowerTimes(device, pass_end_of(step, device), done, dict(before), dict(after))


def _segments(step: Step, device: str) -> Iterator[Tuple[str, float]]:
    """Yield a tower's step without a hole: a kernel's kind, or why none ran yet, and until when."""
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
        for what, end in [*waits, (step.kind(kernel.node), kernel.end)]:
            if end > done:
                yield what, end
                done = end


def _reason(step: Step, waiting: str, since: float) -> str:
    """Return why the processor had not begun a node at a time: the chain of what came last."""

    # A value from another tower is there when its copy ends, not when its op does.
    def arrival(read: Read) -> float:
        return step.arrivals.get(read, step.nodes[read[0]].end)

    seen = {waiting}
    while step.nodes[waiting].scheduled > since and step.nodes[waiting].reads:
        source, receive = max(step.nodes[waiting].reads, key=arrival)
        if receive:
            return PROCESSOR if step.tower(source) is None else TOWERS
        if source in seen:  # a loop of the graph
            break
        waiting = source
        seen.add(waiting)
    return PROCESSOR


def pass_end_of(step: Step, device: str) -> float:
    """Return when the last kernel that makes a gradient ended on a tower."""
    made = [kernel.end for kernel in step.kernels[device] if kernel.node in step.gradients]
    return max(made, default=0.0)


# ---- chunks and links --------------------------------------------------------------------------


def complete_by_chunk(step: Step) -> Dict[str, float]:
    """Return when all towers have the sum of each chunk, by the begin of the names of its ops."""
    times = {}
    for built in step.all_reduces:
        for tensor in built.tensors:
            chunk = f"{built.scope}{tensor.name}"
            own = {node for node in step.nodes if node.startswith(f"{chunk}/")}
            sums = [node for node in own if step.kind(node) == SUM]
            ends = [step.ends[node] for node in sums if node in step.ends]
            ends += [copy.end for copy in step.copies if own & {copy.node, *copy.readers}]
            # A chunk of which nothing ran stays out, because Grappler folds sums of constants.
            if ends:
                times[chunk] = max(ends)
    return times


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
