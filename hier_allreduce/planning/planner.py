"""From a machine to a plan: candidates made from its links, each simulated, the fastest taken.

::

    topology ─► rings, packed trees, groups, pairs ─► recipes ─► simulate ─► choose(topology, bytes)

A recipe cuts a bucket into chunks and gives each its own way: a few large chunks when bytes are few (latency counts),
many when they are many (so that links never wait). The order of a recipe's steps is the order in which a simulation
started them, copies that were ready at once chunk by chunk or in turn, or all chunks in turn if that is faster, so that
a plan that is executed step by step, one queue for each sender, does not wait either.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ..errors import StrategyError
from ..formatting import count
from ..presets import nearest
from ..topology import Topology, resources
from .algorithms import ReduceHalf
from .plan import verify
from .recipes import Recipe, baselines, candidates
from .simulator import RULES, Simulation, Timing, lower_bound, simulate

_TF = "queue"  # the rule of .cost.RULES whose seconds are reported
_NEAR = 1.05  # a recipe slower than the quickest by more than this is not looked at further
_WORTH = 0.99  # nor one that cannot be quicker by more than this
_FEW_STEPS = 128  # the steps of longer plans are tried in a second order only where the plan is picked
_UNFAIR = 8  # a recipe that is 1 % slower than a baseline by one rule counts as 8 % slower
BASELINES = ("two-group", "tree", "flat")
PLANNER_ALGORITHMS = ("ring", "packed_paths", "packed_trees", "hierarchical", "exchange", "soonest", *BASELINES)
_CLASSES_PER_OCTAVE = 4
_FINALISTS, _NEARBY = 4, (0.93, 1.07)  # the best few are simulated at these sizes too
_MANY_STEPS = 256  # where the best has more, it hardly matters which copy comes first, and simulations take long


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
    best, known = _search(topology, bytes_class(size))
    baselines = {name: _seconds(one, topology, size) for name, one in known.items()}
    if not algorithm:
        recipe, seconds = _at_this_size(best, known, baselines, topology, size)
    else:
        found = best[0] if best[0].algorithm == algorithm else known.get(algorithm)
        recipe = found or _best_of(topology, bytes_class(size), algorithm)
        seconds = _seconds(recipe, topology, size)
    return Choice(recipe, size, seconds, lower_bound(topology, size), baselines)


def _at_this_size(
    best: Sequence[Recipe], known: Dict[str, Recipe], baselines: Dict[str, float], topology: Topology, size: int
) -> Tuple[Recipe, float]:
    """The first of the best that no baseline beats at this very size, not just its class's; else that baseline."""
    quickest = min(baselines, key=lambda name: baselines[name])
    for recipe in best:
        seconds = _seconds(recipe, topology, size)
        if seconds <= baselines[quickest]:
            return recipe, seconds
    return known[quickest], baselines[quickest]


def seconds_by_algorithm(topology: Topology, size: int) -> Dict[str, float]:
    """The best seconds of every algorithm that makes a plan for this machine, whether it was looked at or not."""
    names = dict.fromkeys([*BASELINES, *(recipe.algorithm for recipe in candidates(topology))])
    return {name: choose(topology, size, name).seconds for name in names}


def _seconds(recipe: Recipe, topology: Topology, size: int) -> float:
    return simulate(recipe.plan(), topology, recipe.sizes(size)).seconds


@lru_cache(maxsize=256)
def _best_of(topology: Topology, size: int, algorithm: str) -> Recipe:
    """The fastest recipe of one algorithm that is made from links."""
    best, seconds = None, math.inf
    for recipe in candidates(topology):
        if recipe.algorithm == algorithm:
            ordered, taken = _first_run(recipe, topology, size, patience=seconds)
            if taken < seconds:
                best, seconds = ordered, taken
    if not best:
        raise StrategyError(f"algorithm={algorithm!r} makes no plan for {count(len(topology), 'device')}; 'auto' does")
    return best


@lru_cache(maxsize=1024)
def _search(topology: Topology, size: int) -> Tuple[Tuple[Recipe, ...], Dict[str, Recipe]]:
    """The best recipes, the best first, and of each baseline the fastest by TensorFlow's own rule."""
    trials = [trial for recipe in baselines(topology) for trial in _trials(recipe, topology, size)]
    fastest = _fastest(trials, topology, size)
    known = {name: _quickest([one for one in trials if one.recipe.algorithm == name]).recipe for name in BASELINES}
    return _final([*trials, *_promising(topology, size, fastest)], fastest, topology, size), known


