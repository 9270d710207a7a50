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
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from . import algorithms
from .algorithms import Groups, ReduceHalf
from .cost import RULES, Timing, lower_bound, simulate
from .errors import StrategyError
from .plan import Plan, verify
from .presets import nearest
from .topology import Topology, occupancy
from .trees import Packing, Tree, centers, distances, ends, groups, pack, pack_paths, ring, rooted_half

_TF = "queue"  # the rule of .cost.RULES whose seconds are reported
_NEAR = 1.05  # a recipe slower than the quickest by more than this is not looked at further
_CLEARLY = 1.25  # a recipe slower than a baseline by more than this, by any rule, is not taken
_MOST_CHUNKS = 8  # for each device
BASELINES = ("two-group", "tree", "flat")
ALGORITHMS = ("ring", "packed_paths", "packed_trees", "hierarchical", "exchange", *BASELINES)
_CLASSES_PER_OCTAVE = 4


@dataclass(frozen=True)
class Recipe:
    """How to all-reduce one bucket on ``devices`` (K) devices.

    Chunk ``c`` is the share ``fractions[c]`` of the bucket's bytes and goes by ``halves[c]``; ``order`` lists the steps
    of :func:`.algorithms.plan_from_halves` in the order of execution.
    """

    algorithm: str
    devices: int
    fractions: Tuple[float, ...]
    halves: Tuple[ReduceHalf, ...]
    order: Tuple[int, ...] = ()

    def plan(self) -> Plan:
        """The plan of one bucket: as many chunks as ``fractions``."""
        plan = algorithms.plan_from_halves(self.devices, self.halves, self.algorithm)
        order = self.order or range(len(plan.steps))
        return Plan(plan.devices, plan.chunks, tuple(plan.steps[i] for i in order), plan.algorithm)

    def shares(self, size: int) -> Tuple[float, ...]:
        """``size`` cut by the fractions, to fractions of a byte: equal chunks stay exactly equal."""
        return tuple(fraction * size for fraction in self.fractions)

    def sizes(self, size: int, unit: int = 1) -> Tuple[int, ...]:
        """``size`` (bytes, or elements) cut by the fractions at multiples of ``unit``; the sizes add up to ``size``."""
        cuts, total = [0], 0.0
        for fraction in self.fractions:
            total += fraction
            cuts.append(min(size, round(total * size / unit) * unit))
        cuts[-1] = size
        return tuple(after - before for before, after in zip(cuts, cuts[1:]))


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
    recipes = [recipe for recipe in _candidates(topology) if recipe.algorithm == algorithm]
    if not recipes:
        raise StrategyError(f"algorithm={algorithm!r} makes no plan for {len(topology)} devices")
    trials = [_trial(recipe, topology, size, limit=0.0) for recipe in recipes]
    return min(trials, key=lambda trial: trial.seconds[_TF]).recipe


@lru_cache(maxsize=1024)
def _search(topology: Topology, size: int) -> Tuple[str, Dict[str, Recipe]]:
    """The best algorithm, and for each algorithm its best recipe.

    Baselines come first. Of the others only those are simulated in full that could be faster than the fastest so far.
    """
    trials = [_trial(recipe, topology, size) for recipe in _baselines(topology)]
    fastest = {rule: min(trial.seconds[rule] for trial in trials) for rule in RULES}
    quickest = fastest[_TF]
    for least, recipe in sorted(_least(topology, size), key=lambda pair: pair[0]):
        if least < quickest:
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
    near = [trial for trial, score in zip(trials, scores) if score <= min(scores) * 1.005]
    return min(near, key=lambda trial: sum(len(srcs) for half in trial.recipe.halves for srcs, _ in half))


class _Trial(NamedTuple):
    """A recipe and its seconds by rule; where it was too slow by the first rule, there are no others."""

    recipe: Recipe
    seconds: Dict[str, float]

    def score(self, baseline: Dict[str, float]) -> float:
        """Its seconds beside the fastest baseline's, on average over the rules; clearly slower by any one: that ratio.

        Without the other rules, or slower by TensorFlow's own: at the end of the list.
        """
        if len(self.seconds) < len(RULES) or self.seconds[_TF] > baseline[_TF]:
            return 100.0 * (1.0 + self.seconds[_TF] / (baseline[_TF] or 1.0))
        ratios = [self.seconds[rule] / (baseline[rule] or 1.0) for rule in RULES]
        return max(ratios) if max(ratios) > _CLEARLY else sum(ratios) / len(ratios)


def _trial(recipe: Recipe, topology: Topology, size: int, limit: float = math.inf) -> _Trial:
    """Order the recipe's steps and simulate it by all rules, unless the first one shows that it is not worth while."""
    ordered = in_simulated_order(recipe, topology, size)
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


