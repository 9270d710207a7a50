"""The network between hosts, from repeated sums over all hosts and copies between two of them. No TensorFlow.

::

    one sum, several sizes; several sums at once ──► hop, engine     TensorFlow's collectives
    copies between two hosts, to and fro ──────────► start, bytes/s  its gRPC
        │
        ▼
    NetworkMeasurement ─► Network ─► YAML

Every host does the same at the same time and gets the same times, so every host measures the same again.
"""

from __future__ import annotations

from functools import partial
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..topology import Network
from .measurement import ROUNDS, Tick
from .samples import Quartiles, steady
from .speeds import Line, by_size, line
from .timer import Pair

NETWORK_SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)  # bytes
SUMS, COPIES = "sums over all hosts", "copies between hosts"
STAGES = (SUMS, COPIES)
SMALL = NETWORK_SIZES[0]
TRAIN = 17  # sums of few bytes at once
TOGETHER = 4  # sums of many bytes at once
HOPS = (4, 16)
_PATIENCE = 0.25  # seconds: a sum or copy that would take longer is not made
_MOST_BOTH_WAYS = 8  # hosts; with more, copies go one way around

Run = Callable[[], float]


class NetworkRuns(NamedTuple):
    """What a measurement of the network runs. Each function returns seconds, the same on all hosts.

    Attributes:
        hosts: the addresses of the H hosts, in the order of their tasks.
        sums: called with a number of sums and the bytes of each; they run over all hosts at once.
        copies: called with pairs of hosts (sender, receiver) and the bytes of each copy; all copies run at once.
        hops: called with a pair of hosts, a number of copies and their bytes; one value goes to and fro.
    """

    hosts: Tuple[str, ...]
    sums: Callable[[int, int], float]
    copies: Callable[[Sequence[Pair], int], float]
    hops: Callable[[Pair, int, int], float]


class Rate(NamedTuple):
    """Bytes/s, and the relative width of the quartiles of their times."""

    speed: float
    spread: float


class NetworkMeasurement(NamedTuple):
    """What was measured between H hosts.

    Attributes:
        hosts: H addresses.
        alone: seconds by the bytes that each host sends for one sum.
        together: bytes/s that each host sends for several sums at once.
        hop: seconds of a hop where many sums of few bytes run at once.
        copies: seconds by size of a copy from a host to a neighbour.
        copy_start: seconds of a copy of few bytes, the median of the pairs.
        ring: bytes/s of each host while every host sends to the next and receives from the one before.
        check: seconds of sums that had no part in the numbers above, divided by what these predict.
    """

    hosts: Tuple[str, ...]
    alone: Line
    together: Rate
    hop: Quartiles
    copies: Dict[Pair, Line]
    copy_start: float
    ring: Rate
    check: float

    @property
    def engine(self) -> Rate:
        """The most bytes/s that the collectives sent and received on each host."""
        return max(self.together, Rate(self.alone.rate, self.alone.spread))


def measure_network(runs: NetworkRuns, sizes: Sequence[int], noise: float, tick: Tick) -> NetworkMeasurement:
    """Measure sums over all hosts, and copies between neighbours in the ring of hosts.

    Args:
        runs: what to run, between two hosts or more.
        sizes: bytes of sums and copies, two or more, ascending.
        noise: the widest distance of the quartiles, as a share of the median.
        tick: called with one of ``STAGES`` after each run.

    Raises:
        CalibrationError: measurements are too noisy; names the hosts.
    """
    count = len(runs.hosts)
    hops, moved = 2 * (count - 1), 2 * (count - 1) / count  # of a sum: its hops, and what a host sends of each byte
    sums = _sums(runs, sizes, noise, lambda: tick(SUMS))
    copies, copy_start, ring = _copies(runs, sizes, noise, lambda: tick(COPIES))
    alone = line([(round(moved * size), quartiles) for size, quartiles in sums.by_size])
    hop = Quartiles(*(max(seconds / TRAIN - moved * SMALL / alone.rate, 1e-9) / hops for seconds in sums.train))
    seconds = sums.together.median
    moving = max(seconds - TOGETHER * hops * hop.median, seconds / 2)  # at least half of the time, bytes move
    measured = NetworkMeasurement(
        hosts=runs.hosts,
        alone=alone,
        together=Rate(TOGETHER * moved * sums.largest / moving, sums.together.width),
        hop=hop,
        copies=copies,
        copy_start=copy_start,
        ring=ring,
        check=1.0,
    )
    predicted = measured_network(measured, None, "").ring_seconds(count, TOGETHER * sums.checked_size, TOGETHER)
    return measured._replace(check=sums.check.median / predicted)


