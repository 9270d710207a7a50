"""Which copies wait for each other: the ports, uplinks and buses of a machine, found by copying several ways at once.

::

    patterns of copies at once ─► pairs of copies that are not slowed clear each other
              │                   the others are tried two at a time
              ▼
    conflicts: a graph of pairs that slow each other ─► cliques ─► a way that all of a clique share
              │
              ▼
    patterns that are still slower than predicted ─► the fewest copies that are ─► a way that three or more fill

No device is asked what it is connected to. Predictions are the simulator's, on a machine with the measured links and
the ways found so far.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, permutations
from typing import Callable, Dict, FrozenSet, Iterable, Iterator, List, Mapping, NamedTuple, Sequence, Set, Tuple

import numpy as np
from scipy.optimize import brentq

from ..planning import Copy, Plan, simulate
from ..topology import Topology, flat_host
from .timer import Pair, Timer, Transfer

TOGETHER = 4e-3  # seconds that each copy takes alone, when several are tried
_SLOWER = 1.12  # times as long as predicted: more than noise
_GAIN = 2  # pairs that a pattern must clear to be worth its run: trying two copies decides one pair
_MOST_PATTERNS = 600
_BASES = 12  # sets of known members that are considered to try another pair with
_FITS = 8  # pairs of copies that decide a way's speed


class Way(NamedTuple):
    """What ``pairs`` of devices share: ``speed`` in bytes/s."""

    pairs: FrozenSet[Pair]
    speed: float


class Found(NamedTuple):
    """The ways, and how long patterns took, divided by the prediction with these ways."""

    ways: Tuple[Way, ...]
    ratios: Tuple[float, ...]


class Machine(NamedTuple):
    """What predictions rest on: the number of ``devices``, bytes/s of each pair, and seconds until bytes move.

    Copies that are tried together have so many bytes that each takes ``seconds`` alone.
    """

    devices: int
    links: Mapping[Pair, float]
    start: float
    seconds: float = TOGETHER


def ways_of(topology: Topology) -> Dict[FrozenSet[Pair], float]:
    """Return bytes/s of what a machine's copies share, by pairs: only what several senders together can fill."""
    pairs: Dict[str, Set[Pair]] = {}
    for link in topology.links:
        for name in link.through:
            pairs.setdefault(name, set()).add((link.src, link.dst))
    ways: Dict[FrozenSet[Pair], float] = {}
    for name, speed in topology.shared:
        fastest: Dict[int, float] = {}
        for src, dst in pairs[name]:
            fastest[src] = max(topology.link(src, dst).bandwidth, fastest.get(src, 0.0))
        # two exact halves of a speed add up to it, or to a little more
        if len(fastest) > 1 and sum(fastest.values()) > speed * 1.001:
            members = frozenset(pairs[name])
            ways[members] = min(speed, ways.get(members, speed))
    return ways


_host = lru_cache(maxsize=8)(flat_host)


def predicted(machine: Machine, transfers: Sequence[Transfer], ways: Iterable[Way]) -> List[float]:
    """Return the end of each copy in seconds, if all begin at once and the ways are shared evenly."""
    used = {(transfer.src, transfer.dst) for transfer in transfers}
    host = _host(machine.devices)
    names = {f"way {number}": way for number, way in enumerate(ways)}
    links = tuple(
        replace(
            host.link(*pair),
            bandwidth=machine.links[pair],
            latency=machine.start,
            through=tuple(name for name, way in names.items() if pair in way.pairs),
        )
        for pair in sorted(used)
    )
    topology: Topology = replace(
        host,
        links=links,
        shared=tuple((name, way.speed) for name, way in names.items()),
        speeds=replace(host.speeds, copy_latency=machine.start, dispatch=0.0),
    )
    plan = Plan(machine.devices, len(transfers), tuple(Copy(n, t.src, t.dst) for n, t in enumerate(transfers)))
    timing = simulate(plan, topology, [transfer.size for transfer in transfers], ordered=False)
    ends = {span.step: span.end for span in timing.spans}
    return [ends[number] for number in range(len(transfers))]


