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
from typing import Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

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

# of the search for schedules of two algorithms: more of either has not paid (docs/cost-model.md)
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
    found = []
    for used in sorted({0, lanes}):
        found += _searched(_prepared(topology, algorithm, used), topology, size, backward)
    if not found:
        raise HierAllreduceError(
            f"algorithm={algorithm!r} makes no plan for {count(len(topology), 'device')}; 'auto' does"
        )
    return min(found, key=lambda prediction: prediction.seconds)


def _searched(
    prepared: Sequence[_Prepared], topology: Topology, size: int, backward: BackwardPass, mixed: bool = True
) -> List[Prediction]:
    """Return the best plan in one bucket, and with a backward pass the best one in several buckets."""
    searches = []
    if prepared:
        searches.append(_Search(prepared, topology, size, backward))
        searches[0].one_bucket()
    # a bucket of several is never cut into more chunks than there are devices: that has not paid on any machine
    few = [each for each in prepared if each.candidate.chunks <= len(topology)]
    if few and backward.seconds:
        searches.append(_Search(few, topology, size, backward))
        searches[1].buckets(mixed)
    return [search.best for search in searches if search.best]


def alternatives(chosen: Prediction, most: int = 3) -> List[Prediction]:
    """Return the best plans of single algorithms other than the chosen one's, without lanes: the nearest first."""
    left = [each for each in _prepared(chosen.topology, None, 0) if each.candidate.algorithm != chosen.plan.algorithm]
    found: List[Prediction] = []
    while left and len(found) < most:
        best = min(
            _searched(left, chosen.topology, chosen.size, chosen.backward, mixed=False), key=lambda each: each.seconds
        )
        found.append(best)
        left = [each for each in left if each.candidate.algorithm != best.plan.algorithm]
    return found


@lru_cache(maxsize=64)
def _prepared(topology: Topology, algorithm: Union[str, Algorithm, None], lanes: int) -> Tuple[_Prepared, ...]:
    towers, machine = len(topology), with_lanes(topology, lanes)
    prepared = []
    for candidate in candidates(topology, algorithm, lanes):
        added = operands(Plan(len(machine), candidate.chunks, candidate.steps, lanes=lanes))
        work = work_of(len(machine), towers, candidate.steps, added)
        prepared.append(_Prepared(candidate, work, need_of(candidate.steps, candidate.chunks, machine, towers)))
    return tuple(prepared)


class _Schedule(NamedTuple):
    """Buckets with these shares of the bytes; the ``last`` ones have another algorithm than the early ones."""

    early: int  # number of a candidate
    late: int
    shares: Tuple[float, ...]
    last: int

    @property
    def candidates(self) -> List[int]:
        """The number of each bucket's candidate."""
        return [self.early] * (len(self.shares) - self.last) + [self.late] * self.last


_Bounded = Tuple[Tuple[float, ...], _Schedule]  # with what it needs at least: Prediction.needs


class _Search:
    """A search among candidates of one machine with the same lanes; ``best`` is the best plan so far."""

    def __init__(self, prepared: Sequence[_Prepared], topology: Topology, size: int, backward: BackwardPass):
        self._prepared, self._topology, self._size, self._backward = prepared, topology, size, backward
        self._needs = Needs([each.need for each in prepared], topology.speeds.dispatch)
        self.best: Optional[Prediction] = None

    def one_bucket(self) -> None:
        """Find the best plan with all bytes in one bucket."""
        self._fastest(self._uniform([(1.0,)]))

    def buckets(self, mixed: bool = True) -> None:
        """Find the best plan with several buckets: of one algorithm, then with another one for the last buckets."""
        uniform = self._fastest(self._uniform(bucketings()))
        if not mixed or uniform is None:
            return
        few_hops = self._mixed(self._needs.fewest_levels(), [uniform[1].late], bucketings())
        for found in (uniform, self._fastest(few_hops, most=_TRIED)):
            for _ in range(_ROUNDS):
                if found is not None:
                    found = self._fastest(self._neighbours(found[1]), found[0], _TRIED)

    def _uniform(self, divisions: Iterable[Tuple[float, ...]]) -> Iterator[_Bounded]:
        for shares in divisions:
            bounds = self._needs.single(self._size, shares, self._backward)
            for number in range(len(self._prepared)):
                yield tuple(bounds[:, number].tolist()), _Schedule(number, number, shares, 0)

    def _neighbours(self, schedule: _Schedule) -> Iterator[_Bounded]:
        """Yield schedules that differ in the early algorithm, the late one, or the buckets."""
        early, late, shares, _ = schedule
        every = range(len(self._prepared))
        yield from self._mixed(every, [late], [shares])
        yield from self._mixed([early], every, [shares])
        yield from self._mixed([early], [late], bucketings())

    def _mixed(
        self, early: Sequence[int], late: Sequence[int], divisions: Iterable[Tuple[float, ...]]
    ) -> Iterator[_Bounded]:
        """Yield schedules of an early and a late algorithm."""
        for shares in divisions:
            for last in _lasts(shares):
                bounds = self._needs.mixed(self._size, shares, self._backward, last, list(early), list(late))
                for row, one in enumerate(early):
                    for column, other in enumerate(late):
                        yield tuple(bounds[:, row, column].tolist()), _Schedule(one, other, shares, last)

    def _fastest(
        self, trials: Iterable[_Bounded], limit: float = math.inf, most: Optional[int] = None
    ) -> Optional[Tuple[float, _Schedule]]:
        """Simulate schedules in the order of what they need at least, until no other one can be faster.

        Args:
            trials: schedules.
            limit: seconds that the fastest has to stay below.
            most: the number of schedules that are simulated at most.

        Returns:
            the fastest one with its seconds; None if all take longer. ``best`` is updated.
        """
        fastest = None
        for needs, schedule in sorted(trials, key=lambda trial: max(trial[0]))[:most]:
            if max(needs) >= limit:
                break
            prediction = self._simulated(schedule, limit)
            if prediction and prediction.seconds < limit:
                limit = prediction.seconds
                fastest = limit, schedule
                if self.best is None or limit < self.best.seconds:
                    self.best = replace(prediction, needs=needs)
        return fastest

    def _simulated(self, schedule: _Schedule, patience: float) -> Optional[Prediction]:
        """Return the plan of a schedule, in the order in which its steps begin; None if it takes too long."""
        buckets = [self._prepared[number] for number in schedule.candidates]
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
