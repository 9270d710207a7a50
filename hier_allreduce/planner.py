"""From a machine to a plan: candidates made from its links, each simulated, the fastest taken.

::

    topology ─► rings, packed trees, groups, pairs ─► recipes ─► simulate ─► choose(topology, bytes)

A recipe cuts a bucket into chunks and gives each its own way: a few large chunks when bytes are few (latency counts),
many when they are many (so that links never wait). The order of a recipe's steps is the order in which the simulation
started them, so that a plan that is executed step by step, one queue for each sender, does not wait either.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from .algorithms import ReduceHalf
from .cost import RULES, Timing, lower_bound, simulate
from .errors import StrategyError
from .plan import verify
from .presets import nearest
from .recipes import Recipe, baselines, candidates
from .topology import Topology, occupancy

_TF = "queue"  # the rule of .cost.RULES whose seconds are reported
_NEAR = 1.05  # a recipe slower than the quickest by more than this is not looked at further
_WORTH = 0.99  # nor one that cannot be quicker by more than this
BASELINES = ("two-group", "tree", "flat")
ALGORITHMS = ("ring", "packed_paths", "packed_trees", "hierarchical", "exchange", *BASELINES)
_CLASSES_PER_OCTAVE = 4


@dataclass(frozen=True)
class Choice:
    """The fastest recipe for ``size`` bytes on a machine, and what it was compared with.

    ``seconds`` is predicted, ``bound`` the least that any packing of trees could take; ``baselines`` has the best
    time of each algorithm that knows nothing of the links, ``others`` of each algorithm that was tried.
    """

    recipe: Recipe
    size: int
    seconds: float
    bound: float
    baselines: Dict[str, float]
    others: Dict[str, float]

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
    if algorithm not in (None, *ALGORITHMS):
        raise StrategyError(f"algorithm={algorithm!r} is unknown{nearest(str(algorithm), list(ALGORITHMS))}")
    fastest, best = _search(topology, bytes_class(size))
    seconds = {name: simulate(recipe.plan(), topology, recipe.sizes(size)).seconds for name, recipe in best.items()}
    quickest = min(seconds, key=lambda name: seconds[name])
    slower_than_baseline = seconds[fastest] > min(seconds[name] for name in BASELINES)
    if slower_than_baseline or seconds[fastest] > seconds[quickest] * _NEAR:  # at this size, not its class's
        fastest = quickest
    name = algorithm or fastest
    if name not in best:  # the search did not look at it: others were clearly faster
        recipe = _best_of(topology, bytes_class(size), name)
        best = {**best, name: recipe}
        seconds[name] = simulate(recipe.plan(), topology, recipe.sizes(size)).seconds
    baselines = {name: seconds[name] for name in BASELINES}
    return Choice(best[name], size, seconds[name], lower_bound(topology, size), baselines, seconds)


@lru_cache(maxsize=256)
def _best_of(topology: Topology, size: int, algorithm: str) -> Recipe:
    """The fastest recipe of one algorithm."""
    recipes = [recipe for recipe in candidates(topology) if recipe.algorithm == algorithm]
    if not recipes:
        raise StrategyError(f"algorithm={algorithm!r} makes no plan for {len(topology)} devices")
    trials = [_trial(recipe, topology, size, limit=0.0) for recipe in recipes]
    return min(trials, key=lambda trial: trial.seconds[_TF]).recipe


@lru_cache(maxsize=1024)
def _search(topology: Topology, size: int) -> Tuple[str, Dict[str, Recipe]]:
    """The best algorithm, and for each algorithm its best recipe.

    Baselines come first. Of the others only those are simulated in full that could be faster than the fastest so far.
    """
    trials = [_trial(recipe, topology, size) for recipe in baselines(topology)]
    fastest = {rule: min(trial.seconds[rule] for trial in trials) for rule in RULES}
    quickest = fastest[_TF]
    for least, recipe in sorted(_least(topology, size), key=lambda found: found[0]):
        if least < quickest * _WORTH:
            trial = _trial(recipe, topology, size, limit=quickest * _NEAR)
            quickest = min(quickest, trial.seconds.get(_TF, math.inf))
            trials.append(trial)
    by_name: Dict[str, List[_Trial]] = defaultdict(list)
    for trial in trials:
        by_name[trial.recipe.algorithm].append(trial)
    best = {name: _pick(group, fastest).recipe for name, group in by_name.items()}
    return _pick(trials, fastest).recipe.algorithm, best


def _pick(trials: Sequence[_Trial], baseline: Dict[str, float]) -> _Trial:
    """The fastest; of those as fast within 0.5 %, the one with the fewest copies: each costs TensorFlow a dispatch."""
    scores = [trial.score(baseline) for trial in trials]
    if min(scores) == math.inf:
        return min(trials, key=lambda trial: trial.seconds[_TF])
    near = [trial for trial, score in zip(trials, scores) if score <= min(scores) * 1.005]
    return min(near, key=lambda trial: sum(len(srcs) for half in trial.recipe.halves for srcs, _ in half))


class _Trial(NamedTuple):
    """A recipe and its seconds by rule; where it was too slow by the first rule, there are no others."""

    recipe: Recipe
    seconds: Dict[str, float]

    def score(self, baseline: Dict[str, float]) -> float:
        """Its seconds, half by the worst rule and half on average; more if the fastest baseline is faster by any rule.

        Without the other rules, or slower than a baseline by TensorFlow's own: at the end of the list.
        """
        if len(self.seconds) < len(RULES) or self.seconds[_TF] > baseline[_TF]:
            return math.inf
        seconds = list(self.seconds.values())
        slower = max(self.seconds[rule] / (baseline[rule] or 1.0) for rule in RULES)
        return (max(seconds) + sum(seconds) / len(seconds)) * max(1.0, slower)


def _trial(recipe: Recipe, topology: Topology, size: int, limit: float = math.inf) -> _Trial:
    """Order the recipe's steps and simulate it by all rules, unless the first one shows that it is not worth while."""
    ordered, first_run = _ordered(recipe, topology, size)
    if first_run > limit:
        return _Trial(ordered, {_TF: first_run})
    # Chunks that differ a little: a plan that is fast only while everything happens at the same instant is not fast.
    luck = random.Random(0)
    sizes = [share * (1 + 1e-3 * luck.random()) for share in recipe.shares(size)]
    plan = ordered.plan()
    seconds: Dict[str, float] = {}
    for rule in RULES:
        seconds[rule] = simulate(plan, topology, sizes, rule=rule).seconds
        if seconds[_TF] > limit:
            break
    return _Trial(ordered, seconds)


