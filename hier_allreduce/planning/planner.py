"""The best plan for a machine: of all candidates in all divisions into buckets, the one that leaves least exposed.

::

    candidates × buckets ─► least seconds of each ─► simulated in that order ─► Prediction
                             (needs)                 until no other one can be faster

There is one objective: the seconds that an all-reduce goes on after the end of a backward pass. On an idle machine the
pass takes no time, and all gradients are there.

The last buckets may have another algorithm than those before. Early ones have time until the end of the pass, and want
few hops, each of which waits for the kernels that are queued; what comes after the end wants short ways for few bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

from ..errors import HierAllreduceError
from ..formatting import count
from ..topology import Topology, with_lanes
from .algorithms import Algorithm
from .bounds import exposed_bound
from .candidates import Candidate, bucketings, candidates
from .host import BackwardPass, backward_pass
from .needs import Need, Needs, need_of
from .plan import Plan, Step, operands
from .simulator import Simulation, Timing, Work, joined, predicted_seconds, simulate, work_of

# Of the search for schedules of two algorithms. 64 trials would expose 18 % less in 2 of 68 cases (17 presets, 10 to
# 400 MB), and take a third longer; 16 would expose more in 8.
_ROUNDS, _TRIED = 4, 32


@dataclass(frozen=True)
class Prediction:
    """A plan for ``size`` bytes of gradients, and what it is predicted to take.

    Attributes:
        plan: its steps, its buckets, and the share of the bytes of each chunk.
        topology: the machine.
        size: bytes.
        backward: the backward pass during which the gradients become ready.
        seconds: what the all-reduce leaves exposed after that pass; all of it on an idle machine.
        needs: seconds that are needed at least: for copies that cannot begin before the end of the pass, on the busiest
            resource; for the last bucket alone; and for the ops of the host.
        algorithms: the algorithm of each bucket.
    """

    plan: Plan
    topology: Topology
    size: int
    backward: BackwardPass
    seconds: float
    needs: Tuple[float, ...] = (0.0, 0.0, 0.0)
    algorithms: Tuple[str, ...] = ()

    @property
    def buckets(self) -> int:
        """The number of buckets."""
        return len(set(self.plan.buckets)) or 1

    @property
    def idle_seconds(self) -> float:
        """The seconds on an idle machine, with all gradients there."""
        return predicted_seconds(self.plan, self.topology, self.plan.sizes(self.size))

    @property
    def bound(self) -> float:
        """The seconds that every plan leaves exposed at least."""
        return exposed_bound(self.topology, self.size, self.backward, self.plan.lanes)

    @property
    def host_seconds(self) -> float:
        """The seconds that the host takes to dispatch all copies and sums."""
        return (2 * self.plan.copies + self.plan.sums) * self.topology.speeds.dispatch

    def timing(self) -> Timing:
        """Simulate the plan: its timeline, and the bytes on each link."""
        return simulate(self.plan, self.topology, self.plan.sizes(self.size), backward=self.backward)


class _Prepared(NamedTuple):
    """A candidate, with the work and the need of one bucket."""

    candidate: Candidate
    work: Work
    need: Need


def best_plan(
    topology: Topology,
    size: int,
    backward: Optional[BackwardPass] = None,
    algorithm: Union[str, Algorithm, None] = None,
    lanes: int = 0,
) -> Prediction:
    """Return the plan that leaves least exposed after a backward pass.

    Args:
        topology: the machine.
        size: bytes of all gradients.
        backward: the backward pass; by default the one that is assumed for so many bytes (:func:`.backward_pass`).
        algorithm: a name, or a function; None or ``"auto"`` for the best of all.
        lanes: L, the lanes of each GPU that may be used.

    Raises:
        HierAllreduceError: the algorithm makes no plan for this machine.
    """
    return _best_plan(topology, size, backward_pass(size) if backward is None else backward, algorithm, lanes)


@lru_cache(maxsize=256)
def _best_plan(
    topology: Topology, size: int, backward: BackwardPass, algorithm: Union[str, Algorithm, None], lanes: int
) -> Prediction:
    if len(topology) == 1:
        return Prediction(Plan(1, 1, (), "none", shares=(1.0,)), topology, size, backward, 0.0)
    found: List[_Found] = []
    for prepared in (_prepared(topology, algorithm, used, backward.seconds > 0) for used in sorted({0, lanes})):
        if prepared:
            found += _Search(prepared, topology, size, backward).all()
    if not found:
        raise HierAllreduceError(
            f"algorithm={algorithm!r} makes no plan for {count(len(topology), 'device')}; 'auto' does"
        )
    return min(found, key=_seconds).prediction


def alternatives(chosen: Prediction, most: int = 3) -> List[Prediction]:
    """Return the best plans of single algorithms other than the chosen one's, without lanes: the nearest first."""
    prepared = _prepared(chosen.topology, None, 0, chosen.backward.seconds > 0)
    search = _Search(prepared, chosen.topology, chosen.size, chosen.backward)
    names = {chosen.plan.algorithm}
    found: List[Prediction] = []
    while len(found) < most:
        left = [number for number, each in enumerate(prepared) if each.candidate.algorithm not in names]
        best = search.single(left) if left else None
        if best is None:
            break
        found.append(best.prediction)
        names.add(found[-1].plan.algorithm)
    return found