class Search:
    """Finds the ways that copies share.

    Args:
        timer: runs the copies.
        machine: the links, measured one at a time.
        rounds: runs of each set of copies, of which the median counts.
        tick: called after each run.
    """

    def __init__(self, timer: Timer, machine: Machine, rounds: int, tick: Callable[[], None]):
        self.timer, self.machine, self.rounds, self.tick = timer, machine, rounds, tick
        self.ways: List[Way] = []
        self._measured: Dict[FrozenSet[Pair], Dict[Pair, float]] = {}

    def find(self) -> Found:
        """Return the ways, and how far predictions with them are from what was measured."""
        if self.timer.devices < 3:
            return Found((), ())  # two copies need two senders, and then each has its own direction
        patterns = self._clear_and_try()
        for pattern in patterns:
            self._explain(pattern)
        ratios = [max(self._ratios(pattern).values()) for pattern in patterns]
        return Found(tuple(self.ways), tuple(ratios))

    # ---- measured and predicted ------------------------------------------------------------------------

    def transfers(self, pairs: Iterable[Pair]) -> List[Transfer]:
        """Return copies that take equally long alone."""
        return [Transfer(*pair, int(self.machine.links[pair] * self.machine.seconds)) for pair in sorted(pairs)]

    def measured(self, pairs: Iterable[Pair]) -> Dict[Pair, float]:
        """Return the end of each copy in seconds, all begun at once; measured when first asked for."""
        key = frozenset(pairs)
        if key not in self._measured:
            transfers = self.transfers(key)
            runs = []
            for _ in range(self.rounds):
                runs.append(self.timer.together(transfers))
                self.tick()
            self._measured[key] = dict(zip(sorted(key), np.median(runs, axis=0).tolist()))
        return self._measured[key]

    def _ratios(self, pairs: Iterable[Pair]) -> Dict[Pair, float]:
        """Return measured over predicted ends."""
        measured = self.measured(pairs)
        return dict(zip(sorted(measured), _ratio(measured, self._expected(measured, ()))))

    def _expected(self, pairs: Iterable[Pair], more: Sequence[Way]) -> Dict[Pair, float]:
        """Return the predicted end of each copy in seconds, with the ways found so far and ``more``."""
        return dict(zip(sorted(pairs), predicted(self.machine, self.transfers(pairs), [*self.ways, *more])))

    def _slow(self, pairs: Iterable[Pair]) -> Set[Pair]:
        return {pair for pair, ratio in self._ratios(pairs).items() if ratio > _SLOWER}

    def _speed(self, pairs: Iterable[Pair], members: Iterable[Pair], probe: Pair) -> float:
        """Return the speed of a way of ``members`` that makes the prediction of ``probe`` what was measured."""
        pairs, members = sorted(pairs), frozenset(members)
        total, seconds = sum(self.machine.links[pair] for pair in pairs), self.measured(pairs)[probe]

        def late(speed: float) -> float:
            return self._expected(pairs, [Way(members, speed)])[probe] - seconds

        low, high = total / 100, total * 2
        return float(brentq(late, low, high, rtol=1e-3)) if late(low) > 0 > late(high) else total

    # ---- ways that two copies fill ---------------------------------------------------------------------

    def _clear_and_try(self) -> List[FrozenSet[Pair]]:
        """Find the ways that two copies fill; return the patterns that were run."""
        unknown = {frozenset(two) for two in combinations(sorted(self.machine.links), 2) if two[0][0] != two[1][0]}
        patterns, fruitless = [], 0
        for pattern in _patterns(self.timer.devices):
            slow = self._slow(pattern)
            cleared = {frozenset((p, q)) for p in pattern - slow for q in pattern if p != q} & unknown
            unknown -= cleared
            patterns.append(pattern)
            fruitless = fruitless + 1 if len(cleared) < _GAIN else 0
            if not unknown or (fruitless > self.timer.devices and len(patterns) > 4 * self.timer.devices):
                break
        conflicts = {two for two in sorted(unknown, key=sorted) if self._slow(two)}
        found = []
        for members, own in cliques(conflicts):
            speeds = [self._speed(two, two, max(two, key=self.measured(two).__getitem__)) for two in own[:_FITS]]
            found.append(Way(members, float(np.median(speeds))))
        self.ways = found
        return patterns

    # ---- ways that take more copies to fill ------------------------------------------------------------

    def _explain(self, pattern: FrozenSet[Pair]) -> None:
        """Add ways until the pattern takes no longer than predicted, or nothing more is found."""
        for _ in range(self.timer.devices):
            ratios = self._ratios(pattern)
            probe = max(ratios, key=lambda pair: (ratios[pair], pair))
            if ratios[probe] <= _SLOWER:
                return
            fewest = self._fewest(pattern, probe)
            if len(fewest) < 2:
                return
            speed = self._speed(fewest, fewest, probe)
            self.ways.append(Way(self._members(fewest, speed), speed))

    def _fewest(self, pattern: FrozenSet[Pair], probe: Pair) -> FrozenSet[Pair]:
        """Return as few copies as possible of a pattern among which the probe is slow."""
        kept = set(pattern)
        slow = self._slow(pattern)
        for pair in sorted(pattern - {probe}, key=lambda pair: (pair in slow, pair)):
            if probe in self._slow(kept - {pair}):
                kept.discard(pair)
        return frozenset(kept)

    def _members(self, fewest: FrozenSet[Pair], speed: float) -> FrozenSet[Pair]:
        """Return all pairs on the way that a few copies fill, decided by copying them together with known members."""
        members, undecided = set(fewest), sorted(self.machine.links.keys() - fewest)
        draw = random.Random(0)
        while True:
            left = [pair for pair in undecided if not self._decide(pair, fewest, members, speed, draw)]
            if len(left) == len(undecided):
                return frozenset(members)
            undecided = left

    def _decide(
        self, pair: Pair, fewest: FrozenSet[Pair], members: Set[Pair], speed: float, draw: random.Random
    ) -> bool:
        """Return whether a set of copies tells if a pair is on the way; if it is, add it to ``members``."""
        bases = [{other for other in fewest if other[0] != pair[0]}]
        bases += [_one_for_each_end(draw.sample(sorted(members), len(members)), pair) for _ in range(_BASES)]
        for base in bases:
            pairs = base | {pair}
            without, with_pair = ([Way(frozenset(own), speed)] for own in (members - {pair}, members | {pair}))
            if not base or max(_ratio(self._expected(pairs, with_pair), self._expected(pairs, without))) < _SLOWER:
                continue
            if self._off(pairs, with_pair) < self._off(pairs, without):
                members.add(pair)
            return True
        return False

    def _off(self, pairs: Iterable[Pair], more: Sequence[Way]) -> float:
        """Return how far a prediction is from what was measured."""
        measured = self.measured(pairs)
        return sum(abs(math.log(ratio)) for ratio in _ratio(measured, self._expected(measured, more)))


