"""A run whose senders choose what to copy next: for orders in which copies do not slow each other down.

::

    ready at GPU4    [→ GPU6, whose port is busy]  [→ GPU5, over the bridge]      the second one goes first

Fast and slow links that cannot take turns evenly have no order of their own. If each sender takes what came first, two
copies often share a port while another one is idle, and each of the two holds up its sender for twice as long.
"""

from __future__ import annotations

import math
from collections import defaultdict
from heapq import heappop, heappush
from typing import Dict, List, Sequence, Tuple

from ..topology import Topology
from .plan import Plan
from .simulator import SOON, Simulation


class Considerate(Simulation):
    """One run of a plan. A sender takes the ready copy that loses least of its link's speed to copies under way.

    Of copies that lose the same it takes the one whose chunk is farthest from its end. ``delays`` has seconds for each
    chunk: the chunk counts as that much nearer to its end.
    """

    def __init__(
        self,
        plan: Plan,
        topology: Topology,
        chunks: Sequence[float],
        delays: Sequence[float],
        patience: float = math.inf,
    ) -> None:
        super().__init__(plan, topology, chunks, ordered=False, patience=patience)
        self.under_way: Dict[int, int] = defaultdict(int)  # copies issued through each port, uplink and bus
        # for each stream and pair of devices a heap of (rank, copy)
        self.ready_copies: Dict[int, Dict[int, List[Tuple[float, int]]]] = defaultdict(lambda: defaultdict(list))
        left = self._seconds_left()
        self.rank = [delays[chunk] - left[copy] for copy, (*_, chunk) in enumerate(self.transfers)]

    def _seconds_left(self) -> Sequence[float]:
        """Return for each copy the seconds until its chunk is everywhere, if nothing else is going on."""
        after_step = [0.0] * len(self.steps)
        left = [0.0] * len(self.transfers)
        copies = list(enumerate(self.transfers))
        for number in reversed(range(len(self.steps))):
            copy, later = self.copies[number], self.later[number]
            longest = after_step[later] if later >= 0 else 0.0
            while copy >= 0:
                longest = max(longest, left[copy])
                copy = self.others[copy]
            size, operands = self.chunks[self.steps[number].chunk], self.operands[number]
            if operands > 1:
                longest += self.kernel + (operands + 1) * size / self.memory
            after_step[number] = longest
            while copies and copies[-1][1][0] == number:
                copy, _ = copies.pop()
                left[copy] = longest + self.least[copy]
        return left

    def _enqueue(self, stream: int, copy: int) -> None:
        heappush(self.ready_copies[stream][self.pairs[copy]], (self.rank[copy], copy))

    def _next_copy(self, stream: int) -> int:
        """Return the copy that the stream's sender chooses; -1 if none is ready."""
        ready = [
            (-self._speed_left(pair), copies[0], pair) for pair, copies in self.ready_copies[stream].items() if copies
        ]
        if not ready:
            return -1
        _, (_, copy), pair = min(ready)
        heappop(self.ready_copies[stream][pair])
        for resource in self.wires.shared[pair]:
            self.under_way[resource] += 1
        return copy

    def _speed_left(self, pair: int) -> float:
        """Return the share of its link's speed, at most 1, that a copy would have between two devices."""
        share = 1.0
        for resource, copies in self.wires.room[pair]:
            share = min(share, copies / (self.under_way[resource] + 1))
        return share

    def _end_flows(self, now: float) -> None:
        for pair, end in self.ends.items():
            if end <= now + SOON:
                for resource in self.wires.shared[pair]:
                    self.under_way[resource] -= 1
        super()._end_flows(now)
