"""Plans: an all-reduce as data, the only interpreter that runs plans, and the check by counting.

A plan is a sequence of steps over K devices and C chunks. ``Reduce`` and ``Copy`` are the only kinds of steps. At the
start, device ``d`` holds its own contribution to every chunk; at the end, every device must hold the sum of all K.

::

    device 0   device 1            device 0   device 1
       a          b        ──►        a+b        a+b
    Reduce(chunk=0, srcs=(1,), dst=0)     # 0 ← 0 + 1
    Copy(chunk=0, src=0, dst=1)           # 1 ← 0
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Dict, Generic, Iterable, List, NamedTuple, Sequence, Tuple, TypeVar, Union

from ..errors import PlanError
from ..formatting import count

V = TypeVar("V")


class Reduce(NamedTuple):
    """``dst`` ← ``dst`` + the sum over ``srcs``, for one chunk."""

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
    """Steps in execution order, for ``devices`` (K) devices and ``chunks`` (C) chunks.

    The order matters between the steps of one chunk. Steps of different chunks do not depend on each other.
    """

    devices: int
    chunks: int
    steps: Tuple[Step, ...]
    algorithm: str = ""

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

    def __str__(self) -> str:
        header = f"{self.algorithm or 'plan'}: {count(self.devices, 'device')}, {count(self.chunks, 'chunk')}"
        return "\n".join([header, *_lines(self.steps)])


def _lines(steps: Sequence[Step]) -> List[str]:
    """Return lines such as ``c0  1,2,3→0  sum`` and ``c0  0→1,2,3  copy``.

    Neighbouring copies from one device share a line.
    """
    lines: List[str] = []
    for key, same in groupby(steps, key=lambda step: step if isinstance(step, Reduce) else step[:2]):
        if isinstance(key, Reduce):
            lines += [f"c{key.chunk}  {_joined(key.srcs)}→{key.dst}  sum" for _ in same]
        else:
            lines.append(f"c{key[0]}  {key[1]}→{_joined(step.dst for step in same)}  copy")
    return lines


def _joined(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


class Ops(Generic[V]):
    """What :func:`run` does with values; each use of plans has its own subclass."""

    def reduce(self, step: Reduce, own: V, others: List[V]) -> V:
        """Return the sum of ``own`` and ``others``, on device ``step.dst``."""
        raise NotImplementedError

    def finish(self, chunk: int, root: int, total: V) -> V:
        """Return what a complete sum becomes before it is copied; called once for each chunk (for the mean)."""
        return total

    def copy(self, step: Copy, value: V) -> V:
        """Return ``value`` on device ``step.dst``."""
        return value


def run(plan: Plan, values: Sequence[Sequence[V]], ops: Ops[V]) -> List[List[V]]:
    """Run a plan: ``values[device][chunk]`` in, ``result[device][chunk]`` out (K×C)."""
    held = [list(row) for row in values]
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
    return held


READY_TOGETHER = 10 << 20  # bytes of gradients that are taken to become ready at the same time


def readiness(ready_bytes: Sequence[float]) -> Tuple[int, ...]:
    """Return for each chunk its place in the order in which chunks become ready; equal for those ready together.

    Args:
        ready_bytes: for each chunk the bytes of all gradients that are ready once its own are.
    """
    return tuple(max(0, math.ceil(size / READY_TOGETHER) - 1) for size in ready_bytes)


def issued_before(plan: Plan, readiness: Sequence[int]) -> List[Tuple[int, ...]]:
    """Return for each copy the earlier copies of its sender that it must not overtake.

    The copies of a ``Reduce``, one for each source, and of a ``Copy`` are numbered in the plan's order. A copy follows
    those before it in the plan whose chunk is ready no later than its own: it then waits for no gradient that comes
    later in the backward pass. Of these the fewest are returned that imply the others.

    ::

        plan    0→1 chunk 1    0→2 chunk 0    0→3 chunk 1
        before  ()             ()             (0→2, 0→1)

    Args:
        plan: the plan.
        readiness: for each chunk its place in the order in which chunks become ready.
    """
    sent: Dict[int, List[Tuple[int, int]]] = defaultdict(list)  # (copy, readiness) of each sender
    before: List[Tuple[int, ...]] = []
    for step in plan.steps:
        for src in step.srcs if isinstance(step, Reduce) else (step.src,):
            own, latest, followed = readiness[step.chunk], None, []
            for copy, ready in reversed(sent[src]):
                if ready <= own and (latest is None or ready > latest):
                    followed.append(copy)
                    latest = ready
                if latest == own:
                    break
            sent[src].append((len(before), own))
            before.append(tuple(followed))
    return before


class Counting(Ops[Counter]):
    """The interpretation that verifies: a value counts how often it contains each device's contribution."""

    def reduce(self, step: Reduce, own: Counter, others: List[Counter]) -> Counter:
        return sum(others, own)


def verify(plan: Plan) -> Plan:
    """Return ``plan`` if it gives every device every contribution exactly once, by counting.

    Chunks with the same steps are checked once, so that thousands of variables cost no more than K.

    Raises:
        PlanError: a step names an unknown device or chunk, adds a device to itself, or copies a sum before it is
            complete; or a contribution is missing on a device, or counted twice. The message names the device and the
            chunk: ``device 4, chunk 0: missing [3], counted twice [1]``.
    """
    first_with: Dict[Tuple, int] = {}  # the first chunk with these steps
    by_chunk: Dict[int, List[Tuple]] = {chunk: [] for chunk in range(plan.chunks)}
    for step in plan.steps:
        if step.chunk not in by_chunk:
            raise PlanError(f"{step}: there are chunks 0 to {plan.chunks - 1} only")
        by_chunk[step.chunk].append((type(step), *step[1:]))
    for chunk, steps in by_chunk.items():
        first_with.setdefault(tuple(steps), chunk)
    for steps_of_chunk, chunk in first_with.items():
        alone = Plan(plan.devices, 1, tuple(kind(0, *rest) for kind, *rest in steps_of_chunk))
        _check_steps(alone, chunk)
        _check_counts(alone, chunk)
    return plan


def _check_steps(plan: Plan, chunk: int) -> None:
    copied = False
    for step in plan.steps:
        sources = step.srcs if isinstance(step, Reduce) else (step.src,)
        for device in (*sources, step.dst):
            if device not in range(plan.devices):
                raise PlanError(f"chunk {chunk}, {step}: there are devices 0 to {plan.devices - 1} only")
        if not sources or step.dst in sources:
            raise PlanError(f"chunk {chunk}, {step}: a step needs sources, all of them other than its dst")
        if copied and isinstance(step, Reduce):
            raise PlanError(f"chunk {chunk}, {step}: reduces after a copy, so an incomplete sum was copied")
        copied = copied or isinstance(step, Copy)


def _check_counts(plan: Plan, chunk: int) -> None:
    devices = range(plan.devices)
    results = run(plan, [[Counter({device: 1})] for device in devices], Counting())
    messages = []
    for device, (counts,) in enumerate(results):
        missing = [source for source in devices if not counts[source]]
        repeated = [source for source in devices if counts[source] > 1]
        lists = {"missing": missing, "counted twice": repeated}
        faults = [f"{fault} {sources}" for fault, sources in lists.items() if sources]
        if faults:
            messages.append(f"device {device}, chunk {chunk}: {', '.join(faults)}")
    if messages:
        raise PlanError("; ".join(messages))
