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
from .plan import verify
from .recipes import Recipe, baselines, candidates
from .simulator import Simulation, Timing, lower_bound, simulate

BASELINES = ("two-group", "tree", "flat")
PLANNER_ALGORITHMS = ("ring", "packed_paths", "packed_trees", "hierarchical", "exchange", "soonest", *BASELINES)
_CLASSES_PER_OCTAVE = 4
_WORTH = 0.99  # a candidate that cannot be faster than the best by more than this is not simulated
_AS_GOOD = 1.005  # plans within this of the best are as good: the one with the fewest copies is taken
_NEAR = 1.1  # a candidate whose first run takes longer than the best by more than this is not run again
_FINALISTS = 4  # of a search are compared at the very size
_GOOD, _LONG = 0.9, 1e-3  # plans below this share of the bound, that take so many seconds, are reordered
_COPIES_SEARCHED, _SPREADS = 5_000, (0.02, 0.05, 0.1, 0.2)  # simulated for each of the finalists; of the whole time


@dataclass(frozen=True)
class Choice:
    """The fastest recipe for ``size`` bytes on a machine, and what it was compared with.

    ``seconds`` is predicted, ``bound`` the least that any packing of trees could take; ``baselines`` has the best
    time of each algorithm that knows nothing of the links.
    """

    recipe: Recipe
    size: int
    seconds: float
    bound: float
    baselines: Dict[str, float]

    @property
    def share_of_bound(self) -> float:
        """How much of what the machine can do this reaches, 0 to 1."""
        return self.bound / self.seconds if self.seconds else 1.0


def bytes_class(size: int) -> int:
    """The size for which a bucket of ``size`` bytes is planned: four classes for each factor of two."""
    return round(2 ** (round(math.log2(max(size, 1)) * _CLASSES_PER_OCTAVE) / _CLASSES_PER_OCTAVE))


def choose(topology: Topology, size: int, algorithm: Optional[str] = None) -> Choice:
    """The fastest recipe for a bucket of ``size`` bytes, or the fastest of one algorithm.

    The search is cached for each (topology, :func:`bytes_class`); the times are of ``size`` itself.

    Raises:
        StrategyError: ``algorithm`` is unknown, or makes no plan for this machine.
    """
    if algorithm not in (None, *PLANNER_ALGORITHMS):
        raise StrategyError(f"algorithm={algorithm!r} is unknown{nearest(str(algorithm), list(PLANNER_ALGORITHMS))}")
    finalists, known = _search(topology, bytes_class(size))
    baselines = {name: _seconds(recipe, topology, size) for name, recipe in known.items()}
    if algorithm is None:
        trials = [_Trial(recipe, _seconds(recipe, topology, size)) for recipe in finalists]
        trials += [_Trial(known[name], seconds) for name, seconds in baselines.items()]
        recipe, seconds = _fewest_copies(trials)
    else:
        recipe = known.get(algorithm) or _best_of(topology, bytes_class(size), algorithm)
        seconds = _seconds(recipe, topology, size)
    return Choice(recipe, size, seconds, lower_bound(topology, size), baselines)


def seconds_by_algorithm(topology: Topology, size: int) -> Dict[str, float]:
    """The best seconds of every algorithm that makes a plan for this machine."""
    names = dict.fromkeys([*BASELINES, *(recipe.algorithm for recipe in candidates(topology))])
    return {name: choose(topology, size, name).seconds for name in names}


def _seconds(recipe: Recipe, topology: Topology, size: int) -> float:
    return simulate(recipe.plan(), topology, recipe.sizes(size)).seconds


class _Trial(NamedTuple):
    """A recipe with its steps in an order, and the seconds that it takes in that order."""

    recipe: Recipe
    seconds: float


@lru_cache(maxsize=256)
def _best_of(topology: Topology, size: int, algorithm: str) -> Recipe:
    """The fastest recipe of one algorithm that is made from links."""
    found = [ordered(recipe, topology, size) for recipe in candidates(topology) if recipe.algorithm == algorithm]
    if not found:
        raise StrategyError(f"algorithm={algorithm!r} makes no plan for {count(len(topology), 'device')}; 'auto' does")
    return min(found, key=lambda trial: trial.seconds).recipe


@lru_cache(maxsize=1024)
def _search(topology: Topology, size: int) -> Tuple[Tuple[Recipe, ...], Dict[str, Recipe]]:
    """The best recipes, the best first, and of each baseline the fastest."""
    trials = [ordered(recipe, topology, size) for recipe in baselines(topology)]
    known = {
        name: min((trial for trial in trials if trial.recipe.algorithm == name), key=lambda trial: trial.seconds).recipe
        for name in BASELINES
    }
    best = min(trial.seconds for trial in trials)
    for least, recipe in sorted(_least(topology, size), key=lambda pair: pair[0]):
        if least > best * _WORTH:
            break
        trials.append(ordered(recipe, topology, size, best * _AS_GOOD))
        best = min(best, trials[-1].seconds)
    trials.sort(key=lambda trial: trial.seconds)
    if lower_bound(topology, size) < _GOOD * best and best > _LONG:
        trials[:_FINALISTS] = [_reordered(trial, topology, size) for trial in trials[:_FINALISTS]]
        trials.sort(key=lambda trial: trial.seconds)
    return tuple(trial.recipe for trial in trials[:_FINALISTS]), known


def _fewest_copies(trials: Sequence[_Trial]) -> _Trial:
    """The fastest; of those as good, the one with the fewest copies: each costs TensorFlow a dispatch."""
    limit = min(trial.seconds for trial in trials) * _AS_GOOD
    near = [trial for trial in trials if trial.seconds <= limit]
    return min(near, key=lambda trial: sum(len(srcs) for half in trial.recipe.halves for srcs, _ in half))


