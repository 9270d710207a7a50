"""From one machine to several: a machine's plan with TensorFlow's ring between the hosts in its middle.

::

    host 0   c0 [sums][ ring over hosts ][copies]
             c1    [sums]──── waits ────[ ring over hosts ][copies]
    host 1   the same at the same time

Each chunk is summed inside every host, crosses once from its main by the card that the main uses, and is copied back.
Chunks overlap as far as links, cards and the hosts' processors allow. The simulation is that of :mod:`.simulator` with
one more step for each chunk, which takes :meth:`.Network.ring_seconds`. ``docs/scaling.md`` lists the assumptions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from ..topology import Network, Topology
from . import planner
from .cache import kept
from .kept_recipes import recipes_from_values, recipes_to_values
from .plan import Plan, Reduce
from .recipes import Recipe, baselines, candidates
from .simulator import Simulation, Timing, simulate


class Crossing(NamedTuple):
    """One bar of the timeline: ``chunk`` crosses from ``device``, its main, by card ``nic``; times in seconds."""

    chunk: int
    device: int
    nic: int
    start: float
    end: float


@dataclass(frozen=True)
class HostsTiming(Timing):
    """A simulated run of one of several hosts; all hosts do the same."""

    crossings: Tuple[Crossing, ...] = ()


@dataclass(frozen=True)
class HostsChoice(planner.Choice):
    """The fastest recipe for ``size`` bytes on each of ``hosts`` (H) machines that ``network`` joins.

    ``seconds`` and ``bound`` are those of all hosts together.

    Attributes:
        algorithms: the best seconds of each algorithm that was simulated for several hosts.
        hosts: H.
        network: what joins them.
        run: the simulated run.
        inside: the seconds that the recipe takes on one host alone.
        host_bound: the fewest seconds that any recipe takes on one host.
        wire_bound: the fewest seconds that the hosts' cards need.
    """

    algorithms: Dict[str, float]
    hosts: int
    network: Network
    run: HostsTiming
    inside: float
    host_bound: float
    wire_bound: float

    @property
    def collectives(self) -> int:
        """C: each chunk crosses as one collective."""
        return len(self.recipe.fractions)

    @property
    def before(self) -> float:
        """The seconds until the first chunk starts to cross."""
        return min(crossing.start for crossing in self.run.crossings)

    @property
    def across(self) -> float:
        """The seconds from there until the last chunk has crossed; only copies follow. 0 for one host."""
        if self.hosts == 1:
            return 0.0
        return max(crossing.end for crossing in self.run.crossings) - self.before


def choose_for_hosts(
    topology: Topology, size: int, hosts: int, network: Network, algorithm: Optional[str] = None
) -> HostsChoice:
    """Return the fastest recipe for ``size`` bytes on each of ``hosts`` machines, or the fastest of one algorithm.

    Every chunk costs the ring's hops once more, so fewer and larger chunks win where hops are slow or hosts are many.
    The search is cached for each class of sizes, like that of :func:`.planner.choose`.

    Raises:
        StrategyError: ``algorithm`` is unknown, or makes no plan for this machine.
    """
    alone = planner.choose(topology, size, algorithm)
    if hosts == 1:
        best = {alone.recipe.algorithm: alone.recipe}
        seconds = planner.seconds_by_algorithm(topology, size)
        fastest = alone.recipe.algorithm
    else:
        best = _search(topology, planner.bytes_class(size), hosts, network, algorithm, alone.recipe)
        seconds = {
            name: simulate_recipe_on_hosts(recipe, topology, size, hosts, network).seconds
            for name, recipe in best.items()
        }
        fastest = algorithm or min(seconds, key=lambda name: seconds[name])
    recipe = best[fastest]
    run = simulate_recipe_on_hosts(recipe, topology, size, hosts, network)
    wire_bound = network.wire_seconds(hosts, size)
    return HostsChoice(
        recipe,
        size,
        run.seconds,
        max(alone.bound, wire_bound),
        algorithms=seconds,
        hosts=hosts,
        network=network,
        run=run,
        inside=simulate(recipe.plan(), topology, recipe.sizes(size)).seconds,
        host_bound=alone.bound,
        wire_bound=wire_bound,
    )


# ---- the simulation ----------------------------------------------------------------------------------


def simulate_recipe_on_hosts(
    recipe: Recipe, topology: Topology, size: int, hosts: int, network: Network
) -> HostsTiming:
    """Simulate a recipe on several hosts."""
    return simulate_on_hosts(recipe.plan(), topology, recipe.sizes(size), hosts, network)


def simulate_on_hosts(
    plan: Plan, topology: Topology, chunks: Sequence[float], hosts: int, network: Network
) -> HostsTiming:
    """Simulate ``plan`` on each of ``hosts`` machines. Each chunk's sum crosses before it is copied.

    Args:
        plan: for as many devices as the topology has, and as many chunks as ``chunks``.
        topology: each of the machines.
        chunks: bytes of each chunk.
        hosts: H.
        network: what joins them.

    Returns:
        The seconds, the spans and the crossings.
    """
    return _HostsSimulation(plan, topology, chunks, hosts, network).timing()


class _HostsSimulation(Simulation):
    """One host's run. A collective holds its card until it ends, and the processor for its hops and bytes."""

    def __init__(self, plan: Plan, topology: Topology, chunks: Sequence[float], hosts: int, network: Network) -> None:
        super().__init__(plan, topology, chunks)
        self.roots, self.devices = plan.roots, plan.devices
        self.last = {step.chunk: number for number, step in enumerate(plan.steps) if isinstance(step, Reduce)}
        self.hosts, self.network = hosts, network
        self.processor_free = 0.0
        self.card_free = [0.0] * network.nics_used(plan.devices)
        self.crossings: List[Crossing] = []

    def timing(self) -> HostsTiming:
        for chunk in range(len(self.chunks)):
            if chunk not in self.last:  # one device: nothing to sum first
                self.seconds = max(self.seconds, self._cross(chunk, 0.0))
        run = super().timing()
        return HostsTiming(run.seconds, run.spans, run.link_bytes, run.starts, tuple(self.crossings))

    def summed(self, number: int, now: float, end: float) -> float:
        """Return when the hosts' sum is there, if this step completes a chunk's sum on its host."""
        chunk = self.steps[number].chunk
        return self._cross(chunk, end) if self.last[chunk] == number else now

    def _cross(self, chunk: int, now: float) -> float:
        """Let the chunk cross; return when it is back on its main."""
        device, size = self.roots[chunk], self.chunks[chunk]
        nic = self.network.nic_of(device, self.devices)
        start = max(now, self.processor_free, self.card_free[nic]) if self.hosts > 1 else now
        self.processor_free = start + self.network.processor_seconds(self.hosts, size, 1)
        end = self.card_free[nic] = start + self.network._replace(nics=1).ring_seconds(self.hosts, size, 1)
        self.crossings.append(Crossing(chunk, device, nic, start, end))
        return end


