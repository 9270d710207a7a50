"""Lanes: plans whose copies between towers go over extra devices, several out of one tower at a time.

::

    tower 0            tower 1              a lane is a logical GPU with a copy stream of its own
      │ entry            ▲ exit             entry and exit stay inside the GPU's memory
      ▼                  │
    lane 0.0 ──link──► lane 1.0             copies of different lanes run at the same time,
    lane 0.1 ──link──► lane 3.1             each over its own link

TensorFlow gives each logical GPU one stream for its outgoing copies, so one device keeps only one of its links busy.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Dict, List, Sequence, Tuple

from ..errors import HierAllreduceError
from ..topology import Topology
from .plan import Copy, Plan, Reduce, Step

MEMORY = 4  # bytes on all lanes of a GPU together, for each byte of gradients in one all-reduce


@dataclass(frozen=True)
class Lanes:
    """How a plan's copies use the lanes.

    Attributes:
        count: L, the lanes of each tower.
        by_link: ``by_link[src][dst]`` is the lane of tower ``src`` from which it sends to tower ``dst`` (K×K). If it is
            empty, a chunk keeps to one lane on all towers: chunk ``c`` to lane ``c mod L``, or what ``by_chunk`` says.
        by_chunk: the lane of each chunk.
        exit: whether the last lane only brings results to its tower. Copies into a tower wait for its kernels; on a
            lane of their own they hold up nothing else.
    """

    count: int
    by_link: Tuple[Tuple[int, ...], ...] = ()
    by_chunk: Tuple[int, ...] = ()
    exit: bool = False

    @property
    def between(self) -> int:
        """The number of lanes between which chunks travel: all but the exit lane."""
        return self.count - self.exit

    def of(self, chunk: int, src: int, dst: int) -> int:
        """Return the lane from which tower ``src`` sends ``chunk`` to tower ``dst``."""
        if self.by_link:
            return self.by_link[src][dst]
        return self.by_chunk[chunk] if self.by_chunk else chunk % self.between


def on_lanes(plan: Plan, lanes: Lanes, sum_on_tower: bool = False) -> Plan:
    """Return a plan for K towers as one over their lanes, chunk by chunk: see :func:`chunk_on_lanes`.

    Raises:
        HierAllreduceError: ``plan`` has lanes already.
    """
    if plan.lanes:
        raise HierAllreduceError(f"the plan has {plan.lanes} lanes already")
    if not lanes.count:
        return plan
    by_chunk: Dict[int, List[Step]] = defaultdict(list)
    for step in plan.steps:
        by_chunk[step.chunk].append(step)
    steps: List[Step] = []
    for chunk, own in by_chunk.items():
        steps += chunk_on_lanes(plan.devices, chunk, own, lanes, sum_on_tower)
    return replace(plan, devices=plan.devices * (1 + lanes.count), lanes=lanes.count, steps=tuple(steps))


def chunk_on_lanes(
    towers: int, chunk: int, steps: Sequence[Step], lanes: Lanes, sum_on_tower: bool = False
) -> List[Step]:
    """Return the steps of one chunk over lanes.

    A tower's own contribution enters the lane that sends it on, as one more source of that lane's first sum. The sums
    are formed on lanes. A result that is sent on arrives on a lane and leaves for the tower from there; one that is not
    goes straight to the tower.

    Args:
        towers: K.
        chunk: the chunk's number.
        steps: reductions, then copies, for K devices without lanes.
        lanes: which lane sends what.
        sum_on_tower: whether the chunk's sum is formed on its root's tower, where ``update="main"`` needs it.
    """
    return _ChunkOnLanes(
        Plan(towers * (1 + lanes.count), 1, (), lanes=lanes.count), chunk, steps, lanes, sum_on_tower
    ).steps


class _ChunkOnLanes:
    """The steps of one chunk, over lanes."""

    def __init__(self, plan: Plan, chunk: int, steps: Sequence[Step], lanes: Lanes, sum_on_tower: bool):
        self.plan, self.chunk, self.lanes = plan, chunk, lanes
        self.steps: List[Step] = []
        reduces = [step for step in steps if isinstance(step, Reduce)]
        copies = [step for step in steps if isinstance(step, Copy)]
        self.sends_to = {src: step.dst for step in reduces for src in step.srcs}
        self.first_copy: Dict[int, int] = {}
        for copy in copies:
            self.first_copy.setdefault(copy.src, copy.dst)
        self.sum_on_tower = sum_on_tower
        self.at: Dict[int, int] = {}  # the device where each tower's partial sum is
        for reduce in reduces:
            self._reduce(reduce)
        if steps:
            self._copies(copies, reduces[-1].dst if reduces else copies[0].src)

    def _home(self, tower: int) -> int:
        """Return the device on which a tower's partial sum is formed."""
        to = self.sends_to.get(tower)
        if to is None and self.sum_on_tower:
            return tower
        to = self.first_copy.get(tower, tower) if to is None else to
        return self.plan.lane(tower, self.lanes.of(self.chunk, tower, to))

    def _reduce(self, step: Reduce) -> None:
        for src in step.srcs:
            if src not in self.at:
                self.at[src] = self._home(src)
                self.steps.append(Reduce(self.chunk, (src,), self.at[src]))
        home, sources = self._home(step.dst), tuple(self.at[src] for src in step.srcs)
        if step.dst not in self.at and home != step.dst:
            sources = (step.dst, *sources)
        self.at[step.dst] = home
        self.steps.append(Reduce(self.chunk, sources, home))

    def _copies(self, copies: Sequence[Copy], root: int) -> None:
        at = {root: self.at.get(root, root)}
        holding = {at[root]}
        for copy in copies:
            self._send(copy, at, holding)
        for tower, device in at.items():
            self._leave(tower, device)

    def _send(self, copy: Copy, at: Dict[int, int], holding: set) -> None:
        lane = self.lanes.of(self.chunk, copy.src, copy.dst)
        sender = self.plan.lane(copy.src, lane)
        if sender not in holding:
            self._copy(at[copy.src], sender)
            holding.add(sender)
        onward = self.first_copy.get(copy.dst)
        if onward is None:
            at[copy.dst] = self._exit(copy.dst) if self.lanes.exit else copy.dst
        else:
            at[copy.dst] = self.plan.lane(copy.dst, self.lanes.of(self.chunk, copy.dst, onward))
        self._copy(sender, at[copy.dst])
        holding.add(at[copy.dst])

    def _leave(self, tower: int, device: int) -> None:
        """Bring a result from the lane where it arrived to its tower."""
        if device == tower:
            return
        if self.lanes.exit and device != self._exit(tower):
            self._copy(device, self._exit(tower))
            device = self._exit(tower)
        self._copy(device, tower)

    def _exit(self, tower: int) -> int:
        return self.plan.lane(tower, self.lanes.count - 1)

    def _copy(self, src: int, dst: int) -> None:
        self.steps.append(Copy(self.chunk, src, dst))