def _ratio(seconds: Mapping[Pair, float], others: Mapping[Pair, float]) -> List[float]:
    return [seconds[pair] / others[pair] for pair in sorted(seconds)]


def _one_for_each_end(pairs: Sequence[Pair], *taken: Pair) -> Set[Pair]:
    """Return those of the pairs, in their order, that have another sender and receiver than all before."""
    senders, receivers = {src for src, _ in taken}, {dst for _, dst in taken}
    chosen = set()
    for src, dst in pairs:
        if src not in senders and dst not in receivers:
            chosen.add((src, dst))
            senders.add(src)
            receivers.add(dst)
    return chosen


def _patterns(devices: int) -> Iterator[FrozenSet[Pair]]:
    """Yield sets of copies from different senders: to one receiver, to the next ones in a ring, to random others."""
    everyone = range(devices)
    for receiver in everyone:
        yield frozenset((device, receiver) for device in everyone if device != receiver)
    for shift in range(1, devices):
        yield frozenset((device, (device + shift) % devices) for device in everyone)
    draw = random.Random(0)
    for _ in range(_MOST_PATTERNS):
        receivers = draw.sample(everyone, devices)
        pattern = frozenset((device, receiver) for device, receiver in zip(everyone, receivers) if device != receiver)
        if len(pattern) > 1:
            yield pattern


Two = FrozenSet[Pair]


def cliques(conflicts: Set[Two]) -> List[Tuple[FrozenSet[Pair], List[Two]]]:
    """Return sets of pairs of devices whose copies all slow each other, and for each set conflicts that only it has.

    Copies of one sender never meet, so they count as if they slowed each other. A conflict whose common neighbours are
    a clique belongs to that clique only; what remains is covered greedily.
    """
    neighbours: Dict[Pair, Set[Pair]] = {}
    for two in conflicts:
        for a, b in permutations(two):
            neighbours.setdefault(a, set()).add(b)

    def meet(a: Pair, b: Pair) -> bool:
        return a[0] == b[0] or b in neighbours[a]

    def common(two: Two) -> List[Pair]:
        return [pair for pair in sorted(neighbours) if pair not in two and all(meet(pair, own) for own in two)]

    found: Dict[FrozenSet[Pair], List[Two]] = {}
    covered: Set[Two] = set()
    candidates = {two: common(two) for two in sorted(conflicts, key=sorted)}
    for two, others in candidates.items():
        if all(meet(a, b) for a, b in combinations(others, 2)):
            found.setdefault(two | frozenset(others), []).append(two)
    for members in found:
        covered |= _inside(members, conflicts)
    for two, others in candidates.items():
        if two not in covered:
            clique = set(two)
            for pair in sorted(others, key=lambda pair: (-sum(meet(pair, other) for other in others), pair)):
                if all(meet(pair, member) for member in clique):
                    clique.add(pair)
            found.setdefault(frozenset(clique), []).append(two)
            covered |= _inside(frozenset(clique), conflicts)
    return sorted(found.items(), key=lambda item: sorted(item[0]))


def _inside(members: FrozenSet[Pair], conflicts: Set[Two]) -> Set[Two]:
    return {two for two in conflicts if two <= members}
