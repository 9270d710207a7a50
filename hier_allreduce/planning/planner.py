"""From a machine to a plan: candidates made from its links, each simulated, the fastest taken.

::

    topology ─► rings, packed trees, groups, pairs ─► recipes ─► simulate ─► choose(topology, bytes)

A recipe cuts a bucket into chunks and gives each its own way: a few large chunks when bytes are few (latency counts),
many when they are many (so that links never wait). The order of a recipe's steps is the order in which they start in a
simulation whose senders issue copies as they become ready. The emitted graph keeps that order, so nothing waits longer
than it did there.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ..errors import StrategyError
from ..formatting import count
from ..presets import nearest
from ..topology import Topology, resources
from .algorithms import ReduceHalf
from .cache import kept
from .considerate import Considerate
from .kept_recipes import found_from_values, found_to_values, recipe_from_values, recipe_to_values
from .plan import Plan, verify
from .recipes import Recipe, baselines, candidates, candidates_on_lanes
from .simulator import Simulation, Timing, lower_bound, predicted_seconds, simulate

BASELINES = ("two-group", "tree", "flat")
PLANNER_ALGORITHMS = (
    "ring",
    "packed_paths",
    "packed_trees",
    "hierarchical",
    "exchange",
    "soonest",
    *BASELINES,
)
_CLASSES_PER_OCTAVE = 4
_WORTH = 0.99  # prune: lower bound > 0.99 × best
_AS_GOOD = 1.005  # plans up to 0.5 % slower than the best are as good
_WORTH_LANES = 0.95  # a plan over lanes, which has several times the copies, must be 5 % faster
_AS_GOOD_ON_LANES = 1.03  # and of several the one with the fewest copies is as good, up to 3 % slower
_NEAR = 1.1  # prune: a baseline's first run > 1.1 × the best of its algorithm
_FINALISTS = 4  # recipes of a search that are compared at the exact size
_GOOD, _LONG = 0.9, 1e-3  # where all plans are below 90 % of the bound and take over 1 ms, orders are searched
_REORDERED = 2  # of the recipes that are best with considerate senders
_COPIES_SEARCHED = 5_000  # copies to simulate while one plan is reordered
_SPREADS = (0.005, 0.0125, 0.025, 0.05)  # how far chunks are delayed, as shares of the run


@dataclass(frozen=True)
class Choice:
    """The fastest recipe for ``size`` bytes on a machine.

    ``seconds`` is predicted, ``bound`` is the least that any packing of trees could take.
    """

    recipe: Recipe
    size: int
    seconds: float
    bound: float

    def plan(self) -> Plan:
        """Return the plan of all chunks."""
        return self.recipe.plan()

    def sizes(self) -> Tuple[int, ...]:
        """Return the bytes of each chunk."""
        return self.recipe.sizes(self.size)

    @property
    def share_of_bound(self) -> float:
        """The bound as a share of the predicted time, 0 to 1."""
        return self.bound / self.seconds if self.seconds else 1.0


def bytes_class(size: int) -> int:
    """Return the size for which a bucket of ``size`` bytes is planned: four classes for each factor of two."""
    return round(2 ** (round(math.log2(max(size, 1)) * _CLASSES_PER_OCTAVE) / _CLASSES_PER_OCTAVE))


def choose(topology: Topology, size: int, algorithm: Optional[str] = None, lanes: int = 0) -> Choice:
    """Return the fastest recipe for a bucket of ``size`` bytes, or the fastest of one algorithm.

    With ``lanes`` for each GPU it may use them. It does where it is then at least 5 % faster.

    The search is cached for each (topology, :func:`bytes_class`), also for later processes. The times
    are those of ``size`` itself.

    Raises:
        StrategyError: ``algorithm`` is unknown, or makes no plan for this machine.
    """
    if algorithm not in (None, *PLANNER_ALGORITHMS):
        raise StrategyError(f"algorithm={algorithm!r} is unknown{nearest(str(algorithm), list(PLANNER_ALGORITHMS))}")
    without = _chosen(topology, size, algorithm, 0)
    if not lanes or len(topology) == 1:
        return without
    choice = _chosen(topology, size, algorithm, lanes)
    return choice if choice.seconds < _WORTH_LANES * without.seconds else without


def _chosen(topology: Topology, size: int, algorithm: Optional[str], lanes: int) -> Choice:
    known = _timed_baselines(topology, size)
    if algorithm is None:
        finalists, _ = _search(topology, bytes_class(size), lanes)
        trials = [_Trial(recipe, _seconds(recipe, topology, size)) for recipe in finalists]
        if not lanes:
            trials += known.values()
        best = min(trial.seconds for trial in trials)
        fastest_known = min(trial.seconds for trial in known.values())
        limit = best * _AS_GOOD_ON_LANES if lanes else min(best * _AS_GOOD, fastest_known)
        recipe, seconds = _fewest_copies(trials, limit)
    elif algorithm in known:
        recipe, seconds = known[algorithm]
    else:
        recipe = _best_of(topology, bytes_class(size), algorithm, lanes)
        seconds = _seconds(recipe, topology, size)
    return Choice(recipe, size, seconds, lower_bound(topology, size, lanes=recipe.lanes.count))


def baseline_seconds(topology: Topology, size: int) -> Dict[str, float]:
    """Return the best seconds of each algorithm that does not use the links."""
    return {name: trial.seconds for name, trial in _timed_baselines(topology, size).items()}


def _known_names(values: Any, topology: Topology) -> List[str]:
    if not set(values) <= set(PLANNER_ALGORITHMS):
        raise ValueError("not the planner's algorithms")
    return list(values)


@kept(list, _known_names)
def algorithms_for(topology: Topology) -> List[str]:
    """Return the algorithms that make a plan for this machine."""
    return list(dict.fromkeys([*BASELINES, *(recipe.algorithm for recipe in candidates(topology))]))


def seconds_by_algorithm(topology: Topology, size: int) -> Dict[str, float]:
    """Return the best seconds of every algorithm that makes a plan for this machine."""
    return {name: choose(topology, size, name).seconds for name in algorithms_for(topology)}


def _seconds(recipe: Recipe, topology: Topology, size: int) -> float:
    return predicted_seconds(recipe.plan(), topology, recipe.sizes(size))


class _Trial(NamedTuple):
    """A recipe with its steps in an order, and its seconds in that order."""

    recipe: Recipe
    seconds: float


@lru_cache(maxsize=1024)
def _timed_baselines(topology: Topology, size: int) -> Dict[str, _Trial]:
    """Return the fastest recipe of each baseline, with its seconds for ``size`` bytes: all algorithms ask for them."""
    _, known = _search(topology, bytes_class(size), 0)
    return {name: _Trial(recipe, _seconds(recipe, topology, size)) for name, recipe in known.items()}


@lru_cache(maxsize=256)
@kept(recipe_to_values, recipe_from_values)
def _best_of(topology: Topology, size: int, algorithm: str, lanes: int) -> Recipe:
    """Return the fastest recipe of one algorithm that is made from links."""
    best: Optional[_Trial] = None
    for least, recipe in _least(topology, size, lanes):
        if best and least >= best.seconds:
            break
        if recipe.algorithm == algorithm:
            trial = ordered(recipe, topology, size, best.seconds if best else math.inf)
            best = trial if best is None or trial.seconds < best.seconds else best
    if best is None:
        raise StrategyError(f"algorithm={algorithm!r} makes no plan for {count(len(topology), 'device')}; 'auto' does")
    return best.recipe


@lru_cache(maxsize=1024)
@kept(found_to_values, found_from_values)
def _search(topology: Topology, size: int, lanes: int) -> Tuple[Tuple[Recipe, ...], Dict[str, Recipe]]:
    """Return the best recipes over ``lanes``, the best first, and the fastest recipe of each baseline without lanes."""
    if lanes:
        return _best_over_lanes(topology, size, lanes), _search(topology, size, 0)[1]
    trials, known = _baselines_in_order(topology, size)
    best = min(trial.seconds for trial in trials)
    trials += _fastest(topology, size, 0, best)
    best = min(trial.seconds for trial in trials)
    trials.sort(key=lambda trial: trial.seconds)
    if lower_bound(topology, size) < _GOOD * best and best > _LONG:
        trials += _reordered_rivals(topology, size, best)
        trials.sort(key=lambda trial: trial.seconds)
    return tuple(trial.recipe for trial in trials[:_FINALISTS]), {name: known[name].recipe for name in BASELINES}


def _baselines_in_order(topology: Topology, size: int) -> Tuple[List[_Trial], Dict[str, _Trial]]:
    """Return all baseline recipes, those far slower than others of their algorithm untimed, and each one's fastest."""
    trials: List[_Trial] = []
    best: Dict[str, _Trial] = {}
    for recipe in baselines(topology):
        known = best.get(recipe.algorithm)
        trials.append(ordered(recipe, topology, size, known.seconds * _NEAR if known else math.inf))
        if known is None or trials[-1].seconds < known.seconds:
            best[recipe.algorithm] = trials[-1]
    return trials, best


