"""What a plan costs on a machine: a discrete-event simulation, and the bound no plan gets below.

::

    GPU0 copy stream  [c0 → GPU3][c1 → GPU1]          one outgoing copy at a time: TensorFlow's rule
    GPU3 compute                 [c0 sum]             a reduction: launch, then bytes through memory

Copies wait for the value they send, for their turn on the sender's copy stream, and for what is shared on the way;
reductions wait for all their sources and for the device's compute stream. The assumptions, and where the constants come
from, are in ``docs/cost-model.md``.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from typing import Dict, List, NamedTuple, Sequence, Set, Tuple

from ..errors import PlanError, StrategyError
from ..presets import nearest
from ..topology import Path, Topology, resources
from .plan import Plan, Reduce
from .spanning_trees import pack


class Rule(NamedTuple):
    """How copies are executed where TensorFlow's runtime leaves it open.

    ``order``: a sender issues its copies as they become ready (``"ready"``), strictly in the plan's order (``"plan"``),
    or the first in the plan that could start at once (``"free"``). ``one_receive``: a device takes in one copy
    at a time. ``held``: a copy holds all it passes from its start to its end, not only while its bytes pass.
    """

    order: str
    one_receive: bool
    held: bool


# "queue" is how TensorFlow's GPU devices are understood to work; the other two are the ends between which others lie.
RULES = {
    "queue": Rule("ready", one_receive=True, held=False),
    "in order": Rule("plan", one_receive=True, held=True),
    "eager": Rule("free", one_receive=False, held=False),
}


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

    ``link_bytes[src, dst]`` is what a link carried; ``starts[step]`` when a step's last copy began.
    """

    seconds: float
    spans: Tuple[Span, ...]
    link_bytes: Dict[Tuple[int, int], float]
    starts: Tuple[float, ...]


def lower_bound(topology: Topology, size: int, ideal_links: bool = False) -> float:
    """Seconds below which no packing of spanning trees can all-reduce ``size`` bytes, latency aside."""
    return size / pack(topology, ideal_links).bound


def simulate(
    plan: Plan, topology: Topology, chunks: Sequence[float], ideal_links: bool = False, rule: str = "queue"
) -> Timing:
    """The time of ``plan`` on ``topology``.

    Args:
        plan: for as many devices as the topology has.
        topology: the machine.
        chunks: bytes of each chunk.
        ideal_links: a device's outgoing copies run at the same time, as far as links and ports allow.
        rule: one of :data:`RULES`.

    Raises:
        PlanError: the plan has another number of devices or chunks.
        StrategyError: ``rule`` is unknown.
    """
    if plan.devices != len(topology) or plan.chunks != len(chunks):
        raise PlanError(
            f"the plan is for {plan.devices} devices and {plan.chunks} chunks; "
            f"{topology.name} has {len(topology)} devices, and {len(chunks)} sizes are given"
        )
    if rule not in RULES:
        raise StrategyError(f"rule={rule!r} is unknown{nearest(rule, list(RULES))}")
    return Simulation(plan, topology, chunks, ideal_links, RULES[rule]).timing()


class _Passed(NamedTuple):
    """A sender's stream; (server, seconds a byte occupies it) for what is behind it; the most seconds of these."""

    stream: int
    way: Path
    slowest: float


class _Work(NamedTuple):
    """A plan as copies and what waits for what, in flat lists: one for each step would keep the garbage collector busy.

    ``transfers``: (step, src, dst, chunk), in the plan's order. ``waits[step]`` is for how many copies and earlier
    steps a step waits. ``copies[step]`` is a copy that waits for the step, ``others[copy]`` one that waits for the
    same, ``later[step]`` the step that does; -1 where there is none. ``first`` are the copies that wait for nothing.
    """

    transfers: List[Tuple[int, int, int, int]]
    waits: List[int]
    copies: List[int]
    others: List[int]
    later: List[int]
    first: List[int]


@lru_cache(maxsize=64)
def _work(plan: Plan) -> _Work:
    count = len(plan.steps)
    work = _Work([], [], [-1] * count, [], [-1] * count, [])
    transfers, waits, copies, others, later, first = work
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


@lru_cache(maxsize=256)
def _contended(topology: Topology, ideal_links: bool, one_receive: bool) -> Dict[Tuple[int, int], _Passed]:
    """What copies have to wait for.

    Left out is what is never busy when everything else on the way is free: a port out, behind one stream, or a port
    in, where the receiver itself is held for as long.
    """
    use = resources(topology, ideal_links, one_receive).use
    slowest = {pair: max(seconds for _, seconds in way) for pair, way in use.items()}
    streams = {way[0][0] for way in use.values()}
    held: Dict[int, Dict[Tuple[int, int], float]] = defaultdict(dict)
    for pair, way in use.items():
        for server, seconds in way:
            held[server][pair] = slowest[pair] if server in streams else seconds
    needless: Set[int] = set()
    for server in held.keys() - streams:
        pairs = held[server]
        beside = {other for other, _ in use[next(iter(pairs))]} - needless - {server}
        if any(all(held[other].get(pair, 0.0) >= seconds for pair, seconds in pairs.items()) for other in beside):
            needless.add(server)
    return {
        pair: _Passed(way[0][0], tuple(one for one in way[1:] if one[0] not in needless), slowest[pair])
        for pair, way in use.items()
    }


_ARRIVED, _READY, _LOOK = range(3)


