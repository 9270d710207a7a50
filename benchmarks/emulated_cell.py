"""Cells of ``emulated.py`` in a process of its own, since a plug-in reads its options once.

    python benchmarks/emulated_cell.py '{"machine": "dgx-1v", …}' FILE

The argument has the keys of :class:`Cell`. FILE gets the result as JSON.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import sys
import time
from typing import Any, Callable, Dict, List, NamedTuple, Sequence

import tensorflow as tf
from baselines import BASELINES, Build
from emulation import plugin
from machines import copies_in, limit, load_machine
from shapes import GradientShape, load_model
from training_step import Pass, TrainingStep, chains, tf1, training_step, usual_pass

from hier_allreduce import Strategy, allreduce_grads

NOTHING = "no all-reduce"
OURS = "ours"
MIB = 1 << 20


class Cell(NamedTuple):
    """A machine and a model, and the all-reduces to run.

    Attributes:
        model: a name, or ``"51 MB in 8"`` for 8 equal gradients without a pass.
        hosts: shares of the kernels' time for which the host is busy launching them.
        scale: by how much all times are stretched.
    """

    machine: str
    model: str
    hosts: List[float]
    scale: float
    average: bool
    rounds: int
    names: List[str]


def work_of(model: str) -> Pass:
    """Return the computation of a model; the gradients of an anchor have none."""
    anchor = re.fullmatch(r"(\d+) (MB|MiB) in (\d+)", model)
    if anchor is None:
        return usual_pass(load_model(model))
    size = int(anchor[1]) * (MIB if anchor[2] == "MiB" else 10**6)
    number = int(anchor[3])
    shape = (size // 4 // number,)
    return Pass([GradientShape(f"gradient{n}", shape) for n in range(number)], backward_ms=1e-3)


def all_reduce(name: str) -> Build:
    """Return a baseline, ours, or ours by an algorithm with chunks of so many MiB: ``tree/8``."""
    if name in BASELINES:
        return BASELINES[name]
    if name == "copy 0 to 1":
        return lambda grads, devices, _: [grads[0], _copied(grads[0], devices[1]), *grads[2:]]
    strategy = Strategy()
    if name != OURS:
        algorithm, size = name.split("/")
        strategy = Strategy(algorithm, chunk_bytes=int(float(size) * MIB))
    return lambda grads, devices, average: allreduce_grads(grads, devices, average, strategy)


def _copied(grads: Sequence[Any], device: str) -> List[Any]:
    with tf.device(device):
        return [tf.identity(grad) for grad in grads]


def measure(cell: Cell) -> List[Dict[str, Any]]:
    """Run the all-reduces of a cell in rounds, and return a result for each share of the host.

    Times are milliseconds of the emulated machine.
    """
    machine, work = load_machine(cell.machine), work_of(cell.model)
    devices = [f"/gpu:{number}" for number in range(machine.gpus)]
    steps: Dict[str, Callable[[], Any]] = {}
    about: Dict[str, Dict[str, Any]] = {}
    for name in [NOTHING, *cell.names]:
        started = time.perf_counter()
        reduce = None if name == NOTHING else all_reduce(name)
        built = training_step(work, devices, reduce, cell.average)
        build_s = time.perf_counter() - started
        limit_ms = 1e3 * limit(machine, copies_in(built.graph, devices))
        about[name] = {"build_s": round(build_s, 2), "limit_ms": round(limit_ms, 3)}
        steps[name] = _runner(built, len(devices))
    is_first = _run_before_others()
    about_cell = cell._asdict()
    del about_cell["hosts"], about_cell["names"]
    shared = {
        **about_cell,
        "gpus": machine.gpus,
        "kernels_ms": round(work.kernels_ms, 3),
        "real_time": is_first,
        "host_us_an_op": round(_cost_of_an_op(devices, cell.scale), 3),
    }
    results = []
    for host in cell.hosts:
        plugin.set_host_us(1e3 * host * work.kernels_ms / work.kernels)
        times = _rounds(steps, cell)
        load = [round(load, 2) for load in os.getloadavg()]
        results.append({**shared, "host": host, **_exposed(times, about), "load": load})
    return results


def _run_before_others() -> bool:
    """Give the threads of this process real-time priority, if it may, against other load."""
    try:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))
    except OSError:  # only root may, on Linux
        return False
    return True


def _exposed(times: Dict[str, List[float]], about: Dict[str, Dict[str, Any]]) -> Dict[str, Any]:
    """Return each contender's steps without the median step that has no all-reduce."""
    base = statistics.median(times[NOTHING])
    contenders = {}
    for name in times:
        if name != NOTHING:
            exposed = [round(step - base, 3) for step in times[name]]
            median = round(statistics.median(exposed), 3)
            contenders[name] = {"exposed_ms": exposed, "median_ms": median, **about[name]}
    rounds = [round(step, 3) for step in times[NOTHING]]
    return {"base_ms": round(base, 3), "base_rounds_ms": rounds, "contenders": contenders}


def _runner(built: TrainingStep, towers: int) -> Callable[[], Any]:
    # At the end of a step a thread of the pool waits for each GPU. With as many threads as cores,
    # GPUs would wait for each other.
    config = tf1.ConfigProto(inter_op_parallelism_threads=3 * towers)
    session = tf1.Session(graph=built.graph, config=config)
    session.run(built.fill)
    step = session.make_callable(built.step)
    step()  # Grappler works in the first step
    return step


def _rounds(steps: Dict[str, Callable[[], Any]], cell: Cell) -> Dict[str, List[float]]:
    """Return the ms of each step; the order of a round is random, so that load meets all alike."""
    times: Dict[str, List[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for _ in range(cell.rounds):
        for name in order.sample(sorted(steps), len(steps)):
            started = time.perf_counter()
            steps[name]()
            times[name].append((time.perf_counter() - started) / cell.scale * 1e3)
    return times


def _cost_of_an_op(devices: List[str], scale: float) -> float:
    """Return the µs that an op costs the host while all GPUs run: the slope over long chains."""
    seconds = []
    for length in (200, 1200):
        step = _runner(chains(devices, length), len(devices))
        runs = []
        for _ in range(3):
            started = time.perf_counter()
            step()
            runs.append(time.perf_counter() - started)
        seconds.append(min(runs))
    return (seconds[1] - seconds[0]) / 1000 * 1e6 / scale


def main() -> None:
    """Measure what the first argument says, into the file that the second one names."""
    tf1.disable_eager_execution()
    results = measure(Cell(**json.loads(sys.argv[1])))
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
