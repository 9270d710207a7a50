"""Plans: an all-reduce as data, the one interpreter that runs them, and the check by counting.

A plan is a sequence of steps over K devices and C chunks. ``Reduce`` and ``Copy`` are the only
steps; at the start device ``d`` holds its own contribution to every chunk, at the end every
device must hold the sum of all K.

::

    device 0   device 1            device 0   device 1
       a          b        ──►        a+b        a+b
    Reduce(chunk=0, srcs=(1,), dst=0)     # 0 ← 0 + 1
    Copy(chunk=0, src=0, dst=1)           # 1 ← 0
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Dict, Generic, List, NamedTuple, Sequence, Tuple, TypeVar, Union

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
    """Steps in execution order, for ``devices`` (K) devices and ``chunks`` chunks.

    Steps of different chunks do not depend on each other; the order of one chunk's steps is their meaning.
    """

    devices: int
    chunks: int
    steps: Tuple[Step, ...]
    algorithm: str = ""

    @property
    def roots(self) -> Tuple[int, ...]:
        """For each chunk the device on which its sum is complete first: where its last ``Reduce`` ends."""
        roots: Dict[int, int] = {}
        for step in self.steps:
            if isinstance(step, Reduce):
                roots[step.chunk] = step.dst
            else:
                roots.setdefault(step.chunk, step.src)
        return tuple(roots.get(chunk, 0) for chunk in range(self.chunks))

    def reduce_half(self) -> Plan:
        """Only the reductions: afterwards each chunk's root holds its sum."""
        return replace(self, steps=tuple(s for s in self.steps if isinstance(s, Reduce)))

    def copy_half(self) -> Plan:
        """Only the copies: each chunk's root sends what it holds to everybody."""
        return replace(self, steps=tuple(s for s in self.steps if isinstance(s, Copy)))

    def transfers(self) -> Counter:
        """How many values travel from device i to device j: ``{(i, j): count}``."""
        sent: Counter = Counter()
        for step in self.steps:
            sources = step.srcs if isinstance(step, Reduce) else (step.src,)
            sent.update((src, step.dst) for src in sources)
        return sent

    def __str__(self) -> str:
        sizes = f"{count(self.devices, 'device')}, {count(self.chunks, 'chunk')}"
        head = f"{self.algorithm or 'plan'}: {sizes}"
        return "\n".join([head, *_lines(self.steps)])


def _lines(steps: Sequence[Step]) -> List[str]:
    """``c0  1,2,3→0  sum`` and ``c0  0→1,2,3  copy``; neighbouring copies from one device share a line."""
    out: List[str] = []
    for key, same in groupby(steps, key=lambda s: s if isinstance(s, Reduce) else s[:2]):
        if isinstance(key, Reduce):
            out += [f"c{key.chunk}  {_ints(key.srcs)}→{key.dst}  sum" for _ in same]
        else:
            out.append(f"c{key[0]}  {key[1]}→{_ints(step.dst for step in same)}  copy")
    return out


def _ints(numbers: Any) -> str:
    return ",".join(str(n) for n in numbers)


class Ops(Generic[V]):
    """What the interpreter does with values: one subclass for each reading of a plan."""

    def reduce(self, step: Reduce, own: V, others: List[V]) -> V:
        """The sum of ``own`` and ``others``, on device ``step.dst``."""
        raise NotImplementedError

    def finish(self, chunk: int, root: int, total: V) -> V:
        """What to do with a complete sum, once, before it is copied (the mean is taken here)."""
        return total

    def copy(self, step: Copy, value: V) -> V:
        """``value`` on device ``step.dst``."""
        return value


def run(plan: Plan, values: Sequence[Sequence[V]], ops: Ops[V]) -> List[List[V]]:
    """The only interpreter of plans: ``values[device][chunk]`` in, ``result[device][chunk]`` out (K×C)."""
    held = [list(row) for row in values]
    pending = Counter(step.chunk for step in plan.steps if isinstance(step, Reduce))
    for chunk, root in enumerate(plan.roots):
        if not pending[chunk]:  # nothing to add up: one device, or the copy half of a plan
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


class Counting(Ops[Counter]):
    """The reading that verifies: a value is how often each device's contribution is in it."""

    def reduce(self, step: Reduce, own: Counter, others: List[Counter]) -> Counter:
        return sum(others, own)


def verify(plan: Plan) -> Plan:
    """Check by counting that ``plan`` gives every device every contribution exactly once; return it.

    Chunks whose steps are alike are counted once, so that thousands of variables cost no more than K.

    Raises:
        PlanError: a step names a device or chunk that is not there, adds a device to itself, copies a sum before it
            is complete, or leaves a device with a contribution missing or counted twice. The message
            names the device and the chunk: ``device 4, chunk 0: missing [3], counted twice [1]``.
    """
    alike: Dict[Tuple, int] = {}
    by_chunk: Dict[int, List[Tuple]] = {chunk: [] for chunk in range(plan.chunks)}
    for step in plan.steps:
        if step.chunk not in by_chunk:
            raise PlanError(f"{step}: there are chunks 0 to {plan.chunks - 1} only")
        by_chunk[step.chunk].append((type(step), *step[1:]))
    for chunk, steps in by_chunk.items():
        alike.setdefault(tuple(steps), chunk)
    for shape, chunk in alike.items():
        _verify_chunk(Plan(plan.devices, 1, tuple(kind(0, *rest) for kind, *rest in shape)), chunk)
    return plan


def _verify_chunk(plan: Plan, chunk: int) -> None:
    everybody = range(plan.devices)
    copied = False
    for step in plan.steps:
        sources = step.srcs if isinstance(step, Reduce) else (step.src,)
        for device in (*sources, step.dst):
            if device not in everybody:
                raise PlanError(f"chunk {chunk}, {step}: there are devices 0 to {plan.devices - 1} only")
        if not sources or step.dst in sources:
            raise PlanError(f"chunk {chunk}, {step}: a step needs sources, all of them other than its dst")
        if copied and isinstance(step, Reduce):
            raise PlanError(f"chunk {chunk}, {step}: reduces after a copy, so an incomplete sum was copied")
        copied = copied or isinstance(step, Copy)
    result = run(plan, [[Counter({d: 1})] for d in everybody], Counting())
    wrong = []
    for device, (held,) in enumerate(result):
        missing = [d for d in everybody if not held[d]]
        twice = [d for d in everybody if held[d] > 1]
        if missing or twice:
            faults = [f"missing {missing}"] * bool(missing) + [f"counted twice {twice}"] * bool(twice)
            wrong.append(f"device {device}, chunk {chunk}: {', '.join(faults)}")
    if wrong:
        raise PlanError("; ".join(wrong))