class _Sums(NamedTuple):
    """Quartiles of one sum by size, of ``TRAIN`` small ones, of ``TOGETHER`` of the largest size, and of a smaller."""

    by_size: List[Tuple[int, Quartiles]]
    train: Quartiles
    together: Quartiles
    check: Quartiles
    checked_size: int

    @property
    def largest(self) -> int:
        """The bytes of the largest sum."""
        return self.by_size[-1][0]


def _sums(runs: NetworkRuns, sizes: Sequence[int], noise: float, tick: Callable[[], None]) -> _Sums:
    over = f"over {', '.join(map(_shown, enumerate(runs.hosts)))}"

    def of_size(size: int) -> Tuple[Callable[[int], Run], Callable[[int], str]]:
        return lambda count: partial(runs.sums, count, size), lambda count: f"a sum of {size} bytes {over}"

    found = by_size([1], of_size, sizes, ROUNDS, noise, _PATIENCE, tick)[1]
    largest = found[-1][0]
    smaller = found[-2][0] if len(found) > 1 else SMALL
    train, together, check = (TRAIN, SMALL), (TOGETHER, largest), (TOGETHER, smaller)
    several: Dict[Tuple[int, int], Run] = {key: partial(runs.sums, *key) for key in (train, together)}
    quartiles = steady(several, ROUNDS, noise, lambda key: f"{key[0]} sums of {key[1]} bytes {over}", tick)
    last: Dict[Tuple[int, int], Run] = {check: partial(runs.sums, *check)}
    return _Sums(
        found, quartiles[train], quartiles[together], steady(last, ROUNDS, float("inf"), str, tick)[check], smaller
    )


def _copies(
    runs: NetworkRuns, sizes: Sequence[int], noise: float, tick: Callable[[], None]
) -> Tuple[Dict[Pair, Line], float, Rate]:
    """Return copies between neighbours by size, the start of one, and the rate of all hosts at once."""
    ring = [(host, (host + 1) % len(runs.hosts)) for host in range(len(runs.hosts))]
    back = [(dst, src) for src, dst in ring] if len(ring) <= _MOST_BOTH_WAYS else []

    def of_size(size: int) -> Tuple[Callable[[Pair], Run], Callable[[Pair], str]]:
        def name(pair: Pair) -> str:
            src, dst = (_shown((task, runs.hosts[task])) for task in pair)
            return f"copies of {size} bytes from {src} to {dst}"

        return lambda pair: partial(runs.copies, [pair], size), name

    found = by_size(list(dict.fromkeys(ring + back)), of_size, sizes, ROUNDS, noise, _PATIENCE, tick)
    lines = {pair: line(points) for pair, points in found.items()}
    chains: Dict[Tuple[Pair, int], Run] = {
        (pair, count): partial(runs.hops, pair, count, SMALL) for pair in ring for count in HOPS
    }
    hops = steady(chains, ROUNDS, float("inf"), str, tick)
    starts = [(hops[pair, HOPS[1]].median - hops[pair, HOPS[0]].median) / (HOPS[1] - HOPS[0]) for pair in ring]
    size = min(points[-1][0] for points in found.values())
    everyone: Dict[str, Run] = {"copies from every host to the next": partial(runs.copies, ring, size)}
    ((_, together),) = steady(everyone, ROUNDS, noise, str, tick).items()
    return lines, max(0.0, sorted(starts)[len(starts) // 2]), Rate(size / together.median, together.width)


def _shown(host: Tuple[int, str]) -> str:
    return f"host {host[0]} ({host[1]})"


def measured_network(measurement: NetworkMeasurement, assumed: Optional[Network], name: str) -> Network:
    """Return the network with the measured hop and engine.

    No program can see a card. Its bytes/s are those of ``assumed``, or what was seen if that is more.

    Args:
        measurement: between the hosts.
        assumed: whose cards the hosts have; None if that is not known.
        name: what reports call the network.

    Raises:
        ClusterError: a speed is below 1 MB/s, or a hop takes over a second.
    """
    seen = max(measurement.engine.speed, measurement.ring.speed)
    cards = assumed.nics if assumed else 1
    values = {
        "nic": _three_digits(max(assumed.nic if assumed else 0.0, seen / cards)),
        "hop": _three_digits(measurement.hop.median),
        "nics": cards,
        "engine": _three_digits(measurement.engine.speed),
        "name": name or "network",
    }
    return Network.from_values(values, "measured network")


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")
