"""The seconds that a plan leaves exposed: its copies and sums, issued one by one by the host behind a backward pass.

::

    host     │││  ││ │││              one op after another, ``lead`` seconds ahead of the kernels of the pass
    stream   [c0 → GPU3][c1 → GPU1]   a sender's copies follow each other; a port, an uplink or a bus is booked
    GPU3           [c0 sum]           in the order in which copies begin

Every node that TensorFlow executes is an op: packing, send, receive, sum, mean, copy, unpacking.
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heappop, heappush
from typing import Deque, List, NamedTuple, Optional, Sequence, Tuple

from ..topology import Links
from .chunks import Chunk, Gradient, chunks_of, ready
from .plan import Plan, Reduce, copies_in, sums_in

_GRADIENT, _BEGINS, _ENDS = range(3)  # kinds of events


class Case(NamedTuple):
    """One assumption about the training that nobody knows before it, in seconds.

    Attributes:
        dispatch: of the host for an op.
        backward: of the backward pass.
        lead: of the kernels that the host has queued on each device.
        by_bytes: whether gradients become ready evenly over their bytes; else over the variables.
    """

    dispatch: float
    backward: float
    lead: float
    by_bytes: bool = True


class _Step:
    """A step of one chunk: a copy, or a sum of ``operands`` tensors. Before its first step a tower has a gradient."""

    def __init__(self, number: int, chunk: int, dst: int, operands: int = 0):
        self.number, self.chunk, self.dst, self.operands = number, chunk, dst, operands
        self.waits = max(1, operands - 1)  # copies and sums that come before it
        self.opens: List[int] = []  # the copies of its result
        self.next_sum: Optional[_Step] = None  # on the same tower, which adds to its result
        self.is_last = not operands  # whether its destination then has the sum of all
        self.sums = int(operands > 0)  # ops: a sum, with a mean after the last one

    @property
    def receiving(self) -> int:
        """The ops of a copy on its destination: one more where the tower copies it on."""
        return 2 if self.opens and not self.operands else 1


class Work:
    """The copies, sums and ops of a plan on some chunks.

    Attributes:
        ops: the nodes that TensorFlow executes in a step, on all towers.
    """

    def __init__(self, plan: Plan, chunks: Sequence[Chunk], gradients: Sequence[Gradient]):
        self.towers, self.chunks = plan.towers, chunks
        self.shares = {by_bytes: ready(chunks, gradients, by_bytes) for by_bytes in (True, False)}
        self.packing, self.unpacking = _joining_ops(chunks, gradients)
        self.copies: List[Tuple[_Step, int]] = []  # each with its sender
        self.steps: List[_Step] = []
        self.gradients: List[List[_Step]] = []  # of each chunk, on each tower
        for chunk in range(len(chunks)):
            last = [
                _Step(-1, chunk, tower) for tower in range(self.towers)
            ]  # of each tower, its step so far
            self.gradients.append(list(last))
            schedule = plan.schedule(chunk)
            for step in schedule:
                added = _Step(
                    len(self.steps),
                    chunk,
                    step.dst,
                    len(step.srcs) + 1 if isinstance(step, Reduce) else 0,
                )
                for src in step.srcs:
                    last[src].opens.append(len(self.copies))
                    self.copies.append((added, src))
                before, last[step.dst] = last[step.dst], added
                if added.operands and before.operands:
                    before.next_sum = added
                    before.sums -= (
                        before.operands == added.operands == 2
                    )  # TensorFlow joins such sums of two
                    added.waits += 1
                self.steps.append(added)
            if sums_in(schedule):
                root = self.steps[-len(copies_in(schedule)) - 1]
                root.sums, root.is_last = root.sums + 1, True  # the mean
        on_steps = sum(step.sums for step in self.steps) + sum(
            step.receiving for step, _ in self.copies
        )
        self.ops = (
            len(self.copies) + on_steps + self.towers * (sum(self.packing) + sum(self.unpacking))
        )


def _joining_ops(
    chunks: Sequence[Chunk], gradients: Sequence[Gradient]
) -> Tuple[List[int], List[int]]:
    """Return for each chunk the ops that make it of gradients, and gradients of it, on one tower.

    A packed chunk is a concat and a split; a cut gradient is one split into its chunks, the first of which waits for
    it, and one concat, for which the last one waits. Gradients that are no vectors are reshaped on both sides.
    """
    packing, unpacking, cut = [], [], -1
    for chunk in chunks:
        first, _, stop = chunk.ranges[0]
        joining = (
            0
            if stop is None
            else 1 + sum(not gradients[number].is_flat for number, _, _ in chunk.ranges)
        )
        packing.append(joining)
        unpacking.append(joining)
        if first == cut:  # the chunks of a cut gradient follow each other
            packing[-1] = unpacking[-2] = 0
        cut = first
    return packing, unpacking


class Simulation:
    """One run of a plan's work behind a backward pass.

    Attributes:
        exposed: the seconds from the end of the pass until every tower has everything.
    """

    def __init__(self, work: Work, links: Links, case: Case):
        self._work, self._links, self._case = work, links, case
        self._host, self._spent, now = -math.inf, 0.0, 0.0
        self._end = case.backward  # of the kernels of the pass
        self._computing = [0.0] * work.towers
        self._booked = [0.0] * len(links.resources)
        self._queues: List[Deque[Tuple[float, int]]] = [
            deque() for _ in range(work.towers)
        ]  # the first one runs
        self._waits = [step.waits for step in work.steps]
        self._due = [share * case.backward - case.lead for share in work.shares[case.by_bytes]]
        self._events = sorted(
            (due, _GRADIENT, chunk) for chunk, due in enumerate(self._due)
        )  # a heap too
        happen = (self._gradient, self._begins, self._ends)
        while self._events:
            now, kind, number = heappop(self._events)
            happen[kind](now, number)
        self.exposed = max(now, self._host, self._end, *self._computing) - case.backward

    def _op(self, now: float, count: int = 1) -> float:
        """Take the host's next ops, and return when they start. They use up its lead; further ones hold up the pass."""
        start = max(now, self._host)
        self._host = start + count * self._case.dispatch
        if start < self._end:
            self._spent += count * self._case.dispatch
            self._end = self._case.backward + max(0.0, self._spent - self._case.lead)
        return start

    def _queued(self, device: int, now: float) -> float:
        """Return when a device is done with the kernels that are queued there now."""
        return max(self._computing[device], min(self._end, now + self._case.lead))

    def _gradient(self, now: float, chunk: int) -> None:
        due = self._due[chunk] + self._end - self._case.backward
        if due > now + 1e-12:  # ops have held up the host
            heappush(self._events, (due, _GRADIENT, chunk))
            return
        for gradient in self._work.gradients[chunk]:
            self._op(now, self._work.packing[chunk])
            self._issue(now, gradient)

    def _issue(self, now: float, step: _Step) -> None:
        """Queue the copies of a step's result behind the kernels of both devices and the copies of the sender."""
        for copy in step.opens:
            issued, (receiver, src) = self._op(now), self._work.copies[copy]
            after = max(issued, self._queued(src, issued), self._queued(receiver.dst, issued))
            self._queues[src].append((after, copy))
            if len(self._queues[src]) == 1:
                heappush(self._events, (after, _BEGINS, copy))

    def _begins(self, now: float, copy: int) -> None:
        step, src = self._work.copies[copy]
        link, size = self._links.ways[src, step.dst], self._work.chunks[step.chunk].bytes
        start = max([now + link.latency, *(self._booked[resource] for resource, _ in link.shared)])
        for resource, together in link.shared:
            self._booked[resource] = start + size / together
        heappush(self._events, (start + size / link.bandwidth, _ENDS, copy))

    def _ends(self, now: float, copy: int) -> None:
        step, src = self._work.copies[copy]
        self._queues[src].popleft()
        if self._queues[src]:
            after, following = self._queues[src][0]
            heappush(self._events, (max(after, now), _BEGINS, following))
        noticed = self._op(now, step.receiving)
        following_sum: Optional[_Step] = step
        while following_sum:
            step, following_sum = following_sum, following_sum.next_sum
            self._waits[step.number] -= 1
            if self._waits[step.number]:
                return
            if step.operands:
                issued = self._op(noticed, step.sums)
                moved, speeds = (
                    (step.operands + 1) * self._work.chunks[step.chunk].bytes,
                    self._links.speeds,
                )
                runs = speeds.kernel + moved / speeds.memory
                self._computing[step.dst] = max(issued, self._queued(step.dst, issued)) + runs
            self._issue(noticed, step)
            if step.is_last:
                self._op(noticed, self._work.unpacking[step.chunk])


def exposed(
    plan: Plan, links: Links, gradients: Sequence[Gradient], cases: Sequence[Case]
) -> List[float]:
    """Return the exposed seconds of a plan in each case."""
    work = Work(plan, chunks_of(gradients, plan.chunk_bytes), gradients)
    return [Simulation(work, links, case).exposed for case in cases]
