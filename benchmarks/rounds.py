"""Steps that are timed in rounds, and what each all-reduce adds to them.

A round runs one step of each all-reduce, in random order, so that other load meets all alike.
"""

from __future__ import annotations

import os
import random
import resource
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping

Step = Callable[[], Any]
NOTHING = "no all-reduce"
# These end the names of steps whose base has the same end:
FUNCTION = " in a tf.function"
PRIVATE = " with private threads"  # a GPU's ops are launched by 2 threads of its own

STEP = "update=replicated"  # of a TowerOptimizer; these end what it is without, or has beside it
UNFLAGGED, COMPARED = " without its flag", " and compared copies"


def base_of(name: str) -> str:
    """Return the name of the step without an all-reduce that is subtracted from this one."""
    for ending in (FUNCTION, PRIVATE):
        if name.endswith(ending):
            return NOTHING + ending
    return NOTHING


def measured_rounds(
    measures: Mapping[str, Callable[[], float]], rounds: int
) -> Dict[str, List[float]]:
    """Return what each function returns in each round, in which all are called once."""
    measured: Dict[str, List[float]] = {name: [] for name in measures}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(sorted(measures), len(measures)):
            measured[name].append(measures[name]())
    return measured


def timed_rounds(
    steps: Mapping[str, Step], rounds: int, scale: float = 1
) -> Dict[str, List[float]]:
    """Return the milliseconds of each step of each round, divided by ``scale``."""

    def timed(step: Step) -> float:
        started = time.perf_counter()
        step()
        return (time.perf_counter() - started) / scale * 1e3

    return measured_rounds({name: partial(timed, step) for name, step in steps.items()}, rounds)


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
    """How many cores other programs use, from its beginning on; None where Linux' /proc is not."""

    def __init__(self) -> None:
        """Begin now."""
        self._began = time.perf_counter()
        self._of_all, self._own = _busy_seconds(), _own_seconds()

    def of_others(self) -> Any:
        """Return the cores of other programs, on average since the beginning."""
        if self._of_all is None:
            return None
        others = (_busy_seconds() or 0) - self._of_all - (_own_seconds() - self._own)
        return round(max(0.0, others) / (time.perf_counter() - self._began), 3)


def _busy_seconds() -> Any:
    """Return the seconds for which all cores together were busy since the machine's start."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    of_all_cores = stat.read_text("utf-8").splitlines()[0].split()[1:9]
    user, nice, system, _, _, irq, soft_irq, steal = map(int, of_all_cores)  # not idle, not waiting
    return (user + nice + system + irq + soft_irq + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime
