"""Plans: an all-reduce as data, the only interpreter that runs plans, and the check by counting.

A plan is a sequence of steps over K towers and C chunks. ``Reduce`` and ``Copy`` are the only kinds of steps. At the
start, device ``d`` holds its own contribution to every chunk; at the end, every tower must hold the sum of all K.

::

    device 0   device 1            device 0   device 1
       a          b        ──►        a+b        a+b
    Reduce(chunk=0, srcs=(1,), dst=0)     # 0 ← 0 + 1
    Copy(chunk=0, src=0, dst=1)           # 1 ← 0

With L lanes for each tower there are K×(1 + L) devices: devices 0 to K-1 are the towers', device ``K + d×L + l`` is
lane ``l`` of tower ``d``. A lane only relays: it has no gradient, and its result is discarded. A ``Reduce`` into an
empty lane gives it the sum of the sources, of one source a copy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Dict, Generic, Iterable, List, NamedTuple, Optional, Sequence, Tuple, TypeVar, Union

from ..errors import HierAllreduceError
from ..formatting import count, table

V = TypeVar("V")


class Reduce(NamedTuple):
    """``dst`` ← ``dst`` + the sum over ``srcs``, for one chunk. An empty lane counts as zero."""

    chunk: int
    srcs: Tuple[int, ...]
    dst: int


class Copy(NamedTuple):
    """``dst`` ← ``src``, for one chunk."""

    chunk: int
    src: int
    dst: int


Step = Union[Reduce, Copy]


@dataclass(frozen=True)
class Plan:
    """Steps in execution order, for ``devices`` devices and ``chunks`` (C) chunks.

    The order matters between the steps of one chunk. Steps of different chunks do not depend on each other.

    Attributes:
        devices: K towers and their lanes, K×(1 + lanes) in all.
        lanes: L, the lanes of each tower.
        buckets: for each chunk the number of its bucket, whose gradients are taken to become ready together; buckets
            are numbered in the order in which they become ready. If it is empty, all chunks are in one.
        shares: for each chunk its share of the bytes; the sum is 1. If it is empty, the bytes are not planned.
    """

    devices: int
    chunks: int
    steps: Tuple[Step, ...]
    algorithm: str = ""
    lanes: int = 0
    buckets: Tuple[int, ...] = ()
    shares: Tuple[float, ...] = ()

    @property
    def towers(self) -> int:
        """The number of towers, K: devices 0 to K-1."""
        return self.devices // (1 + self.lanes)

    def tower(self, device: int) -> int:
        """Return the tower of a device: itself, or that of a lane."""
        return device if device < self.towers else (device - self.towers) // self.lanes

    def lane(self, tower: int, lane: int) -> int:
        """Return the number of a tower's lane, of lanes 0 to L-1."""
        return self.towers + tower * self.lanes + lane

    @property
    def roots(self) -> Tuple[int, ...]:
        """The device on which each chunk's sum is complete first: where its last ``Reduce`` ends."""
        roots: Dict[int, int] = {}
        for step in self.steps:
            if isinstance(step, Reduce):
                roots[step.chunk] = step.dst
            else:
                roots.setdefault(step.chunk, step.src)
        return tuple(roots.get(chunk, 0) for chunk in range(self.chunks))

    def reduce_half(self) -> Plan:
        """Return the reductions only: afterwards each chunk's root holds its sum."""
        return replace(self, steps=tuple(s for s in self.steps if isinstance(s, Reduce)))

    def copy_half(self) -> Plan:
        """Return the copies only: each chunk's root sends what it holds to all devices."""
        return replace(self, steps=tuple(s for s in self.steps if isinstance(s, Copy)))

    def transfers(self) -> Counter:
        """Return how many values travel from device i to device j: ``{(i, j): count}``."""
        sent: Counter = Counter()
        for step in self.steps:
            sources = step.srcs if isinstance(step, Reduce) else (step.src,)
            sent.update((src, step.dst) for src in sources)
        return sent

    @property
    def copies(self) -> int:
        """The number of values that travel."""
        return sum(self.transfers().values())

    @property
    def sums(self) -> int:
        """The number of steps that add up something."""
        return sum(added > 1 for added in operands(self))

    def sizes(self, size: float) -> Tuple[float, ...]:
        """Return the bytes of each chunk, of ``size`` bytes in all."""
        return tuple(share * size for share in self.shares)

    def __str__(self) -> str:
        lanes = f" with {count(self.lanes, 'lane')} each" if self.lanes else ""
        header = f"{self.algorithm or 'plan'}: {count(self.towers, 'device')}{lanes}, {count(self.chunks, 'chunk')}"
        return "\n".join([header, *self._lines()])

    def _lines(self) -> List[str]:
        """Return lines such as ``c0  1,2,3→0  sum`` and ``c0  0→1,2.0  copy``, where 2.0 is lane 0 of tower 2.

        Neighbouring copies from one device share a line.
        """
        lines: List[str] = []
        for key, same in groupby(self.steps, key=lambda step: step if isinstance(step, Reduce) else step[:2]):
            if isinstance(key, Reduce):
                enters = len(key.srcs) == 1 and self.tower(key.srcs[0]) == self.tower(key.dst)
                kind = "enter" if enters else "sum"
                lines += [f"c{key.chunk}  {self._names(key.srcs)}→{self._names([key.dst])}  {kind}" for _ in same]
            else:
                lines.append(f"c{key[0]}  {self._names([key[1]])}→{self._names(step.dst for step in same)}  copy")
        return lines

    def _names(self, devices: Iterable[int]) -> str:
        return ",".join(self.device_name(device) for device in devices)

    def device_name(self, device: int) -> str:
        """Return ``2`` for tower 2, and ``2.0`` for its lane 0."""
        if device < self.towers:
            return str(device)
        tower, lane = divmod(device - self.towers, self.lanes)
        return f"{tower}.{lane}"


def operands(plan: Plan) -> List[int]:
    """Return for each step the number of values that it adds up: 1 for a copy, and for what enters an empty lane."""
    filled = {(tower, chunk) for tower in range(plan.towers) for chunk in range(plan.chunks)}
    counts = []
    for step in plan.steps:
        if isinstance(step, Reduce):
            counts.append(len(step.srcs) + ((step.dst, step.chunk) in filled))
        else:
            counts.append(1)
        filled.add((step.dst, step.chunk))
    return counts


class Ops(Generic[V]):
    """What :func:`run` does with values; each use of plans has its own subclass."""

    def reduce(self, step: Reduce, own: Optional[V], others: List[V]) -> V:
        """Return the sum of ``own`` and ``others``, on device ``step.dst``. ``own`` is None on an empty lane."""
        raise NotImplementedError

    def finish(self, chunk: int, root: int, total: V) -> V:
        """Return what a complete sum becomes before it is copied; called once for each chunk (for the mean)."""
        return total

    def copy(self, step: Copy, value: V) -> V:
        """Return ``value`` on device ``step.dst``."""
        return value


def run(plan: Plan, values: Sequence[Sequence[V]], ops: Ops[V]) -> List[List[V]]:
    """Run a plan: ``values[tower][chunk]`` in, ``result[tower][chunk]`` out (K×C)."""
    held: List[List[Any]] = [list(row) for row in values]
    held += [[None] * plan.chunks for _ in range(plan.towers, plan.devices)]
    pending = Counter(step.chunk for step in plan.steps if isinstance(step, Reduce))
    for chunk, root in enumerate(plan.roots):
        if not pending[chunk]:  # nothing to add: one device, or the copy half of a plan
            held[root][chunk] = ops.finish(chunk, root, held[root][chunk])
    for step in plan.steps:
        chunk, dst = step.chunk, step.dst
        if isinstance(step, Copy):
            held[dst][chunk] = ops.copy(step, held[step.src][chunk])
            continue
        held[dst][chunk] = ops.reduce(step, held[dst][chunk], [held[src][chunk] for src in step.srcs])
        pending[chunk] -= 1
        if not pending[chunk]:
            held[dst][chunk] = ops.finish(chunk, dst, held[dst][chunk])
    return held[: plan.towers]


def issued_before(plan: Plan) -> List[Tuple[int, ...]]:
    """Return for each copy the copy of its sender that it follows: none or one.

    The copies of a ``Reduce``, one for each source, and of a ``Copy`` are numbered in the plan's order. A copy follows
    the one before it whose chunk is in the same bucket. It then waits for no gradient of another bucket, which may come
    later in the backward pass.

    ::

        plan    0→1 bucket 1    0→2 bucket 0    0→3 bucket 1
        before  ()              ()              (0→1)
    """
    last: Dict[Tuple[int, int], int] = {}
    before: List[Tuple[int, ...]] = []
    for step in plan.steps:
        bucket = plan.buckets[step.chunk] if plan.buckets else 0
        for src in step.srcs if isinstance(step, Reduce) else (step.src,):
            before.append((last[src, bucket],) if (src, bucket) in last else ())
            last[src, bucket] = len(before) - 1
    return before


class Counting(Ops[Counter]):
    """The interpretation that verifies: a value counts how often it contains each device's contribution."""

    def reduce(self, step: Reduce, own: Optional[Counter], others: List[Counter]) -> Counter:
        return sum(others, own or Counter())