@lru_cache(maxsize=64)
def _loads(topology: Topology) -> List[Tuple[Any, Any, Tuple[Any, Any], Recipe]]:
    """What each candidate needs: starts of copies and seconds per byte, of each resource and of its chunks' ways."""
    names, paths = resources(topology)
    latency = topology.speeds.copy_latency

    @lru_cache(maxsize=None)
    def load(half: ReduceHalf, back: bool) -> Tuple[Any, Any, float, float]:
        starts, per_byte = np.zeros(len(names)), np.zeros(len(names))
        arrives: Dict[int, Tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))  # the longest way to a device
        for srcs, dst in half:
            for src in srcs:
                passed = paths[dst, src] if back else paths[src, dst]
                starts[passed[0][0]] += latency
                for server, seconds in passed:
                    per_byte[server] += seconds
                copied = max(seconds for _, seconds in passed)
                arrives[dst] = max(arrives[dst], (arrives[src][0] + copied, arrives[src][1] + latency))
        return (starts, per_byte, *arrives[half[-1][1]])

    @lru_cache(maxsize=None)
    def both(half: ReduceHalf, back: ReduceHalf) -> List[Any]:
        return [there + again for there, again in zip(load(half, False), load(back, True))]

    found = []
    for recipe in candidates(topology):
        parts = [both(*way) for way in recipe.ways]
        starts = np.sum([part[0] for part in parts], axis=0)
        per_byte = np.dot(recipe.fractions, [part[1] for part in parts])
        way = (np.multiply(recipe.fractions, [part[2] for part in parts]), np.array([part[3] for part in parts]))
        found.append((starts, per_byte, way, recipe))
    return found


def _least(topology: Topology, size: int) -> List[Tuple[float, Recipe]]:
    """Each candidate with less than its time: what its busiest resource needs, or its slowest chunk alone."""
    return [
        (float(max((starts + size * per_byte).max(), (size * way + way_starts).max())), recipe)
        for starts, per_byte, (way, way_starts), recipe in _loads(topology)
    ]


def ordered(recipe: Recipe, topology: Topology, size: int, patience: float = math.inf) -> _Trial:
    """The recipe with its steps as they start when copies go as they become ready, and its seconds in that order.

    Of copies that are ready at once, those of all chunks take turns; if that is nearly as fast as ``patience`` asks,
    the first chunk's copies first is tried too.
    """
    trial = _as_started(_in_turn(recipe), topology, size, patience * _NEAR)
    if trial.seconds == math.inf:
        return trial
    other = _as_started(replace(recipe, order=()), topology, size, min(patience, trial.seconds))
    return min(trial, other, key=lambda trial: trial.seconds)


def _in_turn(recipe: Recipe) -> Recipe:
    """All chunks' first steps, all chunks' second steps, …"""
    done = [0] * len(recipe.fractions)
    turns = []
    for step in replace(recipe, order=()).plan().steps:  # one chunk's after another's
        turns.append(done[step.chunk])
        done[step.chunk] += 1
    return replace(recipe, order=tuple(sorted(range(len(turns)), key=turns.__getitem__)))


def _as_started(recipe: Recipe, topology: Topology, size: int, patience: float) -> _Trial:
    shares = recipe.shares(size)
    as_ready = Simulation(recipe.plan(), topology, shares, ordered=False, patience=patience).run()
    if as_ready.seconds == math.inf:
        return _Trial(recipe, math.inf)
    in_order = _in_order_of(as_ready.starts, recipe)
    return _Trial(in_order, Simulation(in_order.plan(), topology, shares).run().seconds)


def _in_order_of(starts: Sequence[float], recipe: Recipe) -> Recipe:
    """The recipe with its steps sorted by when they started."""
    steps = recipe.order or range(len(starts))
    return replace(recipe, order=tuple(steps[i] for i in sorted(range(len(starts)), key=starts.__getitem__)))


def _reordered(trial: _Trial, topology: Topology, size: int) -> _Trial:
    """The trial, or the same recipe in a faster order: a local search over the starts of its steps.

    Where fast and slow links cannot take turns evenly, the order in which copies become ready leaves links idle.
    """
    luck, shares = random.Random(0), trial.recipe.shares(size)
    best, run = trial.recipe, Simulation(trial.recipe.plan(), topology, shares).run()
    for attempt in range(_COPIES_SEARCHED // len(run.began)):
        spread = _SPREADS[attempt % len(_SPREADS)] * run.seconds
        changed = [start + luck.gauss(0, spread) if luck.random() < 0.3 else start for start in run.starts]
        other = _in_order_of(_after_their_own(changed, best), best)
        rerun = Simulation(other.plan(), topology, shares, patience=run.seconds).run()
        if rerun.seconds < run.seconds:
            best, run = other, rerun
    return _Trial(best, run.seconds)


def _after_their_own(starts: Sequence[float], recipe: Recipe) -> List[float]:
    """The starts, none of them before that of a step before it of the same chunk."""
    latest: Dict[int, float] = {}
    delayed = []
    for step, start in zip(recipe.plan().steps, starts):
        latest[step.chunk] = max(start, latest.get(step.chunk, start))
        delayed.append(latest[step.chunk])
    return delayed


def timeline(choice: Choice, topology: Topology) -> Timing:
    """The simulated run of a choice: its timeline and the bytes on each link."""
    return simulate(verify(choice.recipe.plan()), topology, choice.recipe.sizes(choice.size))
