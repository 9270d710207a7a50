"""What a plan costs on a machine: a discrete-event simulation.

::

    GPU0 copy stream  [c0 → GPU3][c1 → GPU1]          one outgoing copy at a time, in the plan's order
    GPU3 compute                 [c0 sum]             a sum: launch, then bytes through memory
    NV, PCIe, bus     ═══════════════════             bytes of several copies share what they pass evenly
    host              │││       ││ │││                one op after another, each ``dispatch`` seconds

A copy waits for its value, for the host, for its turn on the sender's stream, and for the sums and kernels issued
before on both devices. The assumptions, and where constants come from, are in ``docs/cost-model.md``.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import Deque, Dict, List, NamedTuple, Sequence, Tuple

from ..errors import HierAllreduceError
from ..topology import Topology, with_lanes
from .flows import Flows, wires
from .host import IDLE, BackwardPass, Host
from .plan import Plan, Reduce, Step, issued_before, operands


class Span(NamedTuple):
    """One bar of the timeline: ``step`` (its number in the plan) occupies a device from ``start`` to ``end`` seconds.

    ``dst`` is the receiver of a copy; for a sum it is ``device`` itself.
    """

    step: int
    device: int
    dst: int
    start: float
    end: float


@dataclass(frozen=True)
class Timing:
    """A simulated run: ``seconds`` until every device has everything, copies and sums as spans.

    ``link_bytes[src, dst]`` is what the link between two towers' GPUs carried; ``starts[step]`` when a step's last copy
    began.
    """

    seconds: float
    spans: Tuple[Span, ...]
    link_bytes: Dict[Tuple[int, int], float]
    starts: Tuple[float, ...]


def simulate(
    plan: Plan,
    topology: Topology,
    chunks: Sequence[float],
    ideal_links: bool = False,
    ordered: bool = True,
    backward: BackwardPass = IDLE,
) -> Timing:
    """Simulate ``plan`` on ``topology``.

    Args:
        plan: for as many towers as the topology has devices. Lanes share their GPU's links: :func:`.with_lanes`.
        topology: the machine.
        chunks: bytes of each chunk.
        ideal_links: a device's outgoing copies run at the same time, as far as links and ports allow.
        ordered: whether each sender's copies leave in the plan's order, or as they become ready.
        backward: the backward pass that goes on meanwhile; by default all gradients are there and the machine is idle.

    Raises:
        HierAllreduceError: the plan has another number of devices or chunks.
    """
    if plan.towers != len(topology) or plan.chunks != len(chunks):
        raise HierAllreduceError(
            f"the plan is for {plan.towers} devices and {plan.chunks} chunks; "
            f"{topology.name} has {len(topology)} devices, and {len(chunks)} sizes are given"
        )
    work = work_of(plan.devices, plan.towers, plan.steps, operands(plan))
    before = issued_before(plan) if ordered else ()
    run = Simulation(work, topology, chunks, plan.buckets or (0,) * plan.chunks, backward, ideal_links, before).run()
    return run.timing(plan)


def predicted_seconds(plan: Plan, topology: Topology, chunks: Sequence[float], backward: BackwardPass = IDLE) -> float:
    """Return the seconds that a plan leaves exposed after a backward pass; all of its seconds on an idle machine."""
    return simulate(plan, topology, chunks, backward=backward).seconds - backward.seconds


class Work(NamedTuple):
    """The copies and sums of a plan and their dependencies, in flat lists.

    Attributes:
        devices: the number of devices, towers first.
        towers: the number of towers.
        transfers: (step, src, dst, chunk) of each copy, in the plan's order.
        steps: (chunk, dst) of each step.
        waits: for each step the number of copies and earlier steps that it waits for.
        operands: for each step the number of values that it adds up, 1 for a copy.
        copies: for each step the copies that wait for it.
        later: for each step the step that waits for it, or -1.
        first: the copies that wait for no step.
    """

    devices: int
    towers: int
    transfers: List[Tuple[int, int, int, int]]
    steps: List[Tuple[int, int]]
    waits: List[int]
    operands: List[int]
    copies: List[List[int]]
    later: List[int]
    first: List[int]


def joined(buckets: Sequence[Work]) -> Work:
    """Return the work of several buckets, whose chunks, steps and copies are numbered one after another."""
    if len(buckets) == 1:
        return buckets[0]
    whole = Work(buckets[0].devices, buckets[0].towers, [], [], [], [], [], [], [])
    chunks = 0
    for work in buckets:
        steps, copies = len(whole.steps), len(whole.transfers)
        whole.transfers.extend([(step + steps, src, dst, chunk + chunks) for step, src, dst, chunk in work.transfers])
        whole.steps.extend([(chunk + chunks, dst) for chunk, dst in work.steps])
        whole.waits.extend(work.waits)
        whole.operands.extend(work.operands)
        whole.copies.extend([[copy + copies for copy in own] for own in work.copies])
        whole.later.extend([step + steps if step >= 0 else -1 for step in work.later])
        whole.first.extend([copy + copies for copy in work.first])
        chunks += 1 + max(chunk for chunk, _ in work.steps)
    return whole


def work_of(devices: int, towers: int, steps: Sequence[Step], added: Sequence[int]) -> Work:
    """Return the work of steps, of which ``added`` are the numbers of operands."""
    work = Work(devices, towers, [], [], [], list(added), [[] for _ in steps], [-1] * len(steps), [])
    last: Dict[Tuple[int, int], int] = {}
    for number, step in enumerate(steps):
        chunk, dst = step.chunk, step.dst
        sources = step.srcs if isinstance(step, Reduce) else (step.src,)
        own = last.get((dst, chunk)) if isinstance(step, Reduce) else None
        for src in sources:
            before = last.get((src, chunk))
            waiting = work.first if before is None else work.copies[before]
            waiting.append(len(work.transfers))
            work.transfers.append((number, src, dst, chunk))
        if own is not None:
            work.later[own] = number
        work.waits.append(len(sources) + (own is not None))
        work.steps.append((chunk, dst))
        last[dst, chunk] = number
    return work


def ready_times(buckets: Sequence[int], chunks: Sequence[float], backward: BackwardPass) -> List[float]:
    """Return when the last gradient of each chunk's bucket is there."""
    if not backward.seconds:
        return [0.0] * len(chunks)
    size: Dict[int, float] = defaultdict(float)
    for bucket, own in zip(buckets, chunks):
        size[bucket] += own
    done = dict(zip(sorted(size), accumulate(size[bucket] for bucket in sorted(size))))
    total = max(sum(chunks), 1e-9)
    return [backward.seconds * done[bucket] / total for bucket in buckets]


