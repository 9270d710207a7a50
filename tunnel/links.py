"""The links of emulated machines, found by ``hier-allreduce calibrate`` without being told.

::

    python -m tunnel.links                       three machines
    python -m tunnel.links dgx-2                 any other; also dgx-1v:0,1,2,3

Real ops of TensorFlow run on K logical CPU devices; copies between them take emulated time (see README.md).
"""

import argparse
import os
import sys
import time
from dataclasses import replace

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from hier_allreduce.calibration.device_timer import DeviceTimer
from hier_allreduce.calibration.measurement import measure
from hier_allreduce.calibration.sharing import ways_of
from hier_allreduce.calibration.speeds import SIZES
from hier_allreduce.calibration.timer import Transfer

from .__main__ import machine

MACHINES = ("dgx-1v", "pcie-pairs", "dgx-a100")
_TINY = 32  # bytes that really move: 8 elements, which tunnel.cc calls chunk 0


class EmulatedTimer(DeviceTimer):
    """The product's timer, its ops and its session; only the links are emulated.

    ``seconds`` is the emulated time of all runs together.
    """

    def __init__(self, topology):
        from .emulation import library, set_machine

        self._ops, self._functions = library()
        self._topology = topology
        super().__init__([f"/cpu:{device}" for device in range(len(topology))], _TINY)
        set_machine(replace(topology, speeds=replace(topology.speeds, dispatch=0.0)))
        self.largest, self.one_memory, self.exact, self.seconds = SIZES[-1], False, True, 0.0

    def together(self, transfers):
        """Copies that all begin at once."""
        self._expect([(transfer.src, transfer.dst, transfer.size, None) for transfer in transfers])
        super().together([Transfer(src, dst, _TINY) for src, dst, _ in transfers])
        return self._passed(self._when_ended(len(transfers)))

    def trains(self, pairs, count, size):
        """Copies that do not wait for each other."""
        self._expect([(src, dst, size, None) for _ in range(count) for src, dst in pairs])
        super().trains(pairs, count, _TINY)
        return max(self._passed(self._when_ended(count * len(pairs))))

    def hops(self, count, size):
        """Copies that wait for each other."""
        self._expect([(hop % self.devices, (hop + 1) % self.devices, size, hop - 1) for hop in range(count)])
        super().hops(count, _TINY)
        return max(self._passed(self._when_ended(count)))

    def sums(self, operands, count, size):
        """Sums, whose time the emulated machine is told."""
        speeds = self._topology.speeds
        return count * (speeds.kernel + (operands + 1) * size / speeds.memory)

    def _expect(self, copies):
        """Announce the copies of the next run: sender, receiver, bytes, and the copy whose end each waits for."""
        from .emulation import _floats, _ints, _pointer

        followers = [[number for number, copy in enumerate(copies) if copy[3] == own] for own in range(len(copies))]
        followers = [[number for number in own if copies[number][3] is not None] for own in followers]
        first = [sum(map(len, followers[:number])) for number in range(len(copies) + 1)]
        arrays = [
            _ints([(src, dst, 0) for src, dst, *_ in copies]),
            _floats([size for _, _, size, _ in copies]),
            _ints([int(after is not None and after >= 0) for *_, after in copies]),
            _ints(first),
            _ints([number for own in followers for number in own] or [0]),
        ]
        self._functions.tunnel_run(len(copies), 0, *map(_pointer, arrays))

    def _when_ended(self, count):
        from .emulation import _floats, _pointer

        seconds = _floats([0.0] * count)
        self._functions.tunnel_ends(_pointer(seconds), count)
        return seconds.tolist()

    def _passed(self, ends):
        self.seconds += max(ends)
        return ends


def found(name, arrival=0.0):
    """Measure a machine; return its true and its found values by name, the ways, and the seconds that it took."""
    topology = machine(name, arrival)
    began = time.monotonic()
    timer = EmulatedTimer(topology)
    try:
        measurement = measure(timer, SIZES, 0.25, lambda stage: None)
    finally:
        timer.close()
    rates = {pair: (topology.link(*pair).bandwidth, line.rate) for pair, line in measurement.links.items()}
    ways = (ways_of(topology), {way.pairs: way.speed for way in measurement.found.ways})
    return topology, measurement, rates, ways, (timer.seconds, time.monotonic() - began)


def row(name, arrival):
    """A row of the table."""
    topology, measurement, rates, (true, seen), (emulated, real) = found(name, arrival)
    worst = max(abs(rate / actual - 1) for actual, rate in rates.values())
    both = true.keys() & seen.keys()
    cells = [
        name,
        f"{len(rates)}",
        f"{worst:.1%}",
        f"{measurement.starts.start.median * 1e6:.1f} of {topology.speeds.copy_latency * 1e6:.1f}",
        f"{measurement.starts.arrival.median * 1e6:.1f} of {topology.speeds.arrival * 1e6:.1f}",
        f"{len(both)} of {len(true)}",
        f"{len(seen.keys() - true.keys())}",
        f"{max((abs(seen[way] / true[way] - 1) for way in both), default=0.0):.1%}",
        f"{max(measurement.found.ratios, default=1.0):.2f}",
        f"{emulated:.1f}",
        f"{real:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


HEAD = (
    "machine",
    "links",
    "worst error",
    "start, µs",
    "arrival, µs",
    "ways found",
    "ways that do not exist",
    "worst error of their speed",
    "patterns, measured / predicted, worst",
    "emulated s",
    "s",
)


def main(argv=None):
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tunnel.links", description=__doc__.split("\n")[0])
    parser.add_argument("machines", nargs="*", default=MACHINES, metavar="MACHINE")
    parser.add_argument("--arrival", type=float, default=20e-6, metavar="SECONDS", help="of the host, for each copy")
    args = parser.parse_args(argv)
    print(f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD), sep="\n")
    for name in args.machines:
        print(row(name, args.arrival), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