def _least(topology: Topology, size: int) -> List[Tuple[float, Recipe]]:
    """Each candidate with what its busiest resource needs: quick to work out, and never more than the time."""
    return [((starts + size * per_byte).max(), recipe) for starts, per_byte, recipe in _loads(topology)]


@lru_cache(maxsize=64)
def _loads(topology: Topology) -> List[Tuple[Any, Any, Recipe]]:
    """For each candidate: seconds of copies' starts on each sender's stream, seconds per byte on each resource."""
    servers, use = occupancy(topology)

    @lru_cache(maxsize=None)
    def load(half: ReduceHalf) -> Tuple[Any, Any]:
        starts, per_byte = np.zeros(len(servers)), np.zeros(len(servers))
        for srcs, dst in half:
            for src in srcs:
                for way in ((src, dst), (dst, src)):
                    starts[use[way][0][0]] += topology.speeds.copy_latency
                    for server, seconds in use[way]:
                        per_byte[server] += seconds
        return starts, per_byte

    found = []
    for recipe in _candidates(topology):
        parts = [load(half) for half in recipe.halves]
        starts = np.sum([starts for starts, _ in parts], axis=0)
        found.append((starts, np.dot(recipe.fractions, [per_byte for _, per_byte in parts]), recipe))
    return found


def in_simulated_order(recipe: Recipe, topology: Topology, size: int) -> Recipe:
    """The recipe with its steps in the order in which they start when each copy goes as soon as it can."""
    plan = recipe.plan()
    place: Dict[int, int] = defaultdict(int)
    turns = []
    for number, step in enumerate(plan.steps):
        turns.append((place[step.chunk], step.chunk, number))
        place[step.chunk] += 1
    even = [number for *_, number in sorted(turns)]  # all chunks' first steps, all chunks' second steps, …
    interleaved = Recipe(recipe.algorithm, recipe.devices, recipe.fractions, recipe.halves, tuple(even))
    starts = simulate(interleaved.plan(), topology, recipe.shares(size)).starts
    order = [even[i] for i in sorted(range(len(even)), key=lambda i: (starts[i], i))]
    return Recipe(recipe.algorithm, recipe.devices, recipe.fractions, recipe.halves, tuple(order))


# ---- candidates -------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _candidates(topology: Topology) -> Tuple[Recipe, ...]:
    """Recipes made from this machine's links, from one chunk to many."""
    if len(topology) == 1:
        return ()
    found = [
        *_exchanges(topology),
        *_hierarchical(topology),
        *_group_rings(topology),
        *_rings(topology),
        *_paths(topology),
        *_packed(topology),
    ]
    return tuple(dict.fromkeys(found))


def _even(algorithm: str, devices: int, halves: Sequence[ReduceHalf]) -> Recipe:
    return Recipe(algorithm, devices, (1 / len(halves),) * len(halves), tuple(halves))


