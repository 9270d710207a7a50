"""Which gradients travel in which chunk of a plan. Integers and seconds, no tensors.

::

    Spec × N ──plan_cut────► the gradients of each dtype, cut into the plan's buckets and chunks
             ──plan_whole──► whole gradients in the usual buckets, spread over the ways of the plan's chunks
             ──plan_unplanned──► what a strategy without a topology does
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from ..errors import HierAllreduceError
from ..topology import Topology
from .algorithms import Algorithm, distinct_turns, name_of, plan_of
from .buckets import Bucketing, Chunk, Spec, balanced, cut, make_buckets
from .host import IDLE, backward_pass
from .lanes import Lanes, lane_of_links, on_lanes
from .plan import Plan, Step
from .planner import best_plan
from .simulator import predicted_seconds
from .strategy import Strategy

_ASSUMED_BYTES = 1 << 20  # of a gradient whose size is known only at run time
_HOP = 0.3e-3  # seconds of a hop of TensorFlow's ring between hosts, measured: docs/reference/hosts.md


class PlanningTarget(NamedTuple):
    """What gradients are planned for.

    Attributes:
        machine: K devices and their links.
        algorithm: a name or a function, or None for the best.
        scale: bytes that travel for each byte of a gradient.
        hosts: the number of such machines.
        lanes: the lanes of each device.
        backward: seconds of the backward pass; None for what is assumed for the gradients' bytes.
        given: a plan that is taken as it is, for any number of bytes.
    """

    machine: Topology
    algorithm: Union[str, Algorithm, None] = None
    scale: float = 1.0
    hosts: int = 1
    lanes: int = 0
    backward: Optional[float] = None
    given: Optional[Plan] = None

    def plan(self, size: int, total: int) -> Plan:
        """Return how to all-reduce ``size`` bytes (0 if unknown) of ``total`` bytes of gradients."""
        if self.given:
            return self.given
        if self.hosts > 1:
            return self._for_hosts(size)
        backward = backward_pass(max(total, 1), self.backward)
        return best_plan(self.machine, self._sent(size), backward, self.algorithm, self.lanes).plan

    def idle_plan(self, size: int) -> Plan:
        """Return how to all-reduce ``size`` bytes (0 if unknown) in one bucket on an idle machine, without lanes."""
        return self.given or best_plan(self.machine, self._sent(size), IDLE, self.algorithm).plan

    def _sent(self, size: int) -> int:
        return max(1, round((size or _ASSUMED_BYTES) * self.scale))

    def _for_hosts(self, size: int) -> Plan:
        """Return the first chunks of an idle machine's plan, as many as make an all-reduce over all hosts fastest.

        Each of C chunks crosses in a ring of 2(H-1) hops, and the hops of all chunks add up. Meanwhile the hosts sum
        and copy other chunks; only the sums of the first chunk and the copies of the last take extra time, together
        ``1 / C`` of what a host takes for all bytes as one chunk. ``C * hops + one_chunk / C`` is least at the square
        root.
        """
        plan = self.idle_plan(size)
        one_chunk = predicted_seconds(first_chunks(plan, 1), self.machine, [self._sent(size)])
        hops = 2 * (self.hosts - 1) * _HOP
        return first_chunks(plan, max(1, round(math.sqrt(one_chunk / hops))))


def first_chunks(plan: Plan, count: int) -> Plan:
    """Return a plan of one bucket with at most ``count`` of its chunks, of equal size."""
    kept = min(count, plan.chunks)
    steps = tuple(step for step in plan.steps if step.chunk < kept)
    return replace(plan, chunks=kept, steps=steps, buckets=(0,) * kept, shares=(1 / kept,) * kept)


def plan_cut(specs: Sequence[Spec], target: PlanningTarget) -> Tuple[List[Chunk], Plan]:
    """Cut the gradients of each dtype into the buckets and chunks of the plan for so many bytes.

    Returns:
        The chunks and their plan, with the steps in the order in which the planner would start them.
    """
    total = sum(spec.bytes for spec in specs)
    parts: List[Tuple[List[Chunk], Plan]] = []  # of each bucket
    for whole in make_buckets(specs, Bucketing(splits=1)):
        plan = target.plan(whole.bytes, total)
        chunks = cut(whole, specs, plan.shares)
        if len(chunks) < plan.chunks:  # too few bytes to cut
            chunks, plan = [whole], first_chunks(_turned(target.idle_plan(whole.bytes), len(parts)), 1)
        parts += _by_bucket(chunks, plan)
    parts.sort(key=lambda part: _ready_bytes(part[0], specs))
    devices = len(target.machine) * (1 + target.lanes)  # also where no plan uses a lane
    names = dict.fromkeys(name for _, plan in parts for name in plan.algorithm.split(", "))
    steps: List[Step] = []
    buckets: List[int] = []
    for bucket, (_, plan) in enumerate(parts):
        steps += [step._replace(chunk=step.chunk + len(buckets)) for step in plan.steps]
        buckets += [bucket] * plan.chunks
    whole_plan = Plan(devices, len(buckets), tuple(steps), ", ".join(names), target.lanes, tuple(buckets))
    return [chunk for chunks, _ in parts for chunk in chunks], whole_plan


def _turned(plan: Plan, number: int) -> Plan:
    """Return a plan with another one of its chunks as the first: single chunks of several dtypes differ in it."""
    first = number % plan.chunks
    return replace(plan, steps=tuple(step._replace(chunk=(step.chunk - first) % plan.chunks) for step in plan.steps))


def _by_bucket(chunks: Sequence[Chunk], plan: Plan) -> List[Tuple[List[Chunk], Plan]]:
    """Return the chunks and the steps of each bucket."""
    parts = []
    for bucket in range(1 + max(plan.buckets, default=0)):
        numbers = [chunk for chunk in range(plan.chunks) if not plan.buckets or plan.buckets[chunk] == bucket]
        place = {chunk: number for number, chunk in enumerate(numbers)}
        steps = tuple(step._replace(chunk=place[step.chunk]) for step in plan.steps if step.chunk in place)
        parts.append(([chunks[chunk] for chunk in numbers], replace(plan, chunks=len(numbers), steps=steps)))
    return parts


def _ready_bytes(chunks: Sequence[Chunk], specs: Sequence[Spec]) -> int:
    """Return the bytes of all gradients that are ready once these chunks' are: the last variable's comes first."""
    first = min(piece.number for chunk in chunks for piece in chunk.pieces)
    return sum(spec.bytes for spec in specs[first:])


def plan_whole(specs: Sequence[Spec], target: PlanningTarget, bucketing: Bucketing) -> Tuple[List[Chunk], Plan]:
    """Make the usual buckets of whole gradients, and spread them by bytes over the ways of a plan's chunks.

    With lanes every chunk goes over them, and its sum is formed on a tower.

    Returns:
        The chunks and their plan.
    """
    chunks = make_buckets(specs, bucketing)
    total = sum(chunk.bytes for chunk in chunks)
    model = target.idle_plan(total)
    ways: List[List[Step]] = [[] for _ in range(model.chunks)]
    for step in model.steps:
        ways[step.chunk].append(step)
    room = {way: share * total for way, share in enumerate(model.shares)}
    steps: Dict[int, List[Step]] = {}
    for chunk in sorted(range(len(chunks)), key=lambda c: -chunks[c].bytes):
        way = max(room, key=lambda way: room[way])
        room[way] -= max(chunks[chunk].bytes, 1)
        steps[chunk] = [step._replace(chunk=chunk) for step in ways[way]]
    in_order = tuple(step for chunk in range(len(chunks)) for step in steps[chunk])
    plan = Plan(len(target.machine), len(chunks), in_order, model.algorithm)
    if not target.lanes:
        return chunks, plan
    lane_of = lane_of_links(target.machine, in_order, target.lanes)
    return chunks, on_lanes(plan, Lanes(target.lanes, lane_of), sum_on_tower=True)


def plan_unplanned(
    specs: Sequence[Spec],
    strategy: Strategy,
    towers: int,
    algorithm: Union[str, Algorithm] = "hierarchical",
    bucketing: Optional[Bucketing] = None,
) -> Tuple[List[Chunk], Plan]:
    """Return what a strategy without a topology does.

    Each chunk is a bucket of the plan: it is ready with the first variable that it holds. What ``splits`` joins is
    ready at the end of the pass.

    Args:
        specs: N gradients.
        strategy: the strategy.
        towers: K.
        algorithm: instead of ``"auto"``.
        bucketing: by default the strategy's.

    Raises:
        HierAllreduceError: ``mains`` is a tower on which no sum of the algorithm ends.
    """
    chosen = algorithm if strategy.algorithm == "auto" else strategy.algorithm
    chunks, steps = make_buckets(specs, bucketing or strategy.bucketing), strategy.function(chosen)
    last_first = sorted(range(len(chunks)), key=lambda chunk: min(chunks[chunk].pieces), reverse=True)
    number = {chunk: place for place, chunk in enumerate(last_first)}
    turns = _turns(chunks, number, strategy.mains_for(chosen), distinct_turns(steps, towers))
    buckets = () if strategy.splits else tuple(number[chunk] for chunk in range(len(chunks)))
    return chunks, replace(plan_of(steps, towers, turns, name_of(chosen)), buckets=buckets)


def _turns(
    chunks: Sequence[Chunk], number: Mapping[int, int], mains: Union[int, str], ways: Sequence[Tuple[int, int]]
) -> List[int]:
    """Return each chunk's turn of the algorithm; ``ways`` has (root, turn) of those that differ."""
    if isinstance(mains, int):
        turns = [turn for root, turn in ways if root == mains]
        if not turns:
            raise HierAllreduceError(f"mains={mains}: sums end on towers {sorted({root for root, _ in ways})} only")
        return turns[:1] * len(chunks)
    if mains == "rotate":
        return [len(chunks) - 1 - number[chunk] for chunk in range(len(chunks))]
    return [ways[way][1] for way in balanced([chunk.bytes for chunk in chunks], range(len(ways)))]
