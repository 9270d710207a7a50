"""Speeds from repeated copies and sums: the time to start one, and bytes per second, by robust fits."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np
from scipy.optimize import least_squares

from ..sampling import Quartiles, in_turn, quartiles
from .samples import steady
from .timer import Pair, Timer, Transfer

SIZES = tuple(4096 * 16**power for power in range(5))  # bytes: 4 KiB, 64 KiB, 1 MiB, 16 MiB, 256 MiB
SMALL = SIZES[0]
TRAIN = 9  # copies; one more than a power of two, so that nine minus one is eight
HOPS = (8, 40)
OPERANDS = (2, 4, 8)
_SHORTEST = 1e-9  # seconds
_SOFT = 0.05  # relative errors above this count less


class Line(NamedTuple):
    """Seconds by size: ``start`` and then ``rate`` bytes/s; ``spread`` is the relative width of the quartiles."""

    start: float
    rate: float
    spread: float


def fitted(sizes: Sequence[float], seconds: Sequence[float], spread: float = 0.0) -> Line:
    """Return the line through seconds by size with the least relative errors; outliers count less.

    The largest size is no outlier: at least half of its time, bytes move.
    """
    x, y = np.asarray(sizes, float), np.asarray(seconds, float)
    guess = (max(float(y.min()), 1e-9), max(float(y[x.argmax()]) / float(x.max()), 1e-15))

    def errors(scaled: np.ndarray) -> np.ndarray:
        return (scaled[0] * guess[0] + scaled[1] * guess[1] * x) / y - 1

    found = least_squares(errors, (0.5, 1.0), loss="soft_l1", f_scale=_SOFT, bounds=((0, 0.5), (np.inf, 2)))
    return Line(float(found.x[0] * guess[0]), float(1 / (found.x[1] * guess[1])), spread)


def measure_links(
    timer: Timer, sizes: Sequence[int], rounds: int, noise: float, patience: float, tick: Callable[[], None]
) -> Dict[Pair, Line]:
    """Return seconds by size of each ordered pair of devices, one copy at a time.

    Args:
        timer: runs the copies.
        sizes: bytes, ascending.
        rounds: the number of runs of each pair and size.
        noise: as in :func:`.samples.steady`, of each pair's largest copies, which decide its bytes/s.
        patience: seconds; a pair whose copies would take longer at the next size is measured without it.
        tick: called before each round.

    Raises:
        HierAllreduceError: a pair is too noisy.
    """
    found: Dict[Pair, List[Tuple[int, Quartiles]]] = {
        (src, dst): [] for src in range(timer.devices) for dst in range(timer.devices) if src != dst
    }
    left = list(found)
    for number, size in enumerate(sizes):
        runs = {pair: _copy(timer, pair, size) for pair in left}
        for pair, seconds in steady(runs, rounds, np.inf, _copy_name(size), tick).items():
            found[pair].append((size, seconds))
        following = sizes[number + 1] if number + 1 < len(sizes) else np.inf
        last = {pair: runs[pair] for pair in left if _next(found[pair], following) > patience}
        noisy = {pair: run for pair, run in last.items() if found[pair][-1][1].width > noise}
        for pair, seconds in steady(noisy, rounds, noise, _copy_name(size), tick).items():
            found[pair][-1] = (size, seconds)
        left = [pair for pair in left if pair not in last]
    return {pair: _line(points) for pair, points in found.items()}


def _next(points: Sequence[Tuple[int, Quartiles]], size: float) -> float:
    last, seconds = points[-1]
    return seconds.median * size / last


def _copy(timer: Timer, pair: Pair, size: int) -> Callable[[], float]:
    return lambda: timer.together([Transfer(*pair, size)])[0]


def _copy_name(size: int) -> Callable[[Pair], str]:
    return lambda pair: f"copies of {size} bytes from device {pair[0]} to device {pair[1]}"


def _line(points: Sequence[Tuple[int, Quartiles]]) -> Line:
    return fitted([size for size, _ in points], [q.median for _, q in points], points[-1][1].width)


class Starts(NamedTuple):
    """Seconds: to ``start`` a copy, of the host at each ``arrival`` and to ``dispatch`` an op; their quartiles."""

    start: Quartiles
    arrival: Quartiles
    dispatch: Quartiles


def measure_starts(timer: Timer, links: Mapping[Pair, Line], rounds: int, tick: Callable[[], None]) -> Starts:
    """Return the time to start a copy, from trains of independent copies, and those of the host.

    In a train only the sender's stream delays a copy. In a chain each copy also waits until the host has noticed the
    end of the one before. With a train of each device at once the host dispatches two ops for each copy, as fast as it
    can or as the streams can: what an op takes then is the most that it takes the host.
    """
    count = timer.devices
    ring = [(device, (device + 1) % count) for device in range(count)]
    runs: Dict[Tuple[Any, int], Callable[[], float]] = {}
    for copies in (1, TRAIN):
        for pair in ring:
            runs[pair, copies] = lambda p=pair, n=copies: timer.trains([p], n, SMALL)  # type: ignore[misc]
        runs["all", copies] = lambda n=copies: timer.trains(ring, n, SMALL)  # type: ignore[misc]
    for hops in HOPS:
        runs["hops", hops] = lambda n=hops: timer.hops(n, SMALL)  # type: ignore[misc]
    values = {key: np.array(seconds) for key, seconds in in_turn(runs, rounds, 1, lambda stage: tick()).items()}
    moving = {pair: SMALL / links[pair].rate for pair in ring}
    starts = [(values[pair, TRAIN] - values[pair, 1]) / (TRAIN - 1) - moving[pair] for pair in ring]
    hops = (values["hops", HOPS[1]] - values["hops", HOPS[0]]) / (HOPS[1] - HOPS[0])
    op = (values["all", TRAIN] - values["all", 1]) / (TRAIN - 1) / (2 * count)
    start = _quartiles(np.concatenate(starts))
    return Starts(start, _quartiles(hops - np.mean(list(moving.values())) - start.median), _quartiles(op))


def _quartiles(seconds: np.ndarray) -> Quartiles:
    """Return the quartiles; what is measured as a difference can come out below 0, where it is nothing."""
    return Quartiles(*(max(0.0, value) for value in quartiles(seconds)))


def measure_sums(timer: Timer, sizes: Sequence[int], rounds: int, noise: float, tick: Callable[[], None]) -> Line:
    """Return the start of a sum and the memory's bytes/s, by which every operand is read and the result is written.

    Raises:
        HierAllreduceError: the sums of many bytes are too noisy.
    """
    points = []
    for size in sizes:
        runs: Dict[Tuple[int, int], Callable[[], float]] = {
            (operands, count): lambda n=operands, c=count, s=size: timer.sums(n, c, s)  # type: ignore[misc]
            for operands in OPERANDS
            for count in (1, TRAIN)
        }
        limit = noise if size == sizes[-1] else np.inf
        found = steady(runs, rounds, limit, _sums_name(size), tick)
        for operands in OPERANDS:
            seconds = (found[operands, TRAIN].median - found[operands, 1].median) / (TRAIN - 1)
            points.append(((operands + 1) * size, seconds, found[operands, TRAIN].width))
    # on a busy host, eight of the smallest sums can come out shorter than nothing, and then say nothing
    bytes_, seconds_, widths = zip(*[point for point in points if point[1] > 0 or point is points[-1]])
    return fitted(bytes_, [max(own, _SHORTEST) for own in seconds_], max(widths[-len(OPERANDS) :]))


def _sums_name(size: int) -> Callable[[Tuple[int, int]], str]:
    return lambda key: f"{key[1]} sums of {key[0]} tensors of {size} bytes"
