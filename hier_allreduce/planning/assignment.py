"""Which chunk goes along which of the planned paths. Integers and seconds, no tensors.

::

    Spec × N ──plan_cut────► a few buckets for each dtype, each cut as the recipe says
             ──plan_whole──► whole gradients in the usual buckets, spread over one recipe's paths

The gradients of a backward pass become ready one after another. A schedule says in how many buckets they travel.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..topology import Topology
from .algorithms import ReduceHalf, plan_from_halves
from .buckets import Bucketing, Chunk, Spec, cut, make_buckets
from .lanes import Lanes, on_lanes
from .plan import Plan, in_buckets
from .planner import choose
from .recipes import Recipe, lane_of_links
from .schedule import Schedule, choose_schedule
from .simulator import TRAINING, Backward, predicted_seconds

_ASSUMED_BYTES = 1 << 20  # of a gradient whose size is known only at run time
_HOP = 0.3e-3  # seconds of a hop of TensorFlow's ring between hosts, measured: docs/reference/hosts.md


class PlanningTarget(NamedTuple):
    """What gradients are planned for.

    Attributes:
        machine: K devices and their links.
        algorithm: one of the planner's, or None for the fastest.
        scale: bytes that travel for each byte of a gradient.
        hosts: the number of such machines.
        lanes: the lanes of each device.
        backward: the backward pass during which gradients become ready.
    """

    machine: Topology
    algorithm: Optional[str] = None
    scale: float = 1.0
    hosts: int = 1
    lanes: int = 0
    backward: Backward = TRAINING

    def recipe(self, size: int) -> Recipe:
        """Return how to all-reduce a bucket of ``size`` bytes (0 if unknown), without lanes."""
        return choose(self.machine, self._wire_bytes(size), self.algorithm).recipe

    def schedule(self, size: int) -> Schedule:
        """Return in how many buckets, and by which recipe, to all-reduce ``size`` bytes of gradients (0 if unknown)."""
        if self.hosts > 1:
            recipe = _for_hosts(self.recipe(size), self.machine, self._wire_bytes(size), self.hosts)
            return Schedule(1, recipe, 0.0)
        return choose_schedule(self.machine, self._wire_bytes(size), self.algorithm, self.lanes, self.backward)

    def _wire_bytes(self, size: int) -> int:
        return max(1, round((size or _ASSUMED_BYTES) * self.scale))


def _for_hosts(recipe: Recipe, machine: Topology, size: int, hosts: int) -> Recipe:
    """Return the first chunks of a recipe, as many as make an all-reduce of ``size`` bytes over all hosts fastest.

    Each of C chunks crosses in a ring of 2(H-1) hops, and the hops of all chunks add up. Meanwhile the hosts sum and
    copy other chunks; only the sums of the first chunk and the copies of the last take extra time, together ``1 / C``
    of what a host takes for all bytes as one chunk. ``C * hops + one_chunk / C`` is least at the square root.

    The steps are in no special order: over several hosts, copies leave as they become ready.
    """
    one_chunk = predicted_seconds(recipe.alone(0).plan(), machine, [size])
    hops = 2 * (hosts - 1) * _HOP
    chunks = max(1, round(math.sqrt(one_chunk / hops)))
    if chunks >= len(recipe.fractions):
        return recipe
    kept = recipe.fractions[:chunks]
    fractions = tuple(fraction / sum(kept) for fraction in kept)
    return replace(recipe, fractions=fractions, halves=recipe.halves[:chunks], backs=recipe.backs[:chunks], order=())


def plan_cut(specs: Sequence[Spec], target: PlanningTarget) -> Tuple[List[Chunk], Plan]:
    """Cut the gradients of each dtype into buckets, and each bucket into chunks, as the planner says for their size.

    Returns:
        The chunks and their plan, with the steps in the order in which the planner would start them.
    """
    parts: List[Tuple[List[Chunk], Recipe]] = []  # of each bucket its chunks
    for whole in make_buckets(specs, Bucketing(splits=1)):
        schedule = target.schedule(whole.bytes)
        for bucket in cut(whole, specs, [1] * schedule.buckets):
            parts.append(_cut_bucket(bucket, specs, schedule.recipe, len(parts)))
    parts.sort(key=lambda part: _ready_bytes(part[0], specs))
    devices = len(target.machine) * (1 + target.lanes)  # also where no recipe uses a lane
    chosen = "+".join(dict.fromkeys(recipe.algorithm for _, recipe in parts))  # sizes of dtypes may differ in it
    empty = Plan(devices, 0, (), chosen, target.lanes)
    plan = in_buckets(empty, [recipe.plan() for _, recipe in parts])
    return [chunk for own, _ in parts for chunk in own], plan


def _cut_bucket(bucket: Chunk, specs: Sequence[Spec], recipe: Recipe, number: int) -> Tuple[List[Chunk], Recipe]:
    chunks = cut(bucket, specs, recipe.fractions)
    if len(chunks) == len(recipe.fractions):
        return chunks, recipe
    return [bucket], recipe.alone(number % len(recipe.halves))  # too few bytes to cut


def _ready_bytes(chunks: Sequence[Chunk], specs: Sequence[Spec]) -> int:
    """Return the bytes of all gradients that are ready once these chunks' are: the last variable's comes first."""
    first = min(piece.variable for chunk in chunks for piece in chunk.pieces)
    return sum(spec.bytes for spec in specs[first:])


def plan_whole(specs: Sequence[Spec], target: PlanningTarget, bucketing: Bucketing) -> Tuple[List[Chunk], Plan]:
    """Make the usual buckets of whole gradients, and spread them over the paths of one recipe by bytes.

    With lanes every chunk goes over them, and its sum is formed on a tower.

    Returns:
        The chunks and their plan.
    """
    chunks = make_buckets(specs, bucketing)
    total = sum(chunk.bytes for chunk in chunks)
    recipe = target.recipe(total)
    room: Dict[Tuple[ReduceHalf, ReduceHalf], float] = {}  # bytes left for each path: there and back
    for fraction, path in zip(recipe.fractions, recipe.ways):
        room[path] = room.get(path, 0.0) + fraction * total
    paths = [recipe.ways[0]] * len(chunks)
    for chunk in sorted(range(len(chunks)), key=lambda c: -chunks[c].bytes):
        paths[chunk] = max(room, key=lambda path: room[path])
        room[paths[chunk]] -= max(chunks[chunk].bytes, 1)
    halves, backs = [half for half, _ in paths], [back for _, back in paths]
    plan = plan_from_halves(len(target.machine), halves, recipe.algorithm, backs)
    if not target.lanes:
        return chunks, plan
    lane_of = lane_of_links(target.machine, paths, [chunk.bytes for chunk in chunks], target.lanes)
    return chunks, on_lanes(plan, Lanes(target.lanes, lane_of), sum_on_tower=True)