def _reordered_rivals(topology: Topology, size: int, best: float) -> List[_Trial]:
    """Return the recipes that considerate senders run faster than ``best``, each in the best of many orders.

    Where fast and slow links cannot alternate evenly, the order in which copies become ready leaves links idle. There
    the recipes that were slow in that order may be the best ones. Where no considerate run is faster, a search of
    orders hardly ever gains anything.
    """
    runs = []
    for least, recipe in _least(topology, size, 0):
        if least > best * _WORTH:
            break
        recipe = replace(recipe, order=())
        runs.append((_considerate_run(recipe, topology, size, [0.0] * len(recipe.fractions), best), recipe))
    runs.sort(key=lambda run: run[0].seconds)
    if not runs or runs[0][0].seconds * _AS_GOOD > best:
        return []
    trials = [_in_the_order_of(run, recipe, topology) for run, recipe in runs[:_REORDERED]]
    return [_reordered(trial, topology, size) for trial in trials if trial.seconds < math.inf]


def _best_over_lanes(topology: Topology, size: int, lanes: int) -> Tuple[Recipe, ...]:
    trials = sorted(_fastest(topology, size, lanes, math.inf), key=lambda trial: trial.seconds)
    return tuple(trial.recipe for trial in trials[:_FINALISTS])


def _fastest(topology: Topology, size: int, lanes: int, best: float) -> List[_Trial]:
    """Return the recipes that may be faster than ``best``, which falls as faster ones are found."""
    trials = []
    for least, recipe in _least(topology, size, lanes):
        if least > best * _WORTH:
            break
        trials.append(ordered(recipe, topology, size, best * _AS_GOOD))
        best = min(best, trials[-1].seconds)
    return trials


