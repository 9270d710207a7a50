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
from heapq import heapify, heappop, heappush
from typing import Deque, Dict, List, NamedTuple, Sequence, Tuple

from ..topology import Links
from .chunks import Chunk, Gradient, chunks_of, ready
from .plan import Plan, Reduce, Schedule, copies_in, sums_in

_GRADIENT, _ISSUED, _BEGINS, _ENDS = range(4)


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
    """A step of one chunk: a copy, or a sum of ``operands`` tensors (0 for a copy)."""

    def __init__(self, chunk: int, dst: int, operands: int):
        self.chunk, self.dst, self.operands = chunk, dst, operands
        self.waits = max(1, operands - 1)  # copies and sums that come before it
        self.opens: List[int] = []  # the copies of its result
        self.next_sum = -1  # on the same tower, which adds to its result
        self.is_last = False  # whether its destination then has the sum of all
        self.sums = int(operands > 0)  # ops: a sum, with a mean after the last one

    @property
    def receiving(self) -> int:
        """The ops of a copy on its destination: one more where the tower copies it on."""
        return 2 if self.opens and not self.operands else 1


class Work:
    """The copies, sums and ops of a plan on some chunks, numbered.

    Attributes:
        ops: the nodes that TensorFlow executes in a step, on all towers.
    """

    def __init__(self, plan: Plan, chunks: Sequence[Chunk], gradients: Sequence[Gradient]):
        self.towers, self.chunks = plan.towers, chunks
        self.packing, self.unpacking = _joining_ops(chunks, gradients)
        self.copies: List[Tuple[int, int]] = []  # of each copy its step and its sender
        self.steps: List[_Step] = []
        self.first: List[List[List[int]]] = []  # of each chunk and tower, the copies of its gradients
        for number in range(len(chunks)):
            self._add(number, plan.schedule(number))
        on_steps = sum(step.sums for step in self.steps) + sum(self.steps[step].receiving for step, _ in self.copies)
        self.ops = len(self.copies) + on_steps + self.towers * (sum(self.packing) + sum(self.unpacking))

    def _add(self, chunk: int, schedule: Schedule) -> None:
        self.first.append([[] for _ in range(self.towers)])
        last: Dict[int, int] = {}  # of each tower, its step so far
        for step in schedule:
            for src in step.srcs:
                (self.steps[last[src]].opens if src in last else self.first[-1][src]).append(len(self.copies))
                self.copies.append((len(self.steps), src))
            added = _Step(chunk, step.dst, len(step.srcs) + 1 if isinstance(step, Reduce) else 0)
            if added.operands and step.dst in last:
                before = self.steps[last[step.dst]]
                before.next_sum = len(self.steps)
                before.sums -= before.operands == added.operands == 2  # TensorFlow joins such sums of two
                added.waits += 1
            last[step.dst] = len(self.steps)
            self.steps.append(added)
        for number in last.values():
            self.steps[number].is_last = True
        if sums_in(schedule):
            self.steps[len(self.steps) - len(copies_in(schedule)) - 1].sums += 1


def _joining_ops(chunks: Sequence[Chunk], gradients: Sequence[Gradient]) -> Tuple[List[int], List[int]]:
    """Return for each chunk the ops that make it of gradients, and gradients of it, on one tower.

    A packed chunk is a concat and a split; a cut gradient is one split into its chunks, the first of which waits for
    it, and one concat, for which the last one waits. Gradients that are no vectors are reshaped on both sides.
    """
    packing, unpacking = [0] * len(chunks), [0] * len(chunks)
    last: Dict[int, int] = {}  # of each cut gradient, its last chunk so far
    for number, chunk in enumerate(chunks):
        joining = 0 if chunk.is_alone else 1 + sum(not gradients[of].is_flat for of, _, _ in chunk.ranges)
        packing[number] = unpacking[number] = joining
        if joining and len(chunk.ranges) == 1:
            cut = chunk.ranges[0].number
            if cut in last:
                packing[number] = unpacking[last[cut]] = 0
            last[cut] = number
    return packing, unpacking