# ---- the search --------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
@kept(recipes_to_values, recipes_from_values)
def _search(
    topology: Topology, size: int, hosts: int, network: Network, algorithm: Optional[str], alone: Recipe
) -> Dict[str, Recipe]:
    """Return the fastest recipe of each baseline, of ``algorithm``, and of others that could be the fastest of all."""
    best: Dict[str, Recipe] = {}
    seconds: Dict[str, float] = {}
    for recipe in sorted(_recipes(topology, algorithm, alone), key=lambda recipe: len(recipe.fractions)):
        name = recipe.algorithm
        if name in (*planner.BASELINES, algorithm):
            to_beat = seconds.get(name, math.inf)
        else:
            to_beat = min(seconds.values(), default=math.inf)
        # The hops alone are a lower bound that needs no simulation.
        if network.processor_seconds(hosts, size, len(recipe.fractions)) < to_beat:
            ordered = recipe if recipe.order else planner.ordered(recipe, topology, size).recipe
            predicted = simulate_recipe_on_hosts(ordered, topology, size, hosts, network).seconds
            if predicted < seconds.get(name, math.inf):
                best[name], seconds[name] = ordered, predicted
    return best


def _recipes(topology: Topology, algorithm: Optional[str], alone: Recipe) -> Iterator[Recipe]:
    """Yield the recipes to compare: none made from links has more chunks than ``alone``, the choice for one host."""
    yield from baselines(topology)
    yield alone
    for recipe in candidates(topology):
        if algorithm in (None, recipe.algorithm) and len(recipe.fractions) <= len(alone.fractions):
            yield recipe
