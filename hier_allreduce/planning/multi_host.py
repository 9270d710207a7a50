"""From one machine to several: a machine's plan, with TensorFlow's ring between the hosts in its middle.

::

    host 0   c0 [sums][ ring over hosts ][copies]
             c1    [sums]──── waits ────[ ring over hosts ][copies]
    host 1   the same at the same time

Every chunk is added up inside each host, crosses once from its main by the card that the main uses, and is copied back;
chunks overlap as far as links, cards and the hosts' processors allow. It is the simulation of :mod:`.cost` with one
more step for each chunk, which takes :func:`.scaling.ring_seconds`. What is assumed is in ``docs/scaling.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from ..topology import Network, Topology, ring_seconds
from . import planner
from . import simulator as cost
from .plan import Plan, Reduce
from .recipes import Recipe, baselines, candidates

HOSTS = (1, 2, 4, 8, 16, 32, 64, 128)


class Crossing(NamedTuple):
    """One bar of the timeline: ``chunk`` is on its way from ``device``, its main, by card ``nic``; seconds."""

    chunk: int
    device: int
    nic: int
    start: float
    end: float


@dataclass(frozen=True)
class HostsTiming(cost.Timing):
    """A simulated run of one of several hosts, all of which do the same."""

    crossings: Tuple[Crossing, ...] = ()


@dataclass(frozen=True)
class HostsChoice(planner.Choice):
    """The fastest recipe for ``size`` bytes on each of ``hosts`` (H) machines that ``network`` joins.

    ``seconds``, ``bound`` and ``baselines`` are those of all hosts together.

    Attributes:
        others: the best seconds of every algorithm, of each that was tried for several hosts.
        hosts: H.
        network: what joins them.
        run: the simulated run.
        inside: seconds that the recipe takes on one host alone.
        host_bound: the least that any recipe takes there.
        wire_bound: the least that the hosts' cards need.
        alone: the recipe that one host would take for itself.
        alone_seconds: what that takes on all hosts.
        flat_ring: what one collective over all devices of all hosts takes.
    """

    others: Dict[str, float]
    hosts: int
    network: Network
    run: HostsTiming
    inside: float
    host_bound: float
    wire_bound: float
    alone: Recipe
    alone_seconds: float
    flat_ring: float

    @property
    def collectives(self) -> int:
        """C: each chunk crosses as one."""
        return len(self.recipe.fractions)

    @property
    def before(self) -> float:
        """Seconds until the first chunk starts to cross."""
        return min(crossing.start for crossing in self.run.crossings)

    @property
    def across(self) -> float:
        """Seconds from there until the last chunk has crossed, after which there are only copies; 0 for one host."""
        if self.hosts == 1:
            return 0.0
        return max(crossing.end for crossing in self.run.crossings) - self.before


def choose_for_hosts(
    topology: Topology, size: int, hosts: int, network: Network, algorithm: Optional[str] = None
) -> HostsChoice:
    """The fastest recipe for a bucket of ``size`` bytes on each of ``hosts`` machines, or the fastest of one algorithm.

    Every chunk costs the ring's hops once more, so that fewer and larger chunks win where hops are slow or hosts are
    many. Of the recipes made from links, those with more chunks than one host would take are not looked at. The search
    is cached for each class of sizes, as :func:`.planner.choose`'s.

    Raises:
        StrategyError: ``algorithm`` is unknown, or makes no plan for this machine.
    """
    alone = planner.choose(topology, size, algorithm)
    if hosts == 1:
        name, best = alone.recipe.algorithm, {alone.recipe.algorithm: alone.recipe}
        seconds = planner.seconds_by_algorithm(topology, size)
    else:
        best = _search(topology, planner.bytes_class(size), hosts, network, algorithm, alone.recipe)
        seconds = {
            name: simulate_recipe_on_hosts(recipe, topology, size, hosts, network).seconds
            for name, recipe in best.items()
        }
        name = algorithm or min(seconds, key=lambda name: seconds[name])
    run = simulate_recipe_on_hosts(best[name], topology, size, hosts, network)
    wire_bound = wire_seconds(hosts, size, network)
    return HostsChoice(
        best[name],
        size,
        run.seconds,
        max(alone.bound, wire_bound),
        baselines={name: seconds[name] for name in planner.BASELINES},
        others=seconds,
        hosts=hosts,
        network=network,
        run=run,
        inside=cost.simulate(best[name].plan(), topology, best[name].sizes(size)).seconds,
        host_bound=alone.bound,
        wire_bound=wire_bound,
        alone=alone.recipe,
        alone_seconds=simulate_recipe_on_hosts(alone.recipe, topology, size, hosts, network).seconds,
        flat_ring=flat_ring_seconds(topology, size, hosts, network),
    )


def scaled(
    topology: Topology, size: int, hosts: int, network: Network, algorithm: Optional[str] = None
) -> List[HostsChoice]:
    """:func:`choose` for ``hosts`` and for each of :data:`HOSTS`: what more of them cost."""
    return [choose_for_hosts(topology, size, number, network, algorithm) for number in sorted({*HOSTS, hosts})]


def wire_seconds(hosts: int, size: float, network: Network) -> float:
    """2(H-1)/H · N bytes over all cards of a host: the least that any all-reduce takes; 0 for one host."""
    return ring_seconds(hosts, size, 0, network._replace(engine=network.wire))


def processor_seconds(hosts: int, size: float, collectives: int, network: Network) -> float:
    """What the hosts' processors need for the hops, and to move the bytes, whatever the cards; 0 for one host."""
    return ring_seconds(hosts, size, collectives, network._replace(nic=math.inf))


