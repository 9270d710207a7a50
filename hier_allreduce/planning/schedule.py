"""How a whole backward pass is reduced: in how many buckets, each by which recipe.

::

    backward pass   ═══════════════════════╗        the host is `backlog` seconds ahead of the towers' kernels
    bucket 0             ▔▔▔▔▔▔            ║
    bucket 1                    ▔▔▔▔▔▔     ║
    bucket 2                           ▔▔▔▔║▔▔     exposed: what is left after the last gradient

The plan that is fastest on an idle machine need not be best here. Each copy into a tower, and each sum on one, waits
for the kernels that are queued there. So plans with few hops leave less exposed, and those that form sums on lanes, and
go into a tower only once, leave least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Dict, Iterator, Optional, Tuple

from ..topology import Topology
from .cache import kept
from .kept_recipes import recipe_from_values, recipe_to_values
from .plan import Plan, in_buckets
from .planner import BASELINES, Choice, algorithms_for, bytes_class, choose, ordered
from .recipes import Recipe
from .simulator import TRAINING, Backward, Simulation, host_seconds, lower_bound, predicted_seconds

_BUCKETS = (1, 2, 4, 8, 16)
_LEAST_BYTES = 8_000_000  # of a bucket, where there are several


@dataclass(frozen=True)
class Schedule:
    """Equal buckets, the first for the gradients that are ready first, each reduced by ``recipe``.

    ``seconds`` is predicted: what is exposed after the backward pass, or all of it on an idle machine.
    """

    buckets: int
    recipe: Recipe
    seconds: float

    def plan(self) -> Plan:
        """Return the plan of all buckets."""
        one = self.recipe.plan()
        return in_buckets(one, [one] * self.buckets)

    def sizes(self, size: int) -> Tuple[int, ...]:
        """Return the bytes of each chunk, of ``size`` bytes in all."""
        cuts = [round(size * bucket / self.buckets) for bucket in range(self.buckets + 1)]
        return sum((self.recipe.sizes(end - start) for start, end in zip(cuts, cuts[1:])), ())


@dataclass(frozen=True)
class TrainingChoice(Choice):
    """The schedule for ``size`` bytes of gradients, with what :class:`.Choice` says of an idle machine.

    Attributes:
        schedule: the buckets and their recipe, which is ``recipe``.
        backward: the backward pass for which it was chosen.
        exposed: the seconds that are left after that pass.
    """

    schedule: Schedule
    backward: Backward
    exposed: float

    def plan(self) -> Plan:
        """Return the plan of all buckets."""
        return self.schedule.plan()

    def sizes(self) -> Tuple[int, ...]:
        """Return the bytes of each chunk of all buckets."""
        return self.schedule.sizes(self.size)


def choose_for_training(
    topology: Topology, size: int, algorithm: Optional[str] = None, lanes: int = 0, backward: Backward = TRAINING
) -> TrainingChoice:
    """Return the schedule that leaves least exposed, with its time on an idle machine and what it was compared with.

    Args and raises: as :func:`choose_schedule`.
    """
    schedule = choose_schedule(topology, size, algorithm, lanes, backward)
    return TrainingChoice(
        schedule.recipe,
        size,
        predicted_seconds(schedule.plan(), topology, schedule.sizes(size)),
        lower_bound(topology, size, lanes=schedule.recipe.lanes.count),
        schedule=schedule,
        backward=backward,
        exposed=schedule.seconds,
    )


def one_bucket(choice: TrainingChoice, topology: Topology) -> Choice:
    """Return the choice for one of the buckets alone, on an idle machine."""
    size = choice.size // choice.schedule.buckets
    seconds = predicted_seconds(choice.recipe.plan(), topology, choice.recipe.sizes(size))
    share = choice.bound / choice.schedule.buckets
    return Choice(choice.recipe, size, seconds, share)


def exposed_by_algorithm(choice: TrainingChoice, topology: Topology) -> Dict[str, float]:
    """Return the seconds that every algorithm, without lanes, leaves exposed in as many buckets."""
    buckets = choice.schedule.buckets
    recipes = {name: choose(topology, choice.size // buckets, name).recipe for name in algorithms_for(topology)}
    return {
        name: exposed_seconds(Schedule(buckets, recipe, 0.0), topology, choice.size, choice.backward)
        for name, recipe in recipes.items()
    }


def choose_schedule(
    topology: Topology, size: int, algorithm: Optional[str] = None, lanes: int = 0, backward: Backward = TRAINING
) -> Schedule:
    """Return the schedule that leaves least exposed after a backward pass; without a backlog, the fastest plan.

    Args:
        topology: the machine.
        size: bytes of all gradients.
        algorithm: one of the planner's, or None for the best.
        lanes: L, the lanes of each GPU.
        backward: the backward pass.

    Raises:
        StrategyError: as :func:`.choose`.
    """
    if not backward.backlog or len(topology) == 1:
        choice = choose(topology, size, algorithm, lanes)
        return Schedule(1, choice.recipe, choice.seconds)
    schedule = _best_schedule(topology, bytes_class(size), algorithm, lanes, backward)
    return replace(schedule, seconds=exposed_seconds(schedule, topology, size, backward))


def exposed_seconds(
    schedule: Schedule, topology: Topology, size: int, backward: Backward, patience: float = math.inf
) -> float:
    """Return the seconds that an all-reduce goes on after the end of the backward pass, infinite above ``patience``."""
    patience += backward.seconds
    run = Simulation(schedule.plan(), topology, schedule.sizes(size), patience=patience, backward=backward).run()
    return run.seconds - backward.seconds


def _to_values(schedule: Schedule) -> Dict[str, Any]:
    return {**vars(schedule), "recipe": recipe_to_values(schedule.recipe)}


def _from_values(values: Dict[str, Any], topology: Topology) -> Schedule:
    buckets, seconds = int(values["buckets"]), float(values["seconds"])
    if buckets not in _BUCKETS:
        raise ValueError("not a number of buckets")
    return Schedule(buckets, recipe_from_values(values["recipe"], topology), seconds)


@lru_cache(maxsize=256)
@kept(_to_values, _from_values)
def _best_schedule(topology: Topology, size: int, algorithm: Optional[str], lanes: int, backward: Backward) -> Schedule:
    counts = [buckets for buckets in _BUCKETS if buckets == 1 or size >= buckets * _LEAST_BYTES]
    candidates = [
        Schedule(buckets, recipe, math.inf)
        for buckets in counts[-2:]  # fewer leave more for after the end
        for recipe in dict.fromkeys(_recipes(topology, size // buckets, algorithm, lanes))
    ]
    quick = [each for each in candidates if host_seconds(each.plan(), topology.speeds) <= backward.seconds]
    best = candidates[0]
    for each in quick or candidates[:1]:
        seconds = exposed_seconds(each, topology, size, backward, patience=best.seconds)
        if seconds < best.seconds:
            best = replace(each, seconds=seconds)
    return best


def _recipes(topology: Topology, size: int, algorithm: Optional[str], lanes: int) -> Iterator[Recipe]:
    """Yield the recipes that may leave least exposed: fast ones, ones with few hops, and ones with an exit lane."""
    for name in (algorithm,) if algorithm else (None, *BASELINES):
        yield choose(topology, size, name).recipe
    if lanes == 1:
        yield choose(topology, size, algorithm, lanes).recipe
    if lanes > 1:
        recipe = choose(topology, size, algorithm, lanes - 1).recipe
        if recipe.lanes.count:
            with_exit = replace(recipe, order=(), lanes=replace(recipe.lanes, count=lanes, exit=True))
            yield ordered(with_exit, topology, size).recipe