def _baselines(topology: Topology) -> Iterator[Recipe]:
    """The algorithms that know only the number of devices, with 1, K/2, K, 2K chunks."""
    count = len(topology)
    halves = algorithms.two_groups(count)
    for chunks in sorted({1, (count + 1) // 2, count, 2 * count}):
        turns = range(chunks)
        yield _even("two-group", count, [algorithms.hierarchical_half(count, turn, halves) for turn in turns])
        yield _even("tree", count, [algorithms.tree_half(count, turn) for turn in turns])
        yield _even("flat", count, [algorithms.flat_half(count, turn) for turn in turns])


def _exchanges(topology: Topology) -> Iterator[Recipe]:
    """Every device adds up its own share of the bytes, and hands it out: reduce-scatter and all-gather, directly.

    The devices send to their neighbours on the ring first, then to the next ones, so that no two meet at a receiver.
    """
    count, tour = len(topology), ring(topology)
    places = range(count)
    for rounds in (1, 2, 4):
        yield _even(
            "exchange",
            count,
            [
                tuple(((tour[(place + shift) % count],), tour[place]) for shift in range(1, count))
                for _ in range(rounds)
                for place in places
            ],
        )


def _hierarchical(topology: Topology) -> Iterator[Recipe]:
    """Groups and partners found from the links; each reduction at once, or source by source in turn."""
    count = len(topology)
    for parts in range(2, count // 2 + 1):
        if parts > 2 and count % parts:
            continue
        found = groups(topology, parts)
        longest = max(map(len, found))
        for chunks in (1, longest, 2 * longest, 4 * longest):
            halves = [_grouped_half(found, turn) for turn in range(chunks)]
            yield _even("hierarchical", count, halves)
            yield _even("hierarchical", count, [_source_by_source(half) for half in halves])


def _group_rings(topology: Topology) -> Iterator[Recipe]:
    """Groups add up inside; then each member in turn goes around the other groups' members of its place.

    As a ring, but the links inside groups (bridges, switches) carry each byte only once up and once down.
    """
    count = len(topology)
    for parts in range(3, count // 2 + 1):
        if count % parts:
            continue
        found = groups(topology, parts)
        members = range(len(found[0]))
        for starts in _slow_starts(topology, [group[0] for group in found]):
            ways = [[found[(start + i) % parts] for i in range(parts)] for start in starts]
            rounds = 1
            while rounds * len(ways) * len(members) <= _MOST_CHUNKS * count // 2:
                halves = []
                for number in range(rounds):
                    turned = ways if number % 2 else [way[::-1] for way in ways]
                    halves += [_group_path(way, member) for way in turned for member in members]
                yield _even("hierarchical", count, halves)
                rounds *= 2


def _slow_starts(topology: Topology, tour: Sequence[int]) -> Iterator[List[int]]:
    """Places at which to cut a ring: everywhere, and only at edges at least as long as each of its lengths."""
    far = distances(topology)
    length = [round(float(far[tour[place - 1], tour[place]]) / far.max(), 3) for place in range(len(tour))]
    for least in sorted(set(length)):
        yield [place for place in range(len(tour)) if length[place] >= least]


def _group_path(way: Sequence[Tuple[int, ...]], member: int) -> ReduceHalf:
    mains = [group[member] for group in way]
    return _source_by_source(algorithms.reduce_inside(tuple(way), mains)) + _along(mains)


def _grouped_half(found: Groups, turn: int) -> ReduceHalf:
    """As :func:`.algorithms.hierarchical_half`, with partners as mains and the sum at the turn's own group."""
    mains = [group[turn % len(group)] for group in found]
    first = turn // len(found[0]) % len(found)
    return algorithms.reduce_inside(found, mains) + algorithms.reduce_across(mains[first + 1 :] + mains[: first + 1])


def _source_by_source(half: ReduceHalf) -> ReduceHalf:
    """One hop for each source: more launches, but a sum starts with the first arrival."""
    return tuple(((src,), dst) for srcs, dst in half for src in sorted(srcs, key=lambda src: (src < dst, src)))


def _rings(topology: Topology) -> Iterator[Recipe]:
    """Paths around a ring, one for each edge left out, in both directions: links between neighbours are always busy.

    Where some links of the ring are slow, only paths that leave out a slow one are used.
    """
    count, tour = len(topology), ring(topology)
    for starts in _slow_starts(topology, tour):
        paths = [[tour[(start + i) % count] for i in range(count)] for start in starts]
        rounds = 1
        while rounds * len(paths) <= _MOST_CHUNKS * count:
            halves = []
            for number in range(rounds):
                halves += [_along(path if number % 2 else path[::-1]) for path in paths]
            yield _even("ring", count, halves)
            rounds *= 2


def _along(path: Sequence[int]) -> ReduceHalf:
    return tuple(((src,), dst) for src, dst in zip(path, path[1:]))


def _paths(topology: Topology) -> Iterator[Recipe]:
    """Paths of several rings with the shares that the links allow, where links are not alike."""
    packing = pack_paths(topology)
    for chunks in _chunk_counts(packing):
        yield packed_trees(len(topology), packing, chunks, ends, "packed_paths")


def _packed(topology: Topology) -> Iterator[Recipe]:
    """The best packing of spanning trees, each tree's share cut into sub-chunks that start from its middle."""
    packing = pack(topology)
    for chunks in _chunk_counts(packing):
        yield packed_trees(len(topology), packing, chunks)


def _chunk_counts(packing: Packing) -> List[int]:
    devices = len(packing.trees[0]) + 1
    counts = [len(packing.trees) * rounds for rounds in (1, 2, 4, 8, 16)]
    return [count for count in counts if count <= max(counts[0], _MOST_CHUNKS * devices)]


def packed_trees(
    devices: int,
    packing: Packing,
    chunks: int,
    roots: Callable[[Tree], Tuple[int, ...]] = centers,
    name: str = "packed_trees",
) -> Recipe:
    """About ``chunks`` chunks of like size: each tree gets as many as its share, the first of all trees first."""
    pieces: List[Tuple[float, float, ReduceHalf]] = []
    for tree, share in zip(packing.trees, packing.shares):
        parts = max(1, round(share * chunks))
        halves = [rooted_half(tree, root) for root in roots(tree)]
        pieces += [((part + 0.5) / parts, share / parts, halves[part % len(halves)]) for part in range(parts)]
    pieces.sort(key=lambda piece: piece[0])
    return Recipe(name, devices, tuple(share for _, share, _ in pieces), tuple(half for *_, half in pieces))


def timing(choice: Choice, topology: Topology) -> Timing:
    """The simulated run of a choice: its timeline and the bytes on each link."""
    return simulate(verify(choice.recipe.plan()), topology, choice.recipe.sizes(choice.size))
