"""The time of one tower without a hole: its kernels, and what it waited for between them.

::

    kernel │◄─ copies ─► scheduled ◄─ processor ─► launched ◄─ between ─►│ kernel
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Tuple

from .trace import Input, Node
from .traced import TracedStep

# Why a tower had no kernel: operands that another tower sent were missing; values from a device
# that is no tower; the processor launched too late; the next kernel had been launched already
COPIES, INPUT, PROCESSOR, BETWEEN = "copies", "input", "processor", "between"
_SOON = 0.1  # ms, within which a node is scheduled when its last input is there


class Segment(NamedTuple):
    """A part of a tower's step. Times are ms after the first kernel of the step.

    Attributes:
        begin, end: its time.
        kind: what the kernel is for, or the one that was waited for.
        reason: why no kernel ran; empty if one did.
    """

    begin: float
    end: float
    kind: str
    reason: str

    @property
    def ms(self) -> float:
        """Its length."""
        return self.end - self.begin


class Gaps:
    """Finds the reasons of the gaps in a traced step."""

    def __init__(self, step: TracedStep):
        self._step = step
        # A value from another tower is there when its copy ends, not when its op does.
        self._arrivals: Dict[Tuple[str, int], float] = {}
        for copy in step.trace.copies:
            self._arrivals[copy.node, copy.receive] = copy.end

    def segments(self, device: str) -> List[Segment]:
        """Return the segments of a tower, from the step's first kernel to the tower's last one."""
        segments: List[Segment] = []
        done = 0.0  # ms up to which the segments tell what the tower did
        for kernel in self._step.trace.kernels[device]:
            kind = self._step.kind(kernel.node)
            node = self._step.trace.nodes[kernel.node]
            # A kernel is launched when it begins at the latest, though the call that launches it
            # may return later.
            launched = min(node.end, kernel.begin)
            scheduled = min(node.scheduled, launched)
            reason = self._reason(kernel.node, done) if scheduled > done else ""
            waits = [(scheduled, reason), (launched, PROCESSOR), (kernel.begin, BETWEEN)]
            # Kernels of several streams overlap, so that only what is after `done` is new.
            for end, why in [*waits, (kernel.end, "")]:
                if end > done:
                    segments.append(Segment(done, end, kind, why))
                    done = end
        return segments

    def _reason(self, name: str, since: float) -> str:
        """Return why the processor had not begun a node at a time: the chain of what came last."""
        nodes = self._step.trace.nodes
        seen = {name}
        while nodes[name].scheduled > since and nodes[name].inputs:
            last_read = self._last_input(nodes[name])
            if last_read.receive:
                return INPUT if self._step.tower(last_read.node) is None else COPIES
            if last_read.node in seen:  # a loop of the graph
                break
            name = last_read.node
            seen.add(name)
        return PROCESSOR

    def _last_input(self, node: Node) -> Input:
        """Return the input of a node that came last."""

        def arrival(read: Input) -> float:
            made = self._step.trace.nodes[read.node].end
            return self._arrivals.get((read.node, read.receive), made)

        last_read = max(node.inputs, key=arrival)
        # A node that waited longer waited for an input whose arrival was not traced, such as one
        # from main memory.
        if node.scheduled - arrival(last_read) > _SOON:
            for read in node.inputs:
                if read.receive and (read.node, read.receive) not in self._arrivals:
                    return read
        return last_read
