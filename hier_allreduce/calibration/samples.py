"""Repeated measurements: in turn, the faster half of each, and an error where that half is too wide.

Other programs on a machine only ever make a run slower, so the faster half of the runs says more than all of them.
"""

from __future__ import annotations

from typing import Callable, Dict, Sequence

import numpy as np

from ..errors import HierAllreduceError
from ..formatting import count, duration, percent
from ..sampling import K, Quartiles, in_turn, quartiles

MORE = 4  # times that what is too noisy is measured again


def faster_half(seconds: Sequence[float]) -> Quartiles:
    """Return the quartiles of the faster half."""
    return quartiles(np.sort(np.asarray(seconds, float))[: (len(seconds) + 1) // 2])


def steady(
    runs: Dict[K, Callable[[], float]], rounds: int, noise: float, name: Callable[[K], str], tick: Callable[[], None]
) -> Dict[K, Quartiles]:
    """Return the quartiles of each run; those that are too wide are measured again, with more rounds each time.

    Args:
        runs: a function for each key that returns seconds.
        rounds: the number of runs of each, at first.
        noise: the widest distance of the outer quartiles, as a share of the median.
        name: what an error calls a key.
        tick: called before each round.

    Raises:
        HierAllreduceError: quartiles stay wider than ``noise``.
    """
    values = in_turn(runs, rounds, 1, lambda stage: tick())
    for again in range(MORE + 1):
        found = {key: faster_half(seconds) for key, seconds in values.items()}
        noisy = {key: runs[key] for key, half in found.items() if half.width > noise}
        if not noisy:
            return found
        if again < MORE:
            for key, seconds in in_turn(noisy, rounds, 1, lambda stage: tick()).items():
                values[key] += seconds
    worst = max(noisy, key=lambda key: found[key].width)
    low, median, high = found[worst]
    others = f" ({count(len(noisy) - 1, 'other measurement')} too)" if len(noisy) > 1 else ""
    raise HierAllreduceError(
        f"{name(worst)}: too noisy to be used{others}: of {len(values[worst])} runs, the quartiles of the faster half "
        f"are {duration(low)} and {duration(high)} around {duration(median)}, which is "
        f"{percent(found[worst].width)} apart; expected at most {percent(noise)}. Stop other programs on this "
        f"machine, or allow more noise (noise=, --noise): {found[worst].width + 0.05:.2f}"
    )