_FLOWS, _ARRIVED, _NOTED, _SUMMED, _ISSUED, _GRADIENT = range(6)


class Simulation:
    """One run of a plan's work. Events leave the heap in order of time, then of the plan.

    The host is TensorFlow's executor on one thread: it takes what became ready first, and goes on at once with what is
    ready for it. So a tower's first copies of a bucket, which come from one op, are issued together, and copies of a
    sum directly after it.

    A run longer than ``patience`` seconds is abandoned and reported as infinite.

    A sender issues copies as they become ready. ``before`` (:func:`.issued_before`) has for each copy the copies that
    it follows in addition, as in the emitted graph.
    """

    def __init__(
        self,
        work: Work,
        topology: Topology,
        chunks: Sequence[float],
        buckets: Sequence[int],
        backward: BackwardPass = IDLE,
        ideal_links: bool = False,
        before: Sequence[Sequence[int]] = (),
        patience: float = math.inf,
    ) -> None:
        self.work, self.chunks, self.backward, self.patience = work, chunks, backward, patience
        self.transfers, self.speeds = work.transfers, topology.speeds
        self.host = Host(topology.speeds.dispatch, backward)
        links = wires(with_lanes(topology, work.devices // work.towers - 1), ideal_links)
        self.pairs = [links.number[src, dst] for _, src, dst, _ in work.transfers]
        self.latency = [links.latency[pair] for pair in self.pairs]
        self.streams = [links.stream[pair] for pair in self.pairs]
        self.queues: Dict[int, Deque[int]] = {stream: deque() for stream in self.streams}
        self.busy = dict.fromkeys(self.queues, False)
        self.flows = Flows(links)
        self.computing = [0.0] * work.devices  # when each device is done with its sums
        self.waits = list(work.waits)
        self.missing = [1] * len(work.transfers)  # its value, and the copy before it
        self.follower = [-1] * len(work.transfers)
        for copy, others in enumerate(before):
            for other in others:
                self.missing[copy], self.follower[other] = 2, copy
        self.ready = ready_times(buckets, chunks, backward)  # of each chunk
        gradients: Dict[Tuple[int, int], List[int]] = defaultdict(list)  # (tower, bucket) → its first copies
        for copy in work.first:
            _, src, _, chunk = work.transfers[copy]
            gradients[src, buckets[chunk]].append(copy)
        self.first = {copies[0]: copies for copies in gradients.values()}
        self.events: List[Tuple[float, int, int]] = [
            (self.host.issues(self.ready[work.transfers[copy][3]]), _GRADIENT, copy) for copy in self.first
        ]
        heapify(self.events)
        self._happen = [self._flow, self._arrive, self._unblock, self._sum, self._queue, self._gradient]
        self.seconds = 0.0
        self.not_before = [0.0] * len(work.transfers)  # when what was there before a copy on its devices is done
        self.began = [0.0] * len(work.transfers)
        self.spans: List[Tuple[int, int, int, float, float]] = []

    def run(self) -> Simulation:
        """Run to the end, or until ``patience`` seconds have passed."""
        events, flows = self.events, self.flows
        while events or flows.next_end < math.inf:
            if not events or flows.next_end <= events[0][0]:
                now = flows.next_end
                if now > self.patience:
                    break
                self._end_flows(now)
                continue
            now, what, number = heappop(events)
            if now > self.patience:
                break
            self._happen[what](number, now)
        else:
            self.seconds = max(self.seconds, self.host.end)
            return self
        self.seconds = math.inf
        return self

    def timing(self, plan: Plan) -> Timing:
        """Return what happened when, of the plan that was run."""
        link_bytes: Dict[Tuple[int, int], float] = {}
        for _, src, dst, chunk in self.transfers:
            link = plan.tower(src), plan.tower(dst)
            if link[0] != link[1]:
                link_bytes[link] = link_bytes.get(link, 0) + self.chunks[chunk]
        return Timing(self.seconds, tuple(map(Span._make, self.spans)), link_bytes, tuple(self.starts()))

    def starts(self) -> List[float]:
        """Return when the last copy of each step began."""
        starts = [0.0] * len(self.work.steps)
        for (step, *_), began in zip(self.transfers, self.began):
            starts[step] = max(starts[step], began)
        return starts

    # ---- events ----------------------------------------------------------------------------------------

    def _gradient(self, copy: int, now: float) -> None:
        """Issue a tower's first copies of a bucket, unless the host is late because of other ops."""
        due = self.host.issues(self.ready[self.transfers[copy][3]])
        if due > now + 1e-12:
            heappush(self.events, (due, _GRADIENT, copy))
            return
        for each in self.first[copy]:
            self._ready(each, now)

    def _ready(self, copy: int, now: float) -> None:
        """Note that a copy's value is there; issue it if the copy before it was issued, and then what follows it."""
        while copy >= 0:
            self.missing[copy] -= 1
            if self.missing[copy]:
                return
            self._at(self.host.dispatched(now), now, _ISSUED, copy)
            copy = self.follower[copy]

    def _at(self, time: float, now: float, what: int, number: int) -> None:
        """Let something happen at a time that is not before ``now``."""
        if time > now:
            heappush(self.events, (time, what, number))
        else:
            self._happen[what](number, now)

    def _queue(self, copy: int, now: float) -> None:
        """Put an issued copy on its sender's stream, after the sums and kernels issued before on both devices."""
        _, src, dst, _ = self.transfers[copy]
        self.not_before[copy] = max(self._free(src, now), self._free(dst, now))
        stream = self.streams[copy]
        self.queues[stream].append(copy)
        if not self.busy[stream]:
            self._start(stream, now)

    def _free(self, device: int, now: float) -> float:
        """Return when a device's compute stream is done with all that is queued there now."""
        if device >= self.work.towers or now >= self.host.end:
            return self.computing[device]
        return max(self.computing[device], self.host.queued(now))

    def _start(self, stream: int, now: float) -> None:
        """Start the stream's next copy, if there is one."""
        if not self.queues[stream]:
            return
        copy = self.queues[stream].popleft()
        start = max(now, self.not_before[copy])
        self.busy[stream] = True
        self.began[copy] = start
        heappush(self.events, (start + self.latency[copy], _FLOWS, copy))

    def _flow(self, copy: int, now: float) -> None:
        self.flows.begin(copy, self.pairs[copy], self.chunks[self.transfers[copy][3]], now)

    def _end_flows(self, now: float) -> None:
        copies = self.flows.end(now)
        for copy in copies:
            step, src, dst, _ = self.transfers[copy]
            self.spans.append((step, src, dst, self.began[copy], now))
            self.busy[self.streams[copy]] = False
            self._at(now + self.speeds.arrival, now, _ARRIVED, step)
        if now > self.seconds:
            self.seconds = now
        for copy in copies:
            if not self.busy[self.streams[copy]]:
                self._start(self.streams[copy], now)

    def _arrive(self, step: int, now: float) -> None:
        """Let the host note that a copy has arrived."""
        noted = self.host.dispatched(now)
        self.seconds = max(self.seconds, noted)
        self._at(noted, now, _NOTED, step)

    def _unblock(self, step: int, now: float) -> None:
        """Issue a step's sum if nothing else is missing, and then what waits for it."""
        self.waits[step] -= 1
        if self.waits[step]:
            return
        if self.work.operands[step] > 1:
            self._at(self.host.dispatched(now), now, _SUMMED, step)
        for copy in self.work.copies[step]:
            self._ready(copy, now)
        if self.work.later[step] >= 0:
            self._unblock(self.work.later[step], now)

    def _sum(self, step: int, now: float) -> None:
        """Put an issued sum on its device's compute stream."""
        chunk, dst = self.work.steps[step]
        start = max(now, self._free(dst, now))
        end = start + self.speeds.kernel + (self.work.operands[step] + 1) * self.chunks[chunk] / self.speeds.memory
        self.computing[dst] = end
        self.spans.append((step, dst, dst, start, end))
        self.seconds = max(self.seconds, end)