class Simulation:
    """One run of a plan's work behind a backward pass. ``shares``: of the pass, after which each chunk is ready.

    Attributes:
        exposed: the seconds from the end of the pass until every tower has everything.
    """

    def __init__(self, work: Work, links: Links, shares: Sequence[float], case: Case):
        self._work, self._links, self._case = work, links, case
        self._host, self._spent, self._done = -math.inf, 0.0, 0.0
        self._end = case.backward  # of the kernels of the pass
        self._computing = [0.0] * work.towers
        self._booked = [0.0] * len(links.resources)
        self._queues: List[Deque[Tuple[float, int]]] = [deque() for _ in range(work.towers)]  # the first one runs
        self._waits = [step.waits for step in work.steps]
        self._due = [share * case.backward - case.lead for share in shares]
        self._events = [(due, _GRADIENT, chunk) for chunk, due in enumerate(self._due)]
        heapify(self._events)
        happen = (self._gradient, self._issued, self._begins, self._ends)
        while self._events:
            now, kind, number = heappop(self._events)
            happen[kind](now, number)
        self.exposed = max(self._done, self._end) - case.backward

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
        for copies in self._work.first[chunk]:
            self._op(now, self._work.packing[chunk])
            self._issue(now, copies)

    def _issue(self, now: float, copies: Sequence[int]) -> None:
        for copy in copies:
            heappush(self._events, (self._op(now), _ISSUED, copy))

    def _issued(self, now: float, copy: int) -> None:
        step, src = self._work.copies[copy]
        after = max(now, self._queued(src, now), self._queued(self._work.steps[step].dst, now))
        self._queues[src].append((after, copy))
        if len(self._queues[src]) == 1:
            heappush(self._events, (after, _BEGINS, copy))

    def _begins(self, now: float, copy: int) -> None:
        number, src = self._work.copies[copy]
        step = self._work.steps[number]
        link, size = self._links.ways[src, step.dst], self._work.chunks[step.chunk].bytes
        start = max([now + link.latency, *(self._booked[resource] for resource, _ in link.shared)])
        for resource, together in link.shared:
            self._booked[resource] = start + size / together
        heappush(self._events, (start + size / link.bandwidth, _ENDS, copy))

    def _ends(self, now: float, copy: int) -> None:
        number, src = self._work.copies[copy]
        self._queues[src].popleft()
        if self._queues[src]:
            after, following = self._queues[src][0]
            heappush(self._events, (max(after, now), _BEGINS, following))
        noticed = self._op(now, self._work.steps[number].receiving)
        while number >= 0:
            self._waits[number] -= 1
            if self._waits[number]:
                return
            step = self._work.steps[number]
            if step.operands:
                issued = self._op(noticed, step.sums)
                moved, speeds = (step.operands + 1) * self._work.chunks[step.chunk].bytes, self._links.speeds
                runs = speeds.kernel + moved / speeds.memory
                self._computing[step.dst] = max(issued, self._queued(step.dst, issued)) + runs
                self._done = max(self._done, self._computing[step.dst])
            self._issue(noticed, step.opens)
            if step.is_last:
                self._op(noticed, self._work.unpacking[step.chunk])
                self._done = max(self._done, now, self._host)
            number = step.next_sum


def simulate(
    work: Work, links: Links, gradients: Sequence[Gradient], cases: Sequence[Case], most: float = math.inf
) -> List[float]:
    """Return the exposed seconds of each case; infinite after the case in which their sum is above ``most``."""
    shares = {by_bytes: ready(work.chunks, gradients, by_bytes) for by_bytes in (True, False)}
    seconds: List[float] = []
    for case in cases:
        is_worse = sum(seconds) > most
        seconds.append(math.inf if is_worse else Simulation(work, links, shares[case.by_bytes], case).exposed)
    return seconds


def exposed(
    plan: Plan, links: Links, gradients: Sequence[Gradient], cases: Sequence[Case], most: float = math.inf
) -> List[float]:
    """Return the exposed seconds of a plan, as :func:`simulate`."""
    work = Work(plan, chunks_of(gradients, plan.chunk_bytes), gradients)
    return simulate(work, links, gradients, cases, most)
