"""What a real machine costs: an op, a hop between two GPUs, copies, scans, an addition on the host.

Each number is the difference of two steps, of which the second one has more of the same.
"""

from __future__ import annotations

import functools
import statistics
from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np
import tensorflow as tf
from over_host import send_over_host
from real_devices import Devices
from rounds import timed_rounds
from training_step import Variable, chains

tf1 = tf.compat.v1
raw = tf.raw_ops

MIB = 1 << 20
ROUNDS = 5
Ends = Callable[[int, List[Variable]], Any]  # adds so many of the same, and returns the last op

ADDITIONS = (64, 20_000, 100_000, 400_000)  # int32 of an addition on the host
COPY_BYTES = 16 * MIB


def op_us(devices: Devices, count: int) -> float:
    """Return the µs that a small op costs the host while so many devices run chains of them."""
    times = []
    for length in (200, 1200):
        built = chains(devices.names[:count], length)
        with devices.session(built.graph) as session:
            session.run(built.fill)
            times.append(_median_ms(session.make_callable(built.step)))
    return _us(times, 1000)


def hop_us(devices: Devices, over_host: bool) -> float:
    """Return the µs of a small tensor's way from GPU 0 to 1, or back, and of an op there."""

    def ends(hops: int, variables: List[Variable]) -> Any:
        names = devices.names[:2]
        ones = [Variable(f"one{number}", (256,), name, 1.0) for number, name in enumerate(names)]
        variables += ones
        reads = [one.read() for one in ones]
        value = reads[0]
        for hop in range(hops):
            with tf.device(names[(hop + 1) % 2]):
                value = tf.maximum(value, reads[(hop + 1) % 2])
        return _kept(value, f"end{hops}", names[hops % 2], variables)

    return _slope_us(devices, ends, (20, 120), over_host)


def copy_gbs(devices: Devices, pairs: Sequence[Tuple[int, int]], over_host: bool) -> float:
    """Return the GB/s of copies between these pairs of devices at once, of all together."""

    def ends(copies: int, variables: List[Variable]) -> Any:
        kept = []
        for src, dst in pairs:
            for copy in range(copies):
                name = f"sent{src}_{dst}_{copy}"
                sent = Variable(name, (COPY_BYTES // 4,), devices.names[src], 1.0)
                variables.append(sent)
                value = sent.read()
                with tf.device(devices.names[dst]):
                    first = value[copy]  # other elements, since Grappler joins equal ops
                kept.append(_kept(first, f"of_{name}_{copies}", devices.names[dst], variables))
        return tf.group(*kept)

    microseconds = _slope_us(devices, ends, (2, 10), over_host)
    return len(pairs) * COPY_BYTES / microseconds / 1e3


def scan_us(devices: Devices, sizes: Sequence[int]) -> Dict[int, float]:
    """Return the µs of scans of one row on the first device, by their number of elements."""
    return {size: _scan_us(devices, size) for size in sizes}


def _scan_us(devices: Devices, size: int) -> float:
    def ends(scans: int, variables: List[Variable]) -> Any:
        device = devices.names[0]
        row = Variable(f"row{scans}", (size,), device, 1.0)
        variables.append(row)
        value = row.read()
        with tf.device(device):
            for _ in range(scans):
                value = raw.Cumsum(x=value, axis=0, exclusive=False, reverse=False)
        return _kept(value, f"end{scans}", device, variables)

    return _slope_us(devices, ends, (10, 40))


def addition_us(devices: Devices) -> Dict[int, float]:
    """Return the µs of an addition of int32 in the host's memory, by their number."""
    microseconds = {}
    with tf.Graph().as_default() as graph, tf.device(devices.names[0]):
        work = tf1.placeholder(tf.int32, [None])
        ends = []
        for length in (20, 120):
            value = work
            for _ in range(length):
                value = raw.AddV2(x=value, y=work)
            ends.append(value[:1])
    with devices.session(graph) as session:
        steps = [session.make_callable(end, [work]) for end in ends]
        for count in ADDITIONS:
            ints = np.ones(count, np.int32)
            times = [_median_ms(functools.partial(step, ints)) for step in steps]
            microseconds[count] = _us(times, 100)
    return microseconds


def additions_lasting(microseconds: float, calibrated: Dict[int, float]) -> int:
    """Return how many int32 have to be added for so many µs; 1 for 0 µs."""
    counts = sorted(calibrated)
    costs = [calibrated[count] - calibrated[counts[0]] for count in counts]
    longest = costs[-1] / counts[-1]
    if microseconds > costs[-1]:
        return int(microseconds / longest)
    return max(1, int(np.interp(microseconds, costs, counts))) if microseconds > 0 else 1


def _kept(value: Any, name: str, device: str, variables: List[Variable]) -> Any:
    """Return an op that keeps a value, since Grappler drops what nobody reads."""
    variable = Variable(name, tuple(value.shape), device, 1.0)
    variables.append(variable)
    handle = variable.handle()
    with tf.device(device):
        return raw.AssignVariableOp(resource=handle, value=value)


def _slope_us(
    devices: Devices, ends: Ends, counts: Tuple[int, int], over_host: bool = False
) -> float:
    variables: List[Variable] = []
    with tf.Graph().as_default() as graph:
        steps = [ends(count, variables) for count in counts]
        unlike = {variable.name: variable for variable in variables}
        fill = tf.group(*(variable.fill() for variable in unlike.values()))
        if over_host:
            send_over_host(graph, devices)
    with devices.session(graph) as session:
        session.run(fill)
        times = [_median_ms(session.make_callable(step)) for step in steps]
    return _us(times, counts[1] - counts[0])


def _median_ms(step: Callable[[], Any]) -> float:
    """Return the median of some steps, in ms; the first two warm up."""
    return statistics.median(timed_rounds({"": step}, 2 + ROUNDS)[""][2:])


def _us(times: Sequence[float], more: int) -> float:
    return round((times[1] - times[0]) / more * 1e3, 2)