def _promising(topology: Topology, size: int, fastest: Dict[str, float]) -> List[_Trial]:
    """Trials of the candidates that could be the quickest.

    All wait in order of the least that they can take; after a first run, of what that took.
    """
    trials: List[_Trial] = []
    quickest = fastest[_TF]
    waiting = [(least, number, recipe, False) for number, (least, recipe) in enumerate(_least(topology, size))]
    heapify(waiting)
    while waiting:
        seconds, number, recipe, had_first_run = heappop(waiting)
        if had_first_run:
            found = _in_full(recipe, seconds, topology, size, quickest * _NEAR)
            quickest = min([quickest] + [trial.seconds[_TF] for trial in found if trial.slower(fastest) <= 1.0])
            trials += found
        elif seconds < quickest * _WORTH:
            ordered, seconds = _first_run(recipe, topology, size, quickest * _NEAR)
            if seconds < math.inf:
                heappush(waiting, (seconds, number, ordered, True))
    return trials


def _final(trials: Sequence[_Trial], fastest: Dict[str, float], topology: Topology, size: int) -> Tuple[Recipe, ...]:
    """The best, its steps in turn tried too; if it is short, the best few, compared by their means over sizes."""
    picked = _pick(trials, fastest).recipe
    all_of_them = [*trials, _trial(_in_turn(picked), topology, _uneven(picked, size))]
    if len(picked.order) > _MANY_STEPS:
        return (_pick(all_of_them, fastest).recipe,)
    finalists: Dict[Any, _Trial] = {}
    eligible = (trial for trial in all_of_them if trial.score(fastest) < math.inf)
    for trial in sorted(eligible, key=lambda trial: trial.score(fastest)):
        if len(finalists) < _FINALISTS:
            finalists.setdefault((trial.recipe.fractions, trial.recipe.plan().steps), trial)
    means = sorted(
        (_over_sizes(trial, topology, size) for trial in finalists.values()), key=lambda mean: mean.cost(fastest)
    )
    first = _fewest_copies(means, [mean.cost(fastest) for mean in means])
    return (first.recipe, *(mean.recipe for mean in means if mean is not first))


def _fastest(trials: Sequence[_Trial], topology: Topology, size: int) -> Dict[str, float]:
    """The seconds of the fastest baseline by each rule.

    People write such schedules down chunk after chunk, so that counts too; except by TensorFlow's own rule, where the
    order decides only between copies that become ready at the same time.
    """
    written = [_trial(recipe, topology, _uneven(recipe, size)) for recipe in baselines(topology)]
    return {rule: min(one.seconds[rule] for one in (trials if rule == _TF else [*trials, *written])) for rule in RULES}


def _over_sizes(trial: _Trial, topology: Topology, size: int) -> _Trial:
    """The trial with its mean over sizes nearby: a few bytes more may change which copy comes first, and all later."""
    recipe = trial.recipe
    runs = [_trial(recipe, topology, _uneven(recipe, size * factor)).seconds for factor in _NEARBY]
    runs += [trial.seconds, _trial(recipe, topology, recipe.shares(size)).seconds]
    return _Trial(recipe, {rule: sum(run[rule] for run in runs) / len(runs) for rule in RULES})


def _quickest(trials: Sequence[_Trial]) -> _Trial:
    return min(trials, key=lambda trial: trial.seconds[_TF])


def _pick(trials: Sequence[_Trial], baseline: Dict[str, float]) -> _Trial:
    """The best by its score; if nothing is as fast as the baselines, the quickest."""
    scores = [trial.score(baseline) for trial in trials]
    return _quickest(trials) if min(scores) == math.inf else _fewest_copies(trials, scores)


def _fewest_copies(trials: Sequence[_Trial], scores: Sequence[float]) -> _Trial:
    """The best; of those as good within 0.5 %, the one with the fewest copies: each costs TensorFlow a dispatch."""
    near = [trial for trial, score in zip(trials, scores) if score <= min(scores) * 1.005]
    return min(near, key=lambda trial: sum(len(srcs) for half in trial.recipe.halves for srcs, _ in half))


class _Trial(NamedTuple):
    """A recipe and its seconds by rule; where it was too slow by the first rule, there are no others."""

    recipe: Recipe
    seconds: Dict[str, float]

    def score(self, baseline: Dict[str, float]) -> float:
        """Its cost; if it is slower than a baseline by TensorFlow's own rule, it is at the end of the list."""
        return math.inf if self.seconds[_TF] > baseline[_TF] else self.cost(baseline)

    def cost(self, baseline: Dict[str, float]) -> float:
        """Its seconds, half by the worst rule and half on average; more if the fastest baseline is faster by any rule.

        Without the other rules: infinite.
        """
        slower = self.slower(baseline)
        if slower == math.inf:
            return slower
        seconds = list(self.seconds.values())
        return (max(seconds) + sum(seconds) / len(seconds)) * max(1.0, slower) ** _UNFAIR

    def slower(self, baseline: Dict[str, float]) -> float:
        """How many times as long as the fastest baseline it takes, by the worst rule."""
        if len(self.seconds) < len(RULES):
            return math.inf
        return max(self.seconds[rule] / (baseline[rule] or 1.0) for rule in RULES)