def _fewest_copies(trials: Sequence[_Trial], limit: float) -> _Trial:
    """Return the trial with the fewest copies of those within ``limit`` seconds: each costs TensorFlow a dispatch."""
    near = [trial for trial in trials if trial.seconds <= limit]
    return min(near, key=lambda trial: trial.recipe.copies)


class _Load(NamedTuple):
    """What a half of a recipe needs.

    Attributes:
        starts: for each resource the seconds of the starts of its copies.
        per_byte: for each resource the seconds that it is busy for each byte of the chunk.
        way_per_byte: seconds for each byte along the chunk's longest way to its root, or back.
        way_starts: the seconds of the starts on that way.
    """

    starts: Any
    per_byte: Any
    way_per_byte: float
    way_starts: float

    def least(self, size: float) -> float:
        """Return seconds that ``size`` bytes take at least: on the busiest resource, and along the longest way."""
        return max(float((self.starts + size * self.per_byte).max()), self.way_starts + size * self.way_per_byte)


@lru_cache(maxsize=4096)
def _load(topology: Topology, half: ReduceHalf, back: bool, lanes: int) -> _Load:
    names, paths = resources(topology, lanes=lanes)
    latency = topology.speeds.copy_latency
    starts, per_byte = np.zeros(len(names)), np.zeros(len(names))
    longest: Dict[int, Tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))  # to each device: per byte, starts
    for srcs, dst in half:
        for src in srcs:
            path = paths[dst, src] if back else paths[src, dst]
            starts[path[0][0]] += latency
            for resource, seconds in path:
                per_byte[resource] += seconds
            slowest = max(seconds for _, seconds in path)
            longest[dst] = max(longest[dst], (longest[src][0] + slowest, longest[src][1] + latency))
    return _Load(starts, per_byte, *longest[half[-1][1]])


@lru_cache(maxsize=64)
def _loads(topology: Topology, lanes: int) -> List[Tuple[Recipe, _Load, List[Tuple[float, float, float]]]]:
    """Return each candidate with the load of its bucket, and each chunk's share with what its way takes."""
    loads = []
    for recipe in candidates_on_lanes(topology, lanes) if lanes else candidates(topology):
        halves = [
            (_load(topology, there, False, lanes), _load(topology, back, True, lanes)) for there, back in recipe.ways
        ]
        starts = np.sum([there.starts + back.starts for there, back in halves], axis=0)
        per_byte = np.dot(recipe.fractions, [there.per_byte + back.per_byte for there, back in halves])
        ways = [
            (share, there.way_per_byte + back.way_per_byte, there.way_starts + back.way_starts)
            for share, (there, back) in zip(recipe.fractions, halves)
        ]
        loads.append((recipe, _Load(starts, per_byte, 0.0, 0.0), ways))
    return loads


