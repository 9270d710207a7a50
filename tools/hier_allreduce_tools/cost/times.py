"""The times of a traced step: of each tower without a hole, and of each link.

::

    a tower   kernel │◄─ TOWERS ─► scheduled ◄─ PROCESSOR ─► launched ◄─ BETWEEN ─►│ kernel

All times are ms after the first kernel of the step.
"""

from __future__ import annotations

from typing import Dict, Iterator, NamedTuple, Set, Tuple

from .step import PACK, PASS, SUM, UNPACK, UPDATE, Step

# Why a tower had no kernel, as it is printed: what another tower sends was missing; the processor
# launched too late, or had no value for it; the next kernel had been launched already.
TOWERS, PROCESSOR = "waiting for other towers", "waiting for the processor"
BETWEEN = "between kernels"
_PIECES = (PASS, PACK, SUM, UNPACK, UPDATE, TOWERS, PROCESSOR, BETWEEN)


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


def towers_of(step: Step) -> Tuple[TowerTimes, ...]:
    """Return the times of each tower."""
    pass_ends = {}
    for device in step.towers:
        made = [kernel.end for kernel in step.kernels[device] if kernel.node in step.gradients]
        pass_ends[device] = max(made, default=0.0)
    last_pass_end = max(pass_ends.values())
    towers = []
    for device, pass_end in pass_ends.items():
        before = dict.fromkeys(_PIECES, 0.0)
        after = dict.fromkeys(_PIECES, 0.0)
        done = 0.0
        for what, end in _segments(step, device):
            middle = min(max(done, last_pass_end), end)
            before[what] += middle - done
            after[what] += end - middle
            done = end
        towers.append(TowerTimes(device, pass_end, done, before, after))
    return tuple(towers)


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
        for what, end in [*waits, (step.kinds[kernel.node], kernel.end)]:
            if end > done:
                yield what, end
                done = end


def _reason(step: Step, waiting: str, since: float) -> str:
    """Return why the processor had not begun a node at a time: the chain of what came last."""
    seen: Set[str] = set()
    # The graph may have loops.
    while waiting not in seen and step.nodes[waiting].scheduled > since:
        seen.add(waiting)
        # A value from another tower is there when its copy ends, not when its op does.
        times = {}
        for awaited, source in step.nodes[waiting].waits.items():
            times[awaited] = step.arrivals.get(awaited, step.nodes[source].end)
        if not times:
            break
        last = max(times, key=times.__getitem__)
        waiting = step.nodes[waiting].waits[last]
        if last != waiting:  # another device sends it
            return TOWERS if step.nodes[waiting].device in step.towers else PROCESSOR
    return PROCESSOR


def links_of(step: Step) -> Tuple[Link, ...]:
    """Return the links over which copies went."""
    links = []
    for pair, copies in sorted(step.copies.items()):
        ms = sum(end - begin for begin, end, _ in copies)
        links.append(Link(*pair, len(copies), sum(size for *_, size in copies), ms))
    return tuple(links)