def lane_bytes(plan: Plan, sizes: Sequence[float]) -> List[int]:
    """Return for each tower the bytes that arrive on all its lanes together.

    They need no more memory: a sum takes the place of one of the values that are added. As values are freed once they
    have been sent on, it is less at any one time.

    Args:
        plan: the plan.
        sizes: bytes of each chunk.
    """
    arrived = [0.0] * plan.towers
    for step in plan.steps:
        if step.dst >= plan.towers:
            arrived[plan.tower(step.dst)] += sizes[step.chunk] * len(getattr(step, "srcs", (0,)))
    return [round(size) for size in arrived]


def lane_of_links(topology: Topology, steps: Sequence[Step], lanes: int) -> Tuple[Tuple[int, ...], ...]:
    """Return for each pair of GPUs the sender's lane (K×K); the links that are busiest share a lane last.

    Args:
        topology: the machine, without lanes.
        steps: of chunks of equal size, without lanes.
        lanes: the number of lanes between GPUs.
    """
    count = len(topology)
    busy = [[0.0] * count for _ in range(count)]
    for step in steps:
        for src in step.srcs if isinstance(step, Reduce) else (step.src,):
            busy[src][step.dst] += 1 / topology.link(src, step.dst).bandwidth
    chosen = [[0] * count for _ in range(count)]
    for src in range(count):
        seconds = [0.0] * lanes
        for dst in sorted(range(count), key=lambda dst: -busy[src][dst]):
            chosen[src][dst] = seconds.index(min(seconds))
            seconds[chosen[src][dst]] += busy[src][dst]
    return tuple(map(tuple, chosen))