def verify(plan: Plan) -> Plan:
    """Return ``plan`` if it gives every tower every contribution exactly once, by counting.

    Chunks with the same steps are checked once, so that thousands of variables cost no more than K.

    Raises:
        HierAllreduceError: a step names an unknown device or chunk, adds a device to itself, counts a contribution
            twice, takes something from an empty lane, or copies what is not the chunk's sum, or to where that is; a
            tower does not get the sum; or the devices are not K towers with L lanes each. The message names the chunk
            and the step, and shows in a table what each device holds at that point.
    """
    if plan.lanes < 0 or plan.devices != plan.towers * (1 + plan.lanes):
        raise HierAllreduceError(f"{plan.devices} devices are not towers with {plan.lanes} lanes each")
    by_chunk: Dict[int, List[Step]] = {chunk: [] for chunk in range(plan.chunks)}
    for step in plan.steps:
        if step.chunk not in by_chunk:
            raise HierAllreduceError(f"{step}: there are chunks 0 to {plan.chunks - 1} only")
        by_chunk[step.chunk].append(step)
    first_with: Dict[Tuple, int] = {}  # the first chunk with these steps
    for chunk, steps in by_chunk.items():
        first_with.setdefault(tuple((type(step), *step[1:]) for step in steps), chunk)
    for chunk in first_with.values():
        ChunkCheck(plan, chunk, by_chunk[chunk]).run()
    return plan


class ChunkCheck:
    """The check of one chunk's steps: which towers' contributions each device holds, step by step."""

    def __init__(self, plan: Plan, chunk: int, steps: Sequence[Step]):
        self.plan, self.chunk, self.steps = plan, chunk, steps
        self.held = [{device} if device < plan.towers else set() for device in range(plan.devices)]
        self.pending = sum(isinstance(step, Reduce) for step in steps)
        self.complete = {0} if plan.towers == 1 and not self.pending else set()  # devices with the chunk's sum

    def run(self) -> None:
        """Raise a HierAllreduceError that names the first step that is wrong."""
        for number, step in enumerate(self.steps):
            fault = self._unknown(step) or (self._reduce(step) if isinstance(step, Reduce) else self._copy(step))
            if fault:
                self._refuse(f"step {number + 1} of {len(self.steps)}, {step}: {fault}", "before this step")
        left = [f"device {t} {self._missing(t)}" for t in range(self.plan.towers) if t not in self.complete]
        if left:
            last = f" {len(self.steps)}, {self.steps[-1]}" if self.steps else ", of none"
            self._refuse(f"after the last step{last}: {'; '.join(left)}", "in the end")

    def _unknown(self, step: Step) -> str:
        sources = step.srcs if isinstance(step, Reduce) else (step.src,)
        if any(device not in range(self.plan.devices) for device in (*sources, step.dst)):
            return f"there are devices 0 to {self.plan.devices - 1} only"
        if not sources or step.dst in sources:
            return "a step needs sources, all of them other than its dst"
        empty = [self.plan.device_name(src) for src in sources if not self.held[src]]
        return f"takes something from {', '.join(empty)}, a lane that is empty" if empty else ""

    def _reduce(self, step: Reduce) -> str:
        counts = Counter(tower for device in (step.dst, *step.srcs) for tower in self.held[device])
        twice = sorted(tower for tower, times in counts.items() if times > 1)
        if twice:
            return f"counts {twice} twice"
        self.held[step.dst] = set(counts)
        self.pending -= 1
        if not self.pending and len(counts) == self.plan.towers:
            self.complete = {step.dst}
        return ""

    def _copy(self, step: Copy) -> str:
        src, dst = self.plan.device_name(step.src), self.plan.device_name(step.dst)
        if step.src not in self.complete:
            return f"copies what is not the complete sum: device {src} {self._missing(step.src)}"
        if step.dst in self.complete:
            return f"device {dst} has the sum already"
        self.complete.add(step.dst)
        self.held[step.dst] = self.held[step.src]
        return ""

    def _missing(self, device: int) -> str:
        missing = [tower for tower in range(self.plan.towers) if tower not in self.held[device]]
        return f"misses {missing}" if missing else "is not where the last Reduce ends"

    def _refuse(self, fault: str, when: str) -> None:
        rows = [(self.plan.device_name(d), ", ".join(map(str, sorted(h)))) for d, h in enumerate(self.held) if h]
        holds = table([("device", f"holds, {when}, the contributions of"), *rows])
        raise HierAllreduceError(f"chunk {self.chunk}, {fault}\n{holds}")
