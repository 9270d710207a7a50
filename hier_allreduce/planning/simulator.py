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
from typing import Deque, Dict, List, NamedTuple, Sequence, Set, Tuple

from ..topology import Links
from .chunks import Chunk, Gradient, ready
from .plan import Plan, Reduce, sums_in

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


class Work:
    """The copies, sums and ops of a plan on some chunks, numbered.

    Attributes:
        ops: the nodes that TensorFlow executes in a step, on all towers.
    """

    def __init__(self, plan: Plan, chunks: Sequence[Chunk], gradients: Sequence[Gradient]):
        self.towers, self.chunks, self.sizes = plan.towers, chunks, [float(chunk.bytes) for chunk in chunks]
        self.packing, self.unpacking = _joining_ops(chunks, gradients)
        self.copies: List[Tuple[int, int]] = []  # of each copy its step and its sender
        self.steps: List[Tuple[int, int, int]] = []  # chunk, destination, operands of the sum (0 for a copy)
        self.waits: List[int] = []  # of each step, how many copies and sums come before it
        self.opens: List[List[int]] = []  # of each step, the copies of its result
        self.next_sum: List[int] = []  # of each step, the sum on the same tower that adds to its result; or -1
        self.is_last: List[bool] = []  # of each step, whether its destination then has the sum of all
        self.first: List[List[List[int]]] = []  # of each chunk and tower, the copies of its gradients
        self.means: Set[int] = set()  # the last sum of each chunk, which a mean follows
        for number, chunk in enumerate(chunks):
            self._add(number, chunk, plan)
        receiving = sum(self.receiving(step) for step, _ in self.copies)
        sums = sum(self.adding(step) for step, (_, _, operands) in enumerate(self.steps) if operands)
        self.ops = len(self.copies) + receiving + sums + self.towers * (sum(self.packing) + sum(self.unpacking))

    def receiving(self, step: int) -> int:
        """Return the ops of a copy on its destination: one more where the tower copies it on."""
        return 1 + (not self.steps[step][2] and bool(self.opens[step]))

    def adding(self, step: int) -> int:
        """Return the ops of a sum, with the mean; TensorFlow joins a sum of two with the next one of the same tower."""
        following = self.next_sum[step]
        is_joined = following >= 0 and self.steps[step][2] == self.steps[following][2] == 2
        return (not is_joined) + (step in self.means)

    def _add(self, number: int, chunk: Chunk, plan: Plan) -> None:
        self.first.append([[] for _ in range(plan.towers)])
        last: Dict[int, int] = {}
        sums = len(sums_in(plan.schedule(number)))
        for step in plan.schedule(number):
            this, adds, sums = len(self.steps), isinstance(step, Reduce), sums - 1
            if not sums:
                self.means.add(this)
            for src in step.srcs:
                (self.opens[last[src]] if src in last else self.first[-1][src]).append(len(self.copies))
                self.copies.append((this, src))
            if adds and step.dst in last:
                self.next_sum[last[step.dst]] = this
            self.steps.append((number, step.dst, len(step.srcs) + 1 if adds else 0))
            self.waits.append(len(step.srcs) + (adds and step.dst in last))
            self.opens.append([])
            self.next_sum.append(-1)
            self.is_last.append(False)
            last[step.dst] = this
        for this in last.values():
            self.is_last[this] = True


def _joining_ops(chunks: Sequence[Chunk], gradients: Sequence[Gradient]) -> Tuple[List[int], List[int]]:
    """Return for each chunk the ops that make it of gradients, and gradients of it, on one tower.

    A packed chunk is a concat and a split; a cut gradient is one split into its chunks, the first of which waits for
    it, and one concat, for which the last one waits. Gradients that are no vectors are reshaped on both sides.
    """
    packing, unpacking = [0] * len(chunks), [0] * len(chunks)
    last: Dict[int, int] = {}  # of each cut gradient, its last chunk so far
    for number, chunk in enumerate(chunks):
        reshapes = sum(not gradients[of].is_flat for of, _, _ in chunk.ranges)
        if chunk.is_alone:
            continue
        if len(chunk.ranges) > 1:
            packing[number] = unpacking[number] = 1 + reshapes
        else:
            cut = chunk.ranges[0].number
            packing[number] = 0 if cut in last else 1 + reshapes
            unpacking[last.get(cut, number)] = 0
            unpacking[number], last[cut] = 1 + reshapes, number
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
        self._queues: List[Deque[Tuple[float, int]]] = [deque() for _ in range(work.towers)]
        self._busy = [False] * work.towers
        self._waits = list(work.waits)
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
        after = max(self._queued(src, now), self._queued(self._work.steps[step][1], now))
        self._queues[src].append((after, copy))
        if not self._busy[src]:
            self._next(src, now)

    def _next(self, src: int, now: float) -> None:
        """Begin the sender's next copy: its stream runs them one after another."""
        self._busy[src] = bool(self._queues[src])
        if self._busy[src]:
            after, copy = self._queues[src].popleft()
            heappush(self._events, (max(after, now), _BEGINS, copy))

    def _begins(self, now: float, copy: int) -> None:
        step, src = self._work.copies[copy]
        chunk, dst, _ = self._work.steps[step]
        link, size = self._links.ways[src, dst], self._work.sizes[chunk]
        start = max([now + link.latency, *(self._booked[resource] for resource, _ in link.shared)])
        for resource, together in link.shared:
            self._booked[resource] = start + size / together
        heappush(self._events, (start + size / link.bandwidth, _ENDS, copy))

    def _ends(self, now: float, copy: int) -> None:
        step, src = self._work.copies[copy]
        self._next(src, now)
        chunk, dst, operands = self._work.steps[step]
        noticed = self._op(now, self._work.receiving(step))
        while step >= 0:
            self._waits[step] -= 1
            if self._waits[step]:
                return
            _, dst, operands = self._work.steps[step]
            if operands:
                issued = self._op(noticed, self._work.adding(step))
                moved = (operands + 1) * self._work.sizes[chunk] / self._links.memory
                self._computing[dst] = max(issued, self._queued(dst, issued)) + self._links.kernel + moved
                self._done = max(self._done, self._computing[dst])
            self._issue(noticed, self._work.opens[step])
            if self._work.is_last[step]:
                self._op(noticed, self._work.unpacking[chunk])
                self._done = max(self._done, now, self._host)
            step = self._work.next_sum[step]


def exposed(
    plan: Plan, links: Links, chunks: Sequence[Chunk], gradients: Sequence[Gradient], cases: Sequence[Case]
) -> List[float]:
    """Return the seconds that a plan leaves exposed in each case."""
    work = Work(plan, chunks, gradients)
    shares = {by_bytes: ready(chunks, gradients, by_bytes) for by_bytes in {case.by_bytes for case in cases}}
    return [Simulation(work, links, shares[case.by_bytes], case).exposed for case in cases]
