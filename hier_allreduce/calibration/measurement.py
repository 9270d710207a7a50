"""All that a calibration measures, in one pass with a :class:`.Timer`."""

from __future__ import annotations

from typing import Callable, Dict, Mapping, NamedTuple, Sequence

import numpy as np

from ..sampling import Tick
from .sharing import TOGETHER, Found, Machine, Search, Way
from .speeds import SMALL, Line, Starts, measure_links, measure_starts, measure_sums
from .timer import Pair, Timer, Transfer

ROUNDS = 9  # of copies of one size, of which the faster half counts
_TOGETHER_ROUNDS = 3
_PATIENCE = 0.06  # seconds: copies that would take longer are not made


class Measurement(NamedTuple):
    """What was measured.

    Attributes:
        links: seconds by size of each ordered pair.
        starts: the time to start a copy, and that of the host when one arrives.
        sums: the start of a sum, and the memory's bytes/s.
        found: the ways that copies share.
    """

    links: Dict[Pair, Line]
    starts: Starts
    sums: Line
    found: Found

    def both_ways(self) -> Dict[Pair, float]:
        """Return bytes/s of each pair, the same in both directions: a plan sends as much one way as the other."""
        rates = {pair: line.rate for pair, line in self.links.items()}
        return {(a, b): 2 / (1 / rate + 1 / rates[b, a]) for (a, b), rate in rates.items()}


def measure(timer: Timer, sizes: Sequence[int], noise: float, tick: Tick) -> Measurement:
    """Measure links, starts, sums and what copies share.

    Args:
        timer: runs copies and sums.
        sizes: bytes of copies, ascending.
        noise: the widest distance of the quartiles, as a share of the median.
        tick: called with the stage, many times in each.

    Raises:
        HierAllreduceError: measurements are too noisy.
    """
    rounds, sets = (1, 1) if timer.exact else (ROUNDS, _TOGETHER_ROUNDS)
    links = measure_links(timer, sizes, rounds, noise, _PATIENCE, lambda: tick("links"))
    starts = measure_starts(timer, links, rounds, lambda: tick("starts"))
    sums = measure_sums(timer, (SMALL, sizes[-1] // 8), rounds, noise, lambda: tick("sums"))
    machine = _machine(timer, links)
    if timer.one_memory:
        found = _one_memory(timer, machine, sets, lambda: tick("copies together"))
    else:
        found = Search(timer, machine, sets, lambda: tick("copies together")).find()
    return Measurement(links, starts, sums, found)


def _machine(timer: Timer, links: Mapping[Pair, Line]) -> Machine:
    rates = {pair: line.rate for pair, line in links.items()}
    start = max(float(np.median([line.start for line in links.values()])), 1e-9)
    return Machine(timer.devices, rates, start, min(TOGETHER, timer.largest / max(rates.values())))


def _one_memory(timer: Timer, machine: Machine, rounds: int, tick: Callable[[], None]) -> Found:
    """Return the memory as the only way that copies share, as fast as all devices copy to their neighbours at once."""
    if timer.devices < 3:
        return Found((), ())
    ring = [(device, (device + 1) % timer.devices) for device in range(timer.devices)]
    transfers = [Transfer(*pair, int(machine.links[pair] * machine.seconds)) for pair in ring]
    seconds = []
    for _ in range(rounds):
        seconds.append(max(timer.together(transfers)))
        tick()
    speed = sum(transfer.size for transfer in transfers) / float(np.median(seconds))
    return Found((Way(frozenset(machine.links), max(speed, max(machine.links.values()))),), ())
