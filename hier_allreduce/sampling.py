"""Repeated measurements in turn, so that other load on the machine affects all of them alike; and their quartiles."""

from __future__ import annotations

import random
import time
from typing import Any, Callable, Dict, Hashable, List, NamedTuple, Sequence, TypeVar, Union

import numpy as np

K = TypeVar("K", bound=Hashable)
Tick = Callable[[str], None]  # called with a short text at each stage of a measurement


class Quartiles(NamedTuple):
    """The quartiles of some values."""

    low: float
    median: float
    high: float

    @property
    def width(self) -> float:
        """The distance of the outer quartiles as a share of the median."""
        return (self.high - self.low) / self.median if self.median > 0 else 0.0


def quartiles(values: Union[Sequence[float], np.ndarray]) -> Quartiles:
    """Return the first quartile, the median and the third quartile."""
    return Quartiles(*(float(value) for value in np.percentile(values, (25, 50, 75))))


def in_turn(runs: Dict[K, Callable[[], float]], rounds: int, warm_up: int, tick: Tick) -> Dict[K, List[float]]:
    """Run all in turn, in a new order every round, and return each run's values.

    Args:
        runs: a function for each key.
        rounds: how often each is run.
        warm_up: the number of rounds before them whose values are not kept.
        tick: called with a short text before each round.
    """
    values: Dict[K, List[float]] = {key: [] for key in runs}
    order, shuffle = list(runs), random.Random(0).shuffle
    for number in range(-warm_up, rounds):
        tick(f"round {number + 1} of {rounds}" if number >= 0 else "warming up")
        shuffle(order)
        for key in order:
            value = runs[key]()
            if number >= 0:
                values[key].append(value)
    return values


def timed(step: Callable[[], Any]) -> Callable[[], float]:
    """Return a function that takes a step and returns its seconds."""

    def run() -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    return run
