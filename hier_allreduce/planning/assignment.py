"""Gradients on a machine's links: which chunk goes by which of the planned ways. Integers only, no tensors.

All gradients of a model are on their way at about the same time, so the links are planned for their total, and not
for each bucket as if it were alone.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..topology import Network, Topology
from . import multi_host as hosts
from . import planner
from .algorithms import ReduceHalf, plan_from_halves
from .buckets import Bucketing, Chunk, Spec, cut, make_buckets
from .plan import Plan, Step
from .recipes import Recipe

_UNKNOWN = 1 << 20  # bytes taken for a gradient whose size is known only at run time


class PlanningTarget(NamedTuple):
    """What gradients are planned for.

    Attributes:
        machine: K devices and their links.
        algorithm: one of the planner's, or None for the fastest.
        scale: bytes that travel for each byte of a gradient.
        hosts: so many such machines.
        network: what joins them; None if that is not known, and the plan is then that of one machine. Of whole
            gradients each is a collective whatever the network: it decides only which ways they go.
    """

    machine: Topology
    algorithm: Optional[str] = None
    scale: float = 1.0
    hosts: int = 1
    network: Optional[Network] = None

    def recipe(self, size: int) -> Recipe:
        """How to all-reduce a bucket of ``size`` bytes (0: not known)."""
        travels = max(1, round((size or _UNKNOWN) * self.scale))
        if self.hosts == 1 or self.network is None:
            return planner.choose(self.machine, travels, self.algorithm).recipe
        return hosts.choose_for_hosts(self.machine, travels, self.hosts, self.network, self.algorithm).recipe


def plan_cut(specs: Sequence[Spec], links: PlanningTarget) -> Tuple[List[Chunk], Plan]:
    """One bucket for each dtype of N gradients, in readiness order, cut as the planner says for its bytes.

    Returns:
        The chunks and their plan, steps in the order in which the planner would start them.
    """
    chunks: List[Chunk] = []
    steps: List[Step] = []
    for whole in make_buckets(specs, Bucketing(splits=1)):
        recipe = links.recipe(whole.bytes)
        parts = cut(whole, specs, recipe.fractions)
        if len(parts) < len(recipe.fractions):  # so few bytes that they are not worth cutting
            parts, recipe = [whole], recipe.alone(len(chunks) % len(recipe.halves))
        steps += [step._replace(chunk=step.chunk + len(chunks)) for step in recipe.plan().steps]
        chunks += parts
    return chunks, Plan(len(links.machine), len(chunks), tuple(steps), links.algorithm or "auto")


def plan_whole(specs: Sequence[Spec], links: PlanningTarget, how: Bucketing) -> Tuple[List[Chunk], Plan]:
    """As :func:`plan_cut`, but every gradient stays whole: buckets as usual, spread over the planned ways by bytes."""
    chunks = make_buckets(specs, how)
    total = sum(chunk.bytes for chunk in chunks)
    recipe = links.recipe(total)
    room: Dict[Tuple[ReduceHalf, ReduceHalf], float] = {}
    for fraction, way in zip(recipe.fractions, recipe.ways):
        room[way] = room.get(way, 0.0) + fraction * total
    ways = [recipe.ways[0]] * len(chunks)
    for chunk in sorted(range(len(chunks)), key=lambda c: -chunks[c].bytes):
        ways[chunk] = max(room, key=lambda way: room[way])
        room[ways[chunk]] -= max(chunks[chunk].bytes, 1)
    halves, backs = [half for half, _ in ways], [back for _, back in ways]
    return chunks, plan_from_halves(len(links.machine), halves, links.algorithm or "auto", backs)
