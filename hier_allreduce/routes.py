"""Gradients on a machine's links: which chunk goes by which of the planned ways. Integers only, no tensors.

All gradients of a model are on their way at about the same time, so the links are planned for their total, and not
for each bucket as if it were alone.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple

from .algorithms import ReduceHalf, plan_from_halves
from .buckets import Bucketing, Chunk, Spec, buckets, cut
from .plan import Plan, Step
from .planner import choose
from .recipes import Recipe
from .topology import Topology

_UNKNOWN = 1 << 20  # bytes taken for a gradient whose size is known only at run time


def planned(
    specs: Sequence[Spec], machine: Topology, algorithm: Optional[str] = None, scale: float = 1.0
) -> Tuple[List[Chunk], Plan]:
    """One bucket for each dtype, in readiness order, cut as the planner says for its bytes.

    Args:
        specs: N gradients.
        machine: K devices and their links.
        algorithm: one of the planner's, or None for the fastest.
        scale: bytes that travel for each byte of a gradient.

    Returns:
        The chunks and their plan, steps in the order in which the planner would start them.
    """
    chunks: List[Chunk] = []
    steps: List[Step] = []
    for whole in buckets(specs, Bucketing(splits=1)):
        recipe = _recipe(machine, whole.bytes, algorithm, scale)
        parts = cut(whole, specs, recipe.fractions)
        if len(parts) < len(recipe.fractions):  # so few bytes that they are not worth cutting
            parts, recipe = [whole], recipe.alone(len(chunks) % len(recipe.halves))
        steps += [step._replace(chunk=step.chunk + len(chunks)) for step in recipe.plan().steps]
        chunks += parts
    return chunks, Plan(len(machine), len(chunks), tuple(steps), algorithm or "auto")


def planned_whole(
    specs: Sequence[Spec], machine: Topology, how: Bucketing, algorithm: Optional[str] = None, scale: float = 1.0
) -> Tuple[List[Chunk], Plan]:
    """As :func:`planned`, but every gradient stays whole: buckets as usual, spread over the planned ways by bytes."""
    chunks = buckets(specs, how)
    total = sum(chunk.bytes for chunk in chunks)
    recipe = _recipe(machine, total, algorithm, scale)
    room: Dict[Tuple[ReduceHalf, ReduceHalf], float] = {}
    for fraction, way in zip(recipe.fractions, recipe.ways):
        room[way] = room.get(way, 0.0) + fraction * total
    ways = [recipe.ways[0]] * len(chunks)
    for chunk in sorted(range(len(chunks)), key=lambda c: -chunks[c].bytes):
        ways[chunk] = max(room, key=lambda way: room[way])
        room[ways[chunk]] -= max(chunks[chunk].bytes, 1)
    halves, backs = [half for half, _ in ways], [back for _, back in ways]
    return chunks, plan_from_halves(len(machine), halves, algorithm or "auto", backs)


def _recipe(machine: Topology, size: int, algorithm: Optional[str], scale: float) -> Recipe:
    return choose(machine, max(1, round((size or _UNKNOWN) * scale)), algorithm).recipe
