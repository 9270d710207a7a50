"""What a plan costs on a machine: a discrete-event simulation, and the bound no plan gets below.

::

    GPU0 copy stream  [c0 → GPU3][c1 → GPU1]          one outgoing copy at a time, in the plan's order
    GPU3 compute                 [c0 sum]             a reduction: launch, then bytes through memory
    NV, PCIe, bus     ═══════════════════             bytes of several copies share what they pass evenly

A copy waits for its value, for its turn on the sender's stream, and for the sums issued before on both devices. Copies
that use the same port, uplink or bus at the same time share it max-min fairly. Between the end of a copy and the steps
that wait for it the host takes ``arrival`` seconds, during which nothing is busy. The assumptions, and where constants
come from, are in ``docs/cost-model.md``.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from functools import lru_cache, reduce
from heapq import heapify, heappop, heappush
from itertools import accumulate
from operator import or_
from typing import Deque, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from ..errors import PlanError
from ..topology import Speeds, Topology, resources, with_lanes
from .plan import Plan, Reduce, issued_before, operands
from .spanning_trees import pack


class Backward(NamedTuple):
    """A backward pass during which gradients become ready, evenly over its bytes.

    Attributes:
        backlog: how many seconds of kernels the host has queued on a tower's compute stream.
        seconds: of the whole pass. Gradients of ResNet-50 are taken: 102 MB in 60 ms.
    """

    backlog: float = 10e-3
    seconds: float = 60e-3


class Span(NamedTuple):
    """One bar of the timeline: ``step`` (its number in the plan) occupies a device from ``start`` to ``end`` seconds.

    ``dst`` is the receiver of a copy; for a reduction it is ``device`` itself.
    """

    step: int
    device: int
    dst: int
    start: float
    end: float


@dataclass(frozen=True)
class Timing:
    """A simulated run: ``seconds`` until every device has everything, copies and reductions as spans.

    ``link_bytes[src, dst]`` is what the link between two towers' GPUs carried; ``starts[step]`` when a step's last copy
    began.
    """

    seconds: float
    spans: Tuple[Span, ...]
    link_bytes: Dict[Tuple[int, int], float]
    starts: Tuple[float, ...]


def lower_bound(topology: Topology, size: int, ideal_links: bool = False, lanes: int = 0) -> float:
    """Return the seconds that every packing of spanning trees needs for ``size`` bytes, without latency."""
    return size / pack(topology, ideal_links, lanes).bound


def predicted_seconds(plan: Plan, topology: Topology, chunks: Sequence[float]) -> float:
    """Return the seconds of a plan on an idle machine: of its copies and sums, or of the host if that takes longer."""
    return max(Simulation(plan, topology, chunks).run().seconds, host_seconds(plan, topology.speeds))


def host_seconds(plan: Plan, speeds: Speeds) -> float:
    """Return the seconds of the host for dispatching a plan: each copy is a send and a receive, each sum one op."""
    counts = operands(plan)
    copies = sum(plan.transfers().values())
    return (2 * copies + sum(count > 1 for count in counts)) * speeds.dispatch


def simulate(
    plan: Plan,
    topology: Topology,
    chunks: Sequence[float],
    ideal_links: bool = False,
    ordered: bool = True,
    backward: Optional[Backward] = None,
) -> Timing:
    """Simulate ``plan`` on ``topology``.

    Args:
        plan: for as many towers as the topology has devices. Lanes share their GPU's links: :func:`.with_lanes`.
        topology: the machine.
        chunks: bytes of each chunk.
        ideal_links: a device's outgoing copies run at the same time, as far as links and ports allow.
        ordered: whether each sender's copies leave in the plan's order, or as they become ready.
        backward: the backward pass that goes on meanwhile; without it all gradients are there and the machine is idle.

    Raises:
        PlanError: the plan has another number of devices or chunks.
    """
    return Simulation(plan, topology, chunks, ideal_links, ordered, backward=backward).timing()


class _Work(NamedTuple):
    """The copies of a plan and their dependencies, in flat lists: a list for each step would slow garbage collection.

    Attributes:
        transfers: (step, src, dst, chunk) of each copy, in the plan's order.
        waits: for each step the number of copies and earlier steps that it waits for.
        operands: for each step the number of values that it adds up, 1 for a copy.
        copies: for each step a copy that waits for it, or -1.
        others: for each copy another one that waits for the same step, or -1.
        later: for each step the step that waits for it, or -1.
        first: the copies that wait for no step.
    """

    transfers: List[Tuple[int, int, int, int]]
    waits: List[int]
    operands: List[int]
    copies: List[int]
    others: List[int]
    later: List[int]
    first: List[int]


@lru_cache(maxsize=64)
def _work(plan: Plan) -> _Work:
    count = len(plan.steps)
    work = _Work([], [], operands(plan), [-1] * count, [], [-1] * count, [])
    transfers, waits, _, copies, others, later, first = work
    last: Dict[Tuple[int, int], int] = {}
    for number, step in enumerate(plan.steps):
        chunk, dst = step.chunk, step.dst
        sources = step.srcs if isinstance(step, Reduce) else (step.src,)
        own = last.get((dst, chunk)) if isinstance(step, Reduce) else None
        for src in sources:
            before = last.get((src, chunk))
            if before is None:
                first.append(len(transfers))
                others.append(-1)
            else:
                others.append(copies[before])
                copies[before] = len(transfers)
            transfers.append((number, src, dst, chunk))
        if own is not None:
            later[own] = number
        waits.append(len(sources) + (own is not None))
        last[dst, chunk] = number
    return work


_before = lru_cache(maxsize=64)(issued_before)


class _Wires:
    """A machine's links: a number for each pair of devices, its stream, and fair rates.

    The sets of pairs that copy at the same time recur, so each set's rates are computed once.
    """

    def __init__(self, topology: Topology, ideal_links: bool):
        paths = resources(topology, ideal_links).paths
        self.number = {pair: number for number, pair in enumerate(paths)}
        self.stream = [path[0][0] for path in paths.values()]
        self.alone = [1 / max(cost for _, cost in path) for path in paths.values()]  # bytes/s with no other copy
        self.speed = {resource: 1 / cost for path in paths.values() for resource, cost in path[1:]}
        streams: Dict[int, Set[int]] = {resource: set() for resource in self.speed}
        for path in paths.values():
            for resource, _ in path[1:]:
                streams[resource].add(path[0][0])
        # copies of one stream never share: they follow each other
        self.shared = [
            tuple(resource for resource, _ in path[1:] if len(streams[resource]) > 1) for path in paths.values()
        ]
        # how many copies at full speed each of them has room for
        self.room = [
            [(resource, self.speed[resource] / alone) for resource in shared]
            for shared, alone in zip(self.shared, self.alone)
        ]
        users: Dict[int, int] = defaultdict(int)
        for pair, shared in enumerate(self.shared):
            for resource in shared:
                users[resource] |= 1 << pair
        self.sharers = [reduce(or_, [users[resource] for resource in shared], 0) for shared in self.shared]  # as bits
        self._rates: Dict[int, Dict[int, float]] = {}

    def rates(self, mask: int, pairs: Iterable[int]) -> Dict[int, float]:
        """Return the bytes/s of each pair in a set of pairs, given as bits and as numbers, that copy at one time."""
        if mask not in self._rates:
            if len(self._rates) >= _MOST_RATES:
                self._rates.clear()
            self._rates[mask] = self._fair(list(pairs))
        return self._rates[mask]

    def _fair(self, pairs: List[int]) -> Dict[int, float]:
        """Return max-min fair rates: the smallest share is fixed first; the others divide what it leaves."""
        users = Counter(resource for pair in pairs for resource in self.shared[pair])
        left = {resource: self.speed[resource] for resource, count in users.items() if count > 1}
        crowded = {pair: [resource for resource in self.shared[pair] if resource in left] for pair in pairs}
        rates = {pair: self.alone[pair] for pair in pairs if not crowded[pair]}
        waiting = [pair for pair in pairs if crowded[pair]]
        while waiting:
            even = {resource: left[resource] / users[resource] for resource in left if users[resource]}
            share = {pair: min(self.alone[pair], *[even[resource] for resource in crowded[pair]]) for pair in waiting}
            least = min(share.values())
            waiting = [pair for pair in waiting if share[pair] > least * (1 + 1e-9)]
            for pair in share.keys() - set(waiting):
                rates[pair] = least
                for resource in crowded[pair]:
                    left[resource] = max(0.0, left[resource] - least)
                    users[resource] -= 1
        return rates


@lru_cache(maxsize=64)
def _wires(topology: Topology, ideal_links: bool) -> _Wires:
    return _Wires(topology, ideal_links)


def _issue_times(plan: Plan, chunks: Sequence[float], backward: Backward) -> List[float]:
    """Return when the host issues the first copies of each chunk: ahead of the kernels that make its bucket."""
    if not backward.seconds:
        return [0.0] * plan.chunks
    buckets = plan.buckets or (0,) * plan.chunks
    size: Dict[int, float] = defaultdict(float)
    for bucket, own in zip(buckets, chunks):
        size[bucket] += own
    done = dict(zip(sorted(size), accumulate(size[bucket] for bucket in sorted(size))))
    total = max(sum(chunks), 1e-9)
    return [backward.seconds * done[bucket] / total - backward.backlog for bucket in buckets]


TRAINING = Backward()
_IDLE = Backward(0.0, 0.0)
_READY, _FLOWS, _ARRIVED = range(3)
_MOST_RATES = 50_000  # sets of pairs whose rates are kept
SOON = 1e-9  # seconds: copies that end within this end together


class Simulation:
    """One run of a plan. Events leave the heap in order of time, then of readiness, then of the plan.

    A run longer than ``patience`` seconds is abandoned, as soon as a stream's copies would take that long, and reported
    as infinite.

    A sender issues the copies of one bucket in the plan's order, as the emitted graph does, and those of different
    buckets as they become ready. With ``ordered=False`` it issues all of them as they become ready. ``began`` has the
    seconds at which each copy began.

    During a backward pass the host is ahead of the towers' compute streams. What it issues to one of them, a sum or a
    copy into the tower, waits for the kernels that are queued there by then.

    Raises:
        PlanError: the plan has another number of devices or chunks.
    """

    def __init__(
        self,
        plan: Plan,
        topology: Topology,
        chunks: Sequence[float],
        ideal_links: bool = False,
        ordered: bool = True,
        patience: float = math.inf,
        backward: Optional[Backward] = None,
    ) -> None:
        if plan.towers != len(topology) or plan.chunks != len(chunks):
            raise PlanError(
                f"the plan is for {plan.towers} devices and {plan.chunks} chunks; "
                f"{topology.name} has {len(topology)} devices, and {len(chunks)} sizes are given"
            )
        self.plan, self.steps, self.chunks, self.patience = plan, plan.steps, chunks, patience
        work = _work(plan)
        self.transfers, self.waits = work.transfers, list(work.waits)
        self.copies, self.others, self.later, self.operands = work.copies, work.others, work.later, work.operands
        if plan.lanes:
            topology = with_lanes(topology, plan.lanes)
        self.wires = _wires(topology, ideal_links)
        number = self.wires.number
        self.pairs = [number[src, dst] for _, src, dst, _ in work.transfers]
        self.streams = [self.wires.stream[pair] for pair in self.pairs]
        speeds = topology.speeds
        self.latency, self.arrival, self.kernel, self.memory = (
            speeds.copy_latency,
            speeds.arrival,
            speeds.kernel,
            speeds.memory,
        )
        self.queues: Dict[int, Deque[int]] = {stream: deque() for stream in self.streams}
        self.ready = [plan.buckets[chunk] if plan.buckets else 0 for *_, chunk in work.transfers]
        self.missing = [1] * len(self.transfers)  # its value, and the copy before it
        self.follower = [-1] * len(self.transfers)
        for copy, before in enumerate(_before(plan)) if ordered else ():
            for other in before:
                self.missing[copy], self.follower[other] = 2, copy
        self.busy = dict.fromkeys(self.queues, False)
        alone = self.wires.alone
        self.least = [self.latency + chunks[copy[3]] / alone[pair] for copy, pair in zip(work.transfers, self.pairs)]
        self.waiting = dict.fromkeys(self.queues, 0.0)  # seconds that each stream's copies take at least
        for stream, seconds in zip(self.streams, self.least):
            self.waiting[stream] += seconds
        self.not_before = [0.0] * len(self.transfers)  # when the sums end that were there before a copy
        self.computing = [0.0] * plan.devices
        self.towers, self.backward = plan.towers, backward or _IDLE
        issued = _issue_times(plan, chunks, self.backward)
        # of what happens at the same time: ends and flows first, then the copies whose gradients are ready first
        self.events: List[Tuple[float, int, int, int]] = [
            (issued[work.transfers[copy][3]], self.ready[copy], copy, _READY) for copy in work.first
        ]
        heapify(self.events)
        self.flowing: Dict[int, int] = {}  # pair → copy
        self.rates: Dict[int, float] = {}  # pair → bytes/s
        self.ends: Dict[int, float] = {}  # pair → when its copy ends at these rates
        self.mask, self.next_end = 0, math.inf
        self.seconds = 0.0
        self.starts = [0.0] * len(plan.steps)
        self.spans: List[Tuple[int, int, int, float, float]] = []
        self.began = [0.0] * len(self.transfers)

    def run(self) -> Simulation:
        """Run to the end, or until ``patience`` seconds have passed."""
        events = self.events
        while events or self.flowing:
            if self.flowing and (not events or self.next_end <= events[0][0]):
                now = self.next_end
                if now > self.patience:
                    break
                self._end_flows(now)
                continue
            now, _, number, what = heappop(events)
            if now > self.patience:
                break
            if what == _FLOWS:
                self._begin_flow(number, now)
            elif what == _READY:
                self._dispatch(number, now)
            else:
                self._arrive(number, now)
        else:
            return self
        self.seconds = math.inf
        return self

    def timing(self) -> Timing:
        """Run the plan, once for each object, and return what happened when."""
        self.run()
        link_bytes: Dict[Tuple[int, int], float] = {}
        for _, src, dst, chunk in self.transfers:
            link = self.plan.tower(src), self.plan.tower(dst)
            if link[0] != link[1]:
                link_bytes[link] = link_bytes.get(link, 0) + self.chunks[chunk]
        return Timing(self.seconds, tuple(map(Span._make, self.spans)), link_bytes, tuple(self.starts))

    def _dispatch(self, copy: int, now: float) -> None:
        """Note that a copy's value is there; queue it if the copy before it was issued, and then those that follow it.

        It then waits for its turn, and for the sums that were issued before on both devices.
        """
        while copy >= 0:
            self.missing[copy] -= 1
            if self.missing[copy]:
                return
            _, src, dst, _ = self.transfers[copy]
            if now < self.backward.seconds:
                self.not_before[copy] = max(self._free(src, now), self._free(dst, now))
            else:
                self.not_before[copy] = max(self.computing[src], self.computing[dst])
            stream = self.streams[copy]
            self._enqueue(stream, copy)
            if not self.busy[stream]:
                self._issue(stream, now)
            copy = self.follower[copy]

    def _free(self, device: int, now: float) -> float:
        """Return when a device's compute stream is done with all that is queued there now."""
        if device >= self.towers or now >= self.backward.seconds:
            return self.computing[device]
        return max(self.computing[device], min(self.backward.seconds, now + self.backward.backlog))

    def _enqueue(self, stream: int, copy: int) -> None:
        self.queues[stream].append(copy)

    def _next_copy(self, stream: int) -> int:
        """Take the stream's next copy out of its queue, and return it; -1 if none is ready."""
        queue = self.queues[stream]
        return queue.popleft() if queue else -1

    def _issue(self, stream: int, now: float) -> None:
        """Start the stream's next copy, if there is one."""
        copy = self._next_copy(stream)
        if copy < 0:
            return
        start = max(now, self.not_before[copy])
        if start + self.waiting[stream] > self.patience + SOON:
            self.patience = -math.inf  # the run cannot end in time any more
        self.waiting[stream] -= self.least[copy]
        self.busy[stream] = True
        self.began[copy] = start
        step = self.transfers[copy][0]
        if start > self.starts[step]:
            self.starts[step] = start
        heappush(self.events, (start + self.latency, -1, copy, _FLOWS))

    def _begin_flow(self, copy: int, now: float) -> None:
        pair = self.pairs[copy]
        rate = self.rates[pair] = self.wires.alone[pair]
        end = self.ends[pair] = now + self.chunks[self.transfers[copy][3]] / rate
        self.flowing[pair] = copy
        shared = self.mask & self.wires.sharers[pair]
        self.mask |= 1 << pair
        if shared:
            self._share(now)
        elif end < self.next_end:
            self.next_end = end

    def _share(self, now: float) -> None:
        """Give each pair its fair rate from ``now`` on."""
        ends, rates = self.ends, self.rates
        for pair, rate in self.wires.rates(self.mask, ends).items():
            if rate != rates[pair]:
                ends[pair] = now + (ends[pair] - now) * rates[pair] / rate
                rates[pair] = rate
        self.next_end = min(ends.values(), default=math.inf)

    def _end_flows(self, now: float) -> None:
        ended = [pair for pair, end in self.ends.items() if end <= now + SOON]
        sharers = 0
        for pair in ended:
            del self.ends[pair], self.rates[pair]
            self.mask ^= 1 << pair
            sharers |= self.wires.sharers[pair]
        if self.mask & sharers:
            self._share(now)
        else:
            self.next_end = min(self.ends.values(), default=math.inf)
        copies = sorted([self.flowing.pop(pair) for pair in ended])
        for copy in copies:
            step, src, dst, _ = self.transfers[copy]
            self.spans.append((step, src, dst, self.began[copy], now))
            self.busy[self.streams[copy]] = False
            if self.arrival:
                heappush(self.events, (now + self.arrival, -1, step, _ARRIVED))
            else:
                self._arrive(step, now)
        if now > self.seconds:
            self.seconds = now
        for copy in copies:
            stream = self.streams[copy]
            if not self.busy[stream]:
                self._issue(stream, now)

    def _arrive(self, number: int, now: float) -> None:
        """Note that a copy has arrived, or the step before was issued; run the step if nothing else is missing."""
        self.waits[number] -= 1
        if self.waits[number]:
            return
        step = self.steps[number]
        if self.operands[number] > 1:
            start = max(now, self._free(step.dst, now))
            end = start + self.kernel + (self.operands[number] + 1) * self.chunks[step.chunk] / self.memory
            self.computing[step.dst] = end
            self.spans.append((number, step.dst, step.dst, start, end))
            self.seconds = max(self.seconds, end)
        copy = self.copies[number]
        while copy >= 0:
            heappush(self.events, (now, self.ready[copy], copy, _READY))
            copy = self.others[copy]
        if self.later[number] >= 0:
            self._arrive(self.later[number], now)