def flat_ring_seconds(topology: Topology, size: float, hosts: int, network: Network) -> float:
    """TensorFlow alone: one collective, a ring over all devices of all hosts in their order, by one card of each."""
    last = len(topology) - 1
    pairs = [(device, device + 1) for device in range(last)]
    if hosts == 1 and last:  # else a card closes the ring
        pairs.append((last, 0))
    links = [topology.link(*pair).bandwidth for pair in pairs]
    if hosts == 1:
        slowest = network._replace(nic=min(links, default=math.inf), nics=1, engine=math.inf)
    else:
        slowest = network._replace(nic=min([network.nic, *links]), nics=1)
    return ring_seconds(len(topology) * hosts, size, 1, slowest)


# ---- the simulation ----------------------------------------------------------------------------------


def simulate_recipe_on_hosts(
    recipe: Recipe, topology: Topology, size: int, hosts: int, network: Network
) -> HostsTiming:
    """The simulated run of a recipe on several hosts."""
    return simulate_on_hosts(recipe.plan(), topology, recipe.sizes(size), hosts, network)


def simulate_on_hosts(
    plan: Plan, topology: Topology, chunks: Sequence[float], hosts: int, network: Network
) -> HostsTiming:
    """The time of ``plan`` on each of ``hosts`` machines, each chunk's sum crossing to the others before it is copied.

    Args:
        plan: for as many devices as the topology has, and as many chunks as ``chunks``.
        topology: each of the machines.
        chunks: bytes of each chunk.
        hosts: H.
        network: what joins them.

    Returns:
        Seconds, and the crossings among the spans.
    """
    return _Simulation(plan, topology, chunks, hosts, network).timing()


def nics_used(devices: int, network: Network) -> int:
    """How many of a host's cards its devices use: each uses one."""
    return min(network.nics, devices)


def nic_of(device: int, devices: int, network: Network) -> int:
    """The card that a device uses: devices in order share the cards evenly."""
    return device * nics_used(devices, network) // devices


class _Simulation(cost.Simulation):
    """One host's run. A collective holds its card until it ends, the processor for its hops and to move its bytes."""

    def __init__(self, plan: Plan, topology: Topology, chunks: Sequence[float], hosts: int, network: Network) -> None:
        super().__init__(plan, topology, chunks, ideal_links=False, rule=cost.RULES["queue"])
        self.roots, self.devices = plan.roots, plan.devices
        self.last = {step.chunk: number for number, step in enumerate(plan.steps) if isinstance(step, Reduce)}
        self.hosts, self.network = hosts, network
        self.processor = 0.0
        self.cards = [0.0] * nics_used(plan.devices, network)
        self.crossings: List[Crossing] = []

    def timing(self) -> HostsTiming:
        for chunk in range(len(self.chunks)):
            if chunk not in self.last:  # one device: nothing to add up first
                self.seconds = max(self.seconds, self._cross(chunk, 0.0))
        run = super().timing()
        return HostsTiming(run.seconds, run.spans, run.link_bytes, run.starts, tuple(self.crossings))

    def summed(self, number: int, now: float) -> float:
        """What waits for a chunk's complete sum waits for the sum of all hosts."""
        chunk = self.steps[number].chunk
        return self._cross(chunk, now) if self.last[chunk] == number else now

    def _cross(self, chunk: int, now: float) -> float:
        """When the chunk is back on its main."""
        device, size = self.roots[chunk], self.chunks[chunk]
        nic = nic_of(device, self.devices, self.network)
        start = max(now, self.processor, self.cards[nic]) if self.hosts > 1 else now
        self.processor = start + processor_seconds(self.hosts, size, 1, self.network)
        end = self.cards[nic] = start + ring_seconds(self.hosts, size, 1, self.network._replace(nics=1))
        self.crossings.append(Crossing(chunk, device, nic, start, end))
        return end


# ---- the search --------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _search(
    topology: Topology, size: int, hosts: int, network: Network, algorithm: Optional[str], alone: Recipe
) -> Dict[str, Recipe]:
    """The fastest recipe of each algorithm; of one that was not asked for, only if it could be the fastest of all."""
    best: Dict[str, Recipe] = {}
    seconds: Dict[str, float] = {}
    for recipe in sorted(_tried(topology, algorithm, alone), key=lambda recipe: len(recipe.fractions)):
        name = recipe.algorithm
        asked_for = name in (*planner.BASELINES, algorithm)
        fastest = seconds.get(name, math.inf) if asked_for else min(seconds.values(), default=math.inf)
        if processor_seconds(hosts, size, len(recipe.fractions), network) < fastest:  # the least, without a simulation
            ordered = recipe if recipe.order else planner.in_simulated_order(recipe, topology, size)
            found = simulate_recipe_on_hosts(ordered, topology, size, hosts, network).seconds
            if found < seconds.get(name, math.inf):
                best[name], seconds[name] = ordered, found
    return best


def _tried(topology: Topology, algorithm: Optional[str], alone: Recipe) -> Iterator[Recipe]:
    yield from baselines(topology)
    yield alone
    for recipe in candidates(topology):
        if algorithm in (None, recipe.algorithm) and len(recipe.fractions) <= len(alone.fractions):
            yield recipe