@lru_cache(maxsize=64)
def _prepared(
    topology: Topology, algorithm: Union[str, Algorithm, None], lanes: int, bucketed: bool
) -> Tuple[_Prepared, ...]:
    """Return the candidates; those for several buckets have at most a chunk for each device: more have not paid."""
    towers, machine = len(topology), with_lanes(topology, lanes)
    prepared = []
    for candidate in candidates(topology, algorithm, lanes):
        if bucketed and candidate.chunks > towers:
            continue
        added = operands(Plan(len(machine), candidate.chunks, candidate.steps, lanes=lanes))
        work = work_of(len(machine), towers, candidate.steps, added)
        prepared.append(_Prepared(candidate, work, need_of(candidate.steps, candidate.chunks, machine, towers)))
    return tuple(prepared)


class _Schedule(NamedTuple):
    """Buckets with these shares of the bytes, and the number of each one's candidate."""

    numbers: Tuple[int, ...]
    shares: Tuple[float, ...]


class _Found(NamedTuple):
    schedule: _Schedule
    prediction: Prediction


def _seconds(found: _Found) -> float:
    return found.prediction.seconds


_Bounded = Tuple[Tuple[float, ...], _Schedule]  # with what it needs at least: Prediction.needs


class _Search:
    """A search among candidates of one machine with the same lanes; no schedule is simulated twice."""

    def __init__(self, prepared: Sequence[_Prepared], topology: Topology, size: int, backward: BackwardPass):
        self._prepared, self._topology, self._size, self._backward = prepared, topology, size, backward
        self._needs = Needs([each.need for each in prepared], topology.speeds.dispatch)
        self._every = range(len(prepared))
        self._tried: Dict[_Schedule, Tuple[float, Optional[Prediction]]] = {}  # with the patience

    def all(self) -> List[_Found]:
        """Return the best plans: of one algorithm, and with another one for the last buckets."""
        uniform = self.single(self._every)
        if uniform is None or not self._backward.seconds:
            return [uniform] if uniform else []
        late = [uniform.schedule.numbers[-1]]
        few_hops = self._fastest(self._mixed(self._needs.fewest_levels(), late, bucketings()), most=_TRIED)
        return [self._improved(start) for start in (uniform, few_hops) if start]

    def single(self, numbers: Sequence[int]) -> Optional[_Found]:
        """Return the best plan of one of these candidates: with a backward pass in buckets."""
        return self._fastest(self._uniform(numbers, bucketings() if self._backward.seconds else [(1.0,)]))

    def _improved(self, found: _Found) -> _Found:
        """Return the best plan that changes of one kind at a time lead to."""
        for _ in range(_ROUNDS):
            better = self._fastest(self._neighbours(found.schedule), _seconds(found), _TRIED)
            if better is None:
                break
            found = better
        return found

    def _uniform(self, numbers: Sequence[int], divisions: Iterable[Tuple[float, ...]]) -> Iterator[_Bounded]:
        for shares in divisions:
            bounds = self._needs.single(numbers, self._size, shares, self._backward)
            for column, number in enumerate(numbers):
                yield tuple(bounds[:, column].tolist()), _Schedule((number,) * len(shares), shares)

    def _neighbours(self, schedule: _Schedule) -> Iterator[_Bounded]:
        """Yield schedules that differ in the early algorithm, the late one, or the buckets."""
        early, late = [schedule.numbers[0]], [schedule.numbers[-1]]
        yield from self._mixed(self._every, late, [schedule.shares])
        yield from self._mixed(early, self._every, [schedule.shares])
        yield from self._mixed(early, late, bucketings())

    def _mixed(
        self, early: Sequence[int], late: Sequence[int], divisions: Iterable[Tuple[float, ...]]
    ) -> Iterator[_Bounded]:
        """Yield schedules of an early and a late algorithm."""
        for shares in divisions:
            for last in _lasts(shares):
                bounds = self._needs.mixed(self._size, shares, self._backward, last, early, late)
                for row, one in enumerate(early):
                    for column, other in enumerate(late):
                        numbers = (one,) * (len(shares) - last) + (other,) * last
                        yield tuple(bounds[:, row, column].tolist()), _Schedule(numbers, shares)

    def _fastest(
        self, trials: Iterable[_Bounded], limit: float = math.inf, most: Optional[int] = None
    ) -> Optional[_Found]:
        """Simulate schedules in the order of what they need at least, until no other one can be faster.

        Args:
            trials: schedules.
            limit: seconds that the fastest has to stay below.
            most: the number of schedules that are simulated at most.

        Returns:
            the fastest one; None if all take longer.
        """
        fastest = None
        for needs, schedule in sorted(trials, key=lambda trial: max(trial[0]))[:most]:
            if max(needs) >= limit:
                break
            patience, prediction = self._tried.get(schedule, (0.0, None))
            if prediction is None and patience < limit:
                prediction = self._simulated(schedule, limit)
                self._tried[schedule] = limit, prediction
            if prediction and prediction.seconds < limit:
                limit = prediction.seconds
                fastest = _Found(schedule, replace(prediction, needs=needs))
        return fastest

    def _simulated(self, schedule: _Schedule, patience: float) -> Optional[Prediction]:
        """Return the plan of a schedule, in the order in which its steps begin; None if it takes too long."""
        buckets = [self._prepared[number] for number in schedule.numbers]
        counts = [each.candidate.chunks for each in buckets]
        shares = [share / count for share, count in zip(schedule.shares, counts) for _ in range(count)]
        numbers = [number for number, count in enumerate(counts) for _ in range(count)]
        run = Simulation(
            joined([each.work for each in buckets]),
            self._topology,
            [share * self._size for share in shares],
            numbers,
            self._backward,
            patience=patience + self._backward.seconds,
        ).run()
        if run.seconds == math.inf:
            return None
        plan = _in_order(run, buckets, len(self._topology), numbers, shares)
        seconds = predicted_seconds(plan, self._topology, plan.sizes(self._size), self._backward)
        names = tuple(each.candidate.algorithm for each in buckets)
        return Prediction(plan, self._topology, self._size, self._backward, seconds, algorithms=names)


def _lasts(shares: Sequence[float]) -> List[int]:
    """Return the numbers of last buckets that may have another algorithm."""
    count = len(shares)
    return sorted({1, 2, 3, count // 4, count // 2} & set(range(1, count)))


def _in_order(
    run: Simulation, buckets: Sequence[_Prepared], towers: int, numbers: Sequence[int], shares: Sequence[float]
) -> Plan:
    """Return the plan of a run: its steps in the order in which they began."""
    steps: List[Step] = []
    chunks = 0
    for each in buckets:
        steps += [step._replace(chunk=step.chunk + chunks) for step in each.candidate.steps]
        chunks += each.candidate.chunks
    starts, lanes = run.starts(), buckets[0].candidate.lanes
    in_order = tuple(steps[number] for number in sorted(range(len(steps)), key=starts.__getitem__))
    names = ", ".join(dict.fromkeys(each.candidate.algorithm for each in buckets))
    return Plan(towers * (1 + lanes), chunks, in_order, names, lanes, tuple(numbers), tuple(shares))