class Simulation:
    """One run of a plan. Times only grow: events leave the heap in order of time, then of the plan.

    A run that takes more seconds than ``patience`` is broken off; it then takes infinitely many.
    """

    def __init__(
        self,
        plan: Plan,
        topology: Topology,
        chunks: Sequence[float],
        ideal_links: bool = False,
        rule: Rule = RULES["queue"],
        patience: float = math.inf,
    ) -> None:
        self.steps, self.chunks, self.rule, self.patience = plan.steps, chunks, rule, patience
        contended = _contended(topology, ideal_links, rule.one_receive)
        work = _work(plan)
        self.transfers, self.waits = work.transfers, list(work.waits)
        self.copies, self.others, self.later = work.copies, work.others, work.later
        passed = [contended[src, dst] for _, src, dst, _ in work.transfers]
        self.streams = [one.stream for one in passed]
        self.ways = [one.way for one in passed]
        self.latency = topology.speeds.copy_latency
        self.held = self.latency if rule.held else 0.0
        self.passing = [chunks[chunk] * one.slowest for (*_, chunk), one in zip(work.transfers, passed)]
        self.kernel, self.memory = topology.speeds.kernel, topology.speeds.memory
        self.events: List[Tuple[float, int, int]] = [(0.0, number, _READY) for number in work.first]
        self.queues: Dict[int, List[Tuple[float, int]]] = {stream: [] for stream in self.streams}
        self.turn = dict.fromkeys(self.queues, 0)  # with order "plan": how many copies a stream has issued
        self.ready = [False] * len(self.transfers)
        self.busy = dict.fromkeys(self.queues, False)
        self.free = [0.0] * len(resources(topology, ideal_links, rule.one_receive).servers)
        self.computing = [0.0] * plan.devices
        self.seconds = 0.0
        self.starts = [0.0] * len(plan.steps)
        self.spans: List[Tuple[int, int, int, float, float]] = []
        if rule.order == "plan":
            for number, stream in enumerate(self.streams):
                self.queues[stream].append((0.0, number))

    def run(self) -> Simulation:
        """To the end, or as long as patience lasts."""
        events = self.events
        while events:
            now, number, what = heappop(events)
            if now > self.patience:
                self.seconds = math.inf
                break
            stream = self.streams[number]
            if what == _ARRIVED:
                self.busy[stream] = False
                self._arrive(self.transfers[number][0], now)
            elif what == _READY:
                self._enqueue(number, stream, now)
            if not self.busy[stream]:
                self._issue(stream, now)
        return self

    def timing(self) -> Timing:
        """Run the plan, once for each simulation, and say when what happened."""
        self.run()
        link_bytes: Dict[Tuple[int, int], float] = {}
        for _, src, dst, chunk in self.transfers:
            link_bytes[src, dst] = link_bytes.get((src, dst), 0) + self.chunks[chunk]
        return Timing(self.seconds, tuple(map(Span._make, self.spans)), link_bytes, tuple(self.starts))

    def _enqueue(self, number: int, stream: int, now: float) -> None:
        self.ready[number] = True
        if self.rule.order == "ready":
            self.queues[stream].append((now, number))
        elif self.rule.order == "free":
            insort(self.queues[stream], (0.0, number))

    def _issue(self, stream: int, now: float) -> None:
        """Start the stream's next copy, if there is one."""
        queue, turn = self.queues[stream], self.turn[stream]
        if turn >= len(queue):
            return
        if self.rule.order == "free":
            self._issue_free(queue, now)
        elif self.ready[queue[turn][1]]:
            self.turn[stream] = turn + 1
            self._send(queue[turn][1], now)

    def _issue_free(self, queue: List[Tuple[float, int]], now: float) -> None:
        """Start the first copy whose way is free; if there is none, look again when the first way is."""
        soonest, waiting = float("inf"), -1
        for place, (_, number) in enumerate(queue[:8]):  # farther down the queue nothing starts much sooner
            start = self._way_free(number, now)
            if start <= now:
                del queue[place]
                self._send(number, now)
                return
            if start < soonest:
                soonest, waiting = start, number
        heappush(self.events, (soonest, waiting, _LOOK))

    def _way_free(self, number: int, now: float) -> float:
        free = self.free
        for server, _ in self.ways[number]:
            if free[server] > now:
                now = free[server]
        return now

    def _send(self, number: int, now: float) -> None:
        """Start a copy as soon as everything it passes is free."""
        step, src, dst, chunk = self.transfers[number]
        size, free = self.chunks[chunk], self.free
        start = self._way_free(number, now)
        end = start + self.latency + self.passing[number]
        held = start + self.held
        for server, per_byte in self.ways[number]:
            free[server] = held + size * per_byte
        self.busy[self.streams[number]] = True
        if start > self.starts[step]:
            self.starts[step] = start
        self.spans.append((step, src, dst, start, end))
        heappush(self.events, (end, number, _ARRIVED))

    def _arrive(self, number: int, now: float) -> None:
        """A copy has arrived, or a step before this one is done: when nothing else is missing, the step runs."""
        self.waits[number] -= 1
        if self.waits[number]:
            return
        step = self.steps[number]
        if isinstance(step, Reduce):
            start = max(now, self.computing[step.dst])
            seconds = self.kernel + (len(step.srcs) + 2) * self.chunks[step.chunk] / self.memory
            self.computing[step.dst] = now = start + seconds
            self.spans.append((number, step.dst, step.dst, start, now))
            now = self.summed(number, now)
        self.seconds = max(self.seconds, now)
        transfer = self.copies[number]
        while transfer >= 0:
            heappush(self.events, (now, transfer, _READY))
            transfer = self.others[transfer]
        if self.later[number] >= 0:
            self._arrive(self.later[number], now)

    def summed(self, number: int, now: float) -> float:
        """When those who wait for the sum of a step, done ``now``, have it: at once, there being one host."""
        return now