@lru_cache(maxsize=64)
def _loads(topology: Topology) -> List[Tuple[Any, Any, Tuple[Any, Any], Recipe]]:
    """What each candidate needs: starts of copies and seconds per byte, of each resource and of its chunks' ways."""
    servers, use = occupancy(topology)
    latency = topology.speeds.copy_latency

    @lru_cache(maxsize=None)
    def load(half: ReduceHalf) -> Tuple[Any, Any, float, float]:
        starts, per_byte = np.zeros(len(servers)), np.zeros(len(servers))
        arrives: Dict[int, Tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))  # the longest way to a device
        for srcs, dst in half:
            for src in srcs:
                for way in ((src, dst), (dst, src)):
                    starts[use[way][0][0]] += latency
                    for server, seconds in use[way]:
                        per_byte[server] += seconds
                copied = max(seconds for _, seconds in use[src, dst])
                arrives[dst] = max(arrives[dst], (arrives[src][0] + copied, arrives[src][1] + latency))
        to_root, starts_to_root = arrives[half[-1][1]]
        return starts, per_byte, 2 * to_root, 2 * starts_to_root

    found = []
    for recipe in candidates(topology):
        parts = [load(half) for half in recipe.halves]
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


def in_simulated_order(recipe: Recipe, topology: Topology, size: int) -> Recipe:
    """The recipe with its steps in the order in which they start when each copy goes as soon as it can."""
    return _ordered(recipe, topology, size)[0]


def _ordered(recipe: Recipe, topology: Topology, size: int) -> Tuple[Recipe, float]:
    plan = recipe.plan()
    place: Dict[int, int] = defaultdict(int)
    turns = []
    for number, step in enumerate(plan.steps):
        turns.append((place[step.chunk], step.chunk, number))
        place[step.chunk] += 1
    even = [number for *_, number in sorted(turns)]  # all chunks' first steps, all chunks' second steps, …
    run = simulate(replace(recipe, order=tuple(even)).plan(), topology, recipe.shares(size))
    order = [even[i] for i in sorted(range(len(even)), key=lambda i: (run.starts[i], i))]
    return replace(recipe, order=tuple(order)), run.seconds


def timing(choice: Choice, topology: Topology) -> Timing:
    """The simulated run of a choice: its timeline and the bytes on each link."""
    return simulate(verify(choice.recipe.plan()), topology, choice.recipe.sizes(choice.size))