def _least(topology: Topology, size: int, lanes: int) -> List[Tuple[float, Recipe]]:
    """Return each candidate with a lower bound of its seconds, the lowest first."""
    bounds = [
        (max(load.least(size), *(starts + share * size * per_byte for share, per_byte, starts in ways)), recipe)
        for recipe, load, ways in _loads(topology, lanes)
    ]
    return sorted(bounds, key=lambda bound: bound[0])


def ordered(recipe: Recipe, topology: Topology, size: int, patience: float = math.inf) -> _Trial:
    """Return the recipe with its steps in the order in which copies that become ready start.

    Of copies that are ready at the same time, all chunks take turns. If that takes at most ``patience`` seconds, an
    order that prefers the first chunk is tried too.
    """
    recipe = _in_turn(recipe)
    run = _run_as_ready(recipe, topology, size, patience)
    if run.seconds < math.inf:
        by_chunk = replace(recipe, order=())
        other = _run_as_ready(by_chunk, topology, size, run.seconds)
        recipe, run = min((recipe, run), (by_chunk, other), key=lambda each: each[1].seconds)
    return _in_the_order_of(run, recipe, topology)


def _in_turn(recipe: Recipe) -> Recipe:
    """Return the recipe with all chunks' first steps first, then all chunks' second steps, …"""
    done = [0] * len(recipe.fractions)
    turns = []
    for step in replace(recipe, order=()).plan().steps:  # one chunk's after another's
        turns.append(done[step.chunk])
        done[step.chunk] += 1
    return replace(recipe, order=tuple(sorted(range(len(turns)), key=turns.__getitem__)))


def _run_as_ready(recipe: Recipe, topology: Topology, size: int, patience: float) -> Simulation:
    return Simulation(recipe.plan(), topology, recipe.shares(size), ordered=False, patience=patience).run()


def _in_the_order_of(run: Simulation, recipe: Recipe, topology: Topology) -> _Trial:
    """Return the recipe with its steps in the order of a run, and timed in it; untimed if the run was abandoned."""
    if run.seconds == math.inf:
        return _Trial(recipe, math.inf)
    steps = recipe.order or range(len(run.starts))
    order = tuple(steps[i] for i in sorted(range(len(run.starts)), key=run.starts.__getitem__))
    in_order = replace(recipe, order=order)
    return _Trial(in_order, Simulation(in_order.plan(), topology, run.chunks).run().seconds)


def _reordered(trial: _Trial, topology: Topology, size: int) -> _Trial:
    """Return the trial, or the same recipe in a faster order: a local search over delays of its chunks.

    Considerate senders prefer chunks that are far from their end. A delayed chunk counts as nearer to it, so others
    overtake it.
    """
    generator, best = random.Random(0), trial
    recipe = replace(trial.recipe, order=())
    delays = [0.0] * len(recipe.fractions)
    for attempt in range(_COPIES_SEARCHED // recipe.copies):
        spread = _SPREADS[attempt % len(_SPREADS)] * trial.seconds
        moved = [delay + generator.gauss(0, spread) if generator.random() < 0.3 else delay for delay in delays]
        other = _considerately(recipe, topology, size, moved, best.seconds)
        if other.seconds < best.seconds:
            best, delays = other, moved
    return best


def _considerately(recipe: Recipe, topology: Topology, size: int, delays: Sequence[float], patience: float) -> _Trial:
    """Return the recipe with its steps in the order in which considerate senders start them."""
    run = _considerate_run(recipe, topology, size, delays, patience)
    return _in_the_order_of(run, recipe, topology)


def _considerate_run(
    recipe: Recipe, topology: Topology, size: int, delays: Sequence[float], patience: float
) -> Simulation:
    return Considerate(recipe.plan(), topology, recipe.shares(size), delays, patience).run()


def timeline(choice: Choice, topology: Topology) -> Timing:
    """Simulate a choice: its timeline, and the bytes on each link."""
    return simulate(verify(choice.plan()), topology, choice.sizes())
