"""The time of one tower without a hole: its kernels, and what it waited for between them.

::

    kernel │◄─ copies ─► scheduled ◄─ host ─► launched ◄─ between ─►│ kernel
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Tuple

from .trace import Input, Kernel, Node
from .traced import TracedStep

# why a tower had no kernel: operands that another tower sent were missing; values from a device
# that is no tower; the host launched too late; the next kernel had been launched already
COPIES, INPUT, HOST, BETWEEN = "copies", "input", "host", "between"
_SOON = 0.1  # ms, within which a node is scheduled when its last input is there


class Segment(NamedTuple):
    """A part of a tower's step. Times are ms after the first kernel of the step.

    Attributes:
        begin, end: its time.
        kind: of the kernel, or of the one that was waited for.
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
        self._arrivals: Dict[Tuple[str, int], float] = {}
        for copy in step.trace.copies:
            self._arrivals[copy.node, copy.receive] = copy.end

    def segments(self, device: str) -> List[Segment]:
        """Return the segments of a tower, from the step's first kernel to the tower's last one."""
        segments: List[Segment] = []
        now = 0.0
        for kernel in self._step.trace.kernels[device]:
            kind = self._step.kind(kernel.node)
            for until, reason in self._waits(kernel, now):
                if until > now:
                    segments.append(Segment(now, until, kind, reason))
                    now = until
            if kernel.end > now:
                segments.append(Segment(now, kernel.end, kind, ""))
                now = kernel.end
        return segments

    def _waits(self, kernel: Kernel, since: float) -> List[Tuple[float, str]]:
        """Return the ends and the reasons of what a kernel waits for, from a time on."""
        if kernel.begin <= since:
            return []
        node = self._step.trace.nodes[kernel.node]
        # a kernel may begin before the host's call has returned
        launched = min(node.end, kernel.begin)
        scheduled = min(node.scheduled, launched)
        reason = self._reason(kernel.node, since) if scheduled > since else ""
        return [(scheduled, reason), (launched, HOST), (kernel.begin, BETWEEN)]

    def _reason(self, name: str, since: float) -> str:
        """Return why the host had not begun a node at a time: the chain of what came last."""
        nodes = self._step.trace.nodes
        seen = {name}
        while nodes[name].scheduled > since and nodes[name].inputs:
            last = self._last_input(nodes[name])
            if last.receive:
                return INPUT if self._step.tower(last.node) is None else COPIES
            if last.node in seen:  # a loop of the graph
                break
            name = last.node
            seen.add(name)
        return HOST

    def _last_input(self, node: Node) -> Input:
        """Return the input of a node that came last."""

        def arrival(read: Input) -> float:
            made = self._step.trace.nodes[read.node].end
            return self._arrivals.get((read.node, read.receive), made)

        last = max(node.inputs, key=arrival)
        if node.scheduled - arrival(last) > _SOON:
            for read in node.inputs:  # one that was not traced, as from the host's memory
                if read.receive and (read.node, read.receive) not in self._arrivals:
                    return read
        return last
