"""Repeated measurements: in turn, the faster half of each, and an error where that half is too wide.

Other programs on a machine only ever make a run slower, so the faster half of the runs says more than all of them.
"""

from __future__ import annotations

import random
from typing import Callable, Dict, Hashable, List, NamedTuple, Sequence, TypeVar

import numpy as np

from ..errors import CalibrationError
from ..formatting import count, duration, percent

K = TypeVar("K", bound=Hashable)
MORE = 4  # times that what is too noisy is measured again


class Quartiles(NamedTuple):
    """The quartiles of the faster half of some runs, in seconds."""

    low: float
    median: float
    high: float

    @property
    def width(self) -> float:
        """The distance of the outer quartiles as a share of the median."""
        return (self.high - self.low) / self.median if self.median > 0 else 0.0


def faster_half(seconds: Sequence[float]) -> Quartiles:
    """Return the quartiles of the faster half."""
    half = np.sort(np.asarray(seconds, float))[: (len(seconds) + 1) // 2]
    return Quartiles(*(float(value) for value in np.percentile(half, (25, 50, 75))))


def in_turn(runs: Dict[K, Callable[[], float]], rounds: int, tick: Callable[[], None]) -> Dict[K, List[float]]:
    """Return ``rounds`` values of each run, taken in turn and in a new order every round, after an untimed one."""
    values: Dict[K, List[float]] = {key: [] for key in runs}
    order, shuffle = list(runs), random.Random(0).shuffle
    for number in range(rounds + 1):
        shuffle(order)
        for key in order:
            value = runs[key]()
            tick()
            if number:
                values[key].append(value)
    return values


def steady(
    runs: Dict[K, Callable[[], float]], rounds: int, noise: float, name: Callable[[K], str], tick: Callable[[], None]
) -> Dict[K, Quartiles]:
    """Return the quartiles of each run; those that are too wide are measured again, with more rounds each time.

    Args:
        runs: a function for each key that returns seconds.
        rounds: the number of runs of each, at first.
        noise: the widest distance of the outer quartiles, as a share of the median.
        name: what an error calls a key.
        tick: called after each run.

    Raises:
        CalibrationError: quartiles stay wider than ``noise``.
    """
    values = in_turn(runs, rounds, tick)
    for again in range(MORE + 1):
        quartiles = {key: faster_half(seconds) for key, seconds in values.items()}
        noisy = {key: runs[key] for key, quartile in quartiles.items() if quartile.width > noise}
        if not noisy:
            return quartiles
        if again < MORE:
            for key, seconds in in_turn(noisy, rounds, tick).items():
                values[key] += seconds
    worst = max(noisy, key=lambda key: quartiles[key].width)
    low, median, high = quartiles[worst]
    others = f" ({count(len(noisy) - 1, 'other measurement')} too)" if len(noisy) > 1 else ""
    raise CalibrationError(
        f"{name(worst)}: too noisy to be used{others}: of {len(values[worst])} runs, the quartiles of the faster half "
        f"are {duration(low)} and {duration(high)} around {duration(median)}, which is "
        f"{percent(quartiles[worst].width)} apart; expected at most {percent(noise)}. Stop other programs on this "
        "machine, or allow more noise"
    )
