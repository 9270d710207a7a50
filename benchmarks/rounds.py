"""Steps that are timed in rounds, and what each all-reduce adds to them.

A round runs one step of each all-reduce, in random order, so that other load meets all alike.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import time
from typing import Any, Callable, Dict, List, Mapping

import psutil

Step = Callable[[], Any]
NOTHING = "no all-reduce"
FUNCTION = " in a tf.function"  # ends the name of a step that is one; its base is one, too


def base_of(name: str) -> str:
    """Return the name of the step without an all-reduce that is subtracted from this one."""
    return NOTHING + FUNCTION if name.endswith(FUNCTION) else NOTHING


def timed_rounds(
    steps: Mapping[str, Step], rounds: int, scale: float = 1
) -> Dict[str, List[float]]:
    """Return the milliseconds of each step of each round, divided by ``scale``."""
    times: Dict[str, List[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(sorted(steps), len(steps)):
            started = time.perf_counter()
            steps[name]()
            times[name].append((time.perf_counter() - started) / scale * 1e3)
    return times


def exposed(
    times: Mapping[str, List[float]], about: Mapping[str, Mapping[str, Any]]
) -> Dict[str, Any]:
    """Return each all-reduce's steps without the median step that has none.

    Args:
        times: milliseconds of each step, by name.
        about: more about each all-reduce, for the result.

    Returns:
        ``{"base_ms": …, "base_rounds_ms": […], "contenders": {name: {"exposed_ms": […], …}}}``.
    """
    bases = {name: statistics.median(times[name]) for name in times if name.startswith(NOTHING)}
    contenders = {}
    for name in times:
        if name not in bases:
            steps = [round(step - bases[base_of(name)], 3) for step in times[name]]
            median = round(statistics.median(steps), 3)
            contenders[name] = {"exposed_ms": steps, "median_ms": median, **about[name]}
    rounds = [round(step, 3) for step in times[NOTHING]]
    result = {"base_ms": round(bases[NOTHING], 3), "base_rounds_ms": rounds}
    if NOTHING + FUNCTION in bases:
        result["base_ms_of_functions"] = round(bases[NOTHING + FUNCTION], 3)
    return {**result, "contenders": contenders}


class Load:
    """How many cores other programs use, from its beginning on.

    Their own times are added up, because the kernel's count of busy cores is taken at its ticks,
    and threads that sleep until a time wake up there: it counted half a core of a machine on which
    nothing else ran.
    """

    def __init__(self) -> None:
        """Begin now."""
        self._began = time.perf_counter()
        self._seconds = _seconds_of_others()

    def of_others(self) -> float:
        """Return the cores of other programs, on average since the beginning."""
        used = 0.0
        for process, seconds in _seconds_of_others().items():
            used += seconds - self._seconds.get(process, 0.0)
        return round(max(0.0, used) / (time.perf_counter() - self._began), 3)


def _seconds_of_others() -> Dict[int, float]:
    """Return the seconds of a core that each other process and its ended children have used."""
    seconds = {}
    for process in psutil.process_iter():
        if process.pid != os.getpid():
            with contextlib.suppress(psutil.Error):  # it has ended
                seconds[process.pid] = sum(process.cpu_times()[:4])
    return seconds