def _trials(recipe: Recipe, topology: Topology, size: int) -> List[_Trial]:
    """The recipe by all rules, its steps in the orders in which they started in first runs."""
    return _in_full(*_first_run(recipe, topology, size), topology, size)


def _in_full(ordered: Recipe, first_run: float, topology: Topology, size: int, limit: float = math.inf) -> List[_Trial]:
    """A recipe in the order of its first run by all rules, unless that run or the next one is over ``limit``.

    If its steps are few, in turn too (of many, only what is picked), and as they start when the first chunk goes first.
    """
    if first_run > limit:
        return [_Trial(ordered, {_TF: first_run})]
    orders = [ordered]
    if len(ordered.order) <= _FEW_STEPS:
        orders += [_in_turn(ordered), _as_started(replace(ordered, order=()), topology, size)[0]]
    sizes = _uneven(ordered, size)
    return [_trial(one, topology, sizes, limit) for one in dict.fromkeys(orders)]


def _uneven(recipe: Recipe, size: float) -> List[float]:
    """Chunks that differ a little: who is fast only while all happens at the same instant is not fast."""
    luck = random.Random(0)
    return [share * (1 + 1e-3 * luck.random()) for share in recipe.shares(size)]


def _trial(recipe: Recipe, topology: Topology, sizes: Sequence[float], limit: float = math.inf) -> _Trial:
    plan = recipe.plan()
    seconds: Dict[str, float] = {}
    for rule in RULES:
        seconds[rule] = Simulation(plan, topology, sizes, rule=RULES[rule]).run().seconds
        if seconds[_TF] > limit:
            break
    return _Trial(recipe, seconds)


@lru_cache(maxsize=64)
def _loads(topology: Topology) -> List[Tuple[Any, Any, Tuple[Any, Any], Recipe]]:
    """What each candidate needs: starts of copies and seconds per byte, of each resource and of its chunks' ways."""
    servers, use = resources(topology)
    latency = topology.speeds.copy_latency

    @lru_cache(maxsize=None)
    def load(half: ReduceHalf, back: bool) -> Tuple[Any, Any, float, float]:
        starts, per_byte = np.zeros(len(servers)), np.zeros(len(servers))
        arrives: Dict[int, Tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))  # the longest way to a device
        for srcs, dst in half:
            for src in srcs:
                passed = use[dst, src] if back else use[src, dst]
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


def in_simulated_order(recipe: Recipe, topology: Topology, size: int) -> Recipe:
    """The recipe with its steps in the order in which they start when each copy goes as soon as it can."""
    return _first_run(recipe, topology, size)[0]


def _in_turn(recipe: Recipe) -> Recipe:
    """All chunks' first steps, all chunks' second steps, …"""
    done = [0] * len(recipe.fractions)
    turns = []
    for step in replace(recipe, order=()).plan().steps:  # one chunk's after another's
        turns.append(done[step.chunk])
        done[step.chunk] += 1
    return replace(recipe, order=tuple(sorted(range(len(turns)), key=turns.__getitem__)))


def _first_run(recipe: Recipe, topology: Topology, size: int, patience: float = math.inf) -> Tuple[Recipe, float]:
    """The recipe with its steps in the order in which they start when all chunks take turns, and what that took."""
    return _as_started(_in_turn(recipe), topology, size, patience)


def _as_started(recipe: Recipe, topology: Topology, size: int, patience: float = math.inf) -> Tuple[Recipe, float]:
    """The recipe with its steps in the order in which they start, copies ready at once in its own, and its seconds."""
    plan = recipe.plan()
    run = Simulation(plan, topology, recipe.shares(size), rule=RULES[_TF], patience=patience).run()
    steps = recipe.order or range(len(plan.steps))  # without an order: one chunk's after another's
    started = sorted(range(len(steps)), key=run.starts.__getitem__)
    return replace(recipe, order=tuple(steps[i] for i in started)), run.seconds


def timeline(choice: Choice, topology: Topology) -> Timing:
    """The simulated run of a choice: its timeline and the bytes on each link."""
    return simulate(verify(choice.recipe.plan()), topology, choice.recipe.sizes(choice.size))
