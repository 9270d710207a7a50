"""Which chunk goes along which of the planned paths. Integers only, no tensors.

::

    Spec × N ──plan_cut────► a bucket for each dtype, cut as its recipe says
             ──plan_whole──► whole gradients in the usual buckets, spread over one recipe's paths

All gradients of a model travel at about the same time. The links are therefore planned for their total size, not for
each bucket alone.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..topology import Network, Topology
from .algorithms import ReduceHalf, plan_from_halves
from .buckets import Bucketing, Chunk, Spec, cut, make_buckets
from .multi_host import choose_for_hosts
from .plan import Plan, Step
from .planner import choose
from .recipes import Recipe

_ASSUMED_BYTES = 1 << 20  # of a gradient whose size is known only at run time


class PlanningTarget(NamedTuple):
    """What gradients are planned for.

    Attributes:
        machine: K devices and their links.
        algorithm: one of the planner's, or None for the fastest.
        scale: bytes that travel for each byte of a gradient.
        hosts: the number of such machines.
        network: what connects the machines; if it is None, the plan is that of one machine. Each whole gradient is a
            collective with any network, which then only decides the paths.
    """

    machine: Topology
    algorithm: Optional[str] = None
    scale: float = 1.0
    hosts: int = 1
    network: Optional[Network] = None

    def recipe(self, size: int) -> Recipe:
        """Return how to all-reduce a bucket of ``size`` bytes (0 if unknown)."""
        wire_bytes = max(1, round((size or _ASSUMED_BYTES) * self.scale))
        if self.hosts == 1 or self.network is None:
            return choose(self.machine, wire_bytes, self.algorithm).recipe
        return choose_for_hosts(self.machine, wire_bytes, self.hosts, self.network, self.algorithm).recipe


def plan_cut(specs: Sequence[Spec], target: PlanningTarget) -> Tuple[List[Chunk], Plan]:
    """Make one bucket for each dtype of N gradients, cut as the planner says for its size.

    Returns:
        The chunks and their plan, with the steps in the order in which the planner would start them.
    """
    chunks: List[Chunk] = []
    steps: List[Step] = []
    for whole in make_buckets(specs, Bucketing(splits=1)):
        recipe = target.recipe(whole.bytes)
        parts = cut(whole, specs, recipe.fractions)
        if len(parts) < len(recipe.fractions):  # too few bytes to cut
            parts, recipe = [whole], recipe.alone(len(chunks) % len(recipe.halves))
        steps += [step._replace(chunk=step.chunk + len(chunks)) for step in recipe.plan().steps]
        chunks += parts
    return chunks, Plan(len(target.machine), len(chunks), tuple(steps), target.algorithm or "auto")


def plan_whole(specs: Sequence[Spec], target: PlanningTarget, bucketing: Bucketing) -> Tuple[List[Chunk], Plan]:
    """Make the usual buckets of whole gradients, and spread them over the paths of one recipe by bytes.

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
    return chunks, plan_from_halves(len(target.machine), halves, target.algorithm or "auto", backs)
