"""Cells of ``emulated.py`` in a process of its own, since a plug-in reads its options once.

    python benchmarks/emulated_cell.py '{"machine": "dgx-1v", …}' FILE

The argument has the keys of :class:`Cell`. FILE gets the result as JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import statistics
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import tensorflow as tf
from baselines import BASELINES, prepare
from candidates import all_reduce, strategy_of
from emulation import POLL_US, plugin
from function_step import function_step, mirrored
from machines import Machine, copies_in, limit, load_machine
from rounds import FUNCTION, NOTHING, PRIVATE, Load, Step, base_of, exposed, timed_rounds
from training_step import (
    Pass,
    TrainingStep,
    chains,
    load_pass,
    tf1,
    training_step,
    updating_step,
)

UPDATE = "update="  # begins the name of a step of a TowerOptimizer
TIMER_SLACK = 29  # of prctl
PRECISE, MOST_TRIES = 0.05, 6  # of an op's price
MOST_OP_ERROR = 0.15  # of the price of an op; a cell is refused above it
OP_TOO_DEAR = 3  # a process ends with it if ops cost more than that, as on slow or busy cores
LEAST_LAUNCH_US = 0.01  # without any, ops would not sleep, and cost next to nothing


class OpTooDear(Exception):
    """An op costs this machine more than it may, in µs of the emulated machine."""

    def __init__(self, op_us: float):
        super().__init__(f"an op costs {op_us:.1f} µs")
        self.op_us = op_us


class Cell(NamedTuple):
    """A machine and a model, and the all-reduces to run.

    Attributes:
        pass_ms: of ResNet-50's backward pass; that of another model is as its bytes. 0: no pass.
        hosts: shares of the kernels' time for which the host is busy launching them.
        scale: by how much all times are stretched.
        ids: the rows of each embedding that a tower reads; with 0 embeddings are left out.
    """

    machine: str
    model: str
    pass_ms: float
    hosts: List[float]
    scale: float
    average: bool
    rounds: int
    names: List[str]
    ids: int = 0


def measure(cell: Cell) -> List[Dict[str, Any]]:
    """Run the all-reduces of a cell in rounds, and return a result for each share of the host.

    Times are milliseconds of the emulated machine.

    Raises:
        OpTooDear: times must be stretched more.
    """
    started = time.perf_counter()
    machine, work = load_machine(cell.machine), load_pass(cell.model, cell.pass_ms, cell.ids)
    devices = [f"/gpu:{number}" for number in range(machine.gpus)]
    prepare(cell.names)
    _run_before_others()
    op_us = _set_price_of_an_op(machine, devices, cell.scale)
    if op_us / machine.op_us - 1 > MOST_OP_ERROR:
        raise OpTooDear(op_us)
    about: Dict[str, Dict[str, Any]] = {}
    # Grappler works in the first step, beside the Python that builds the next graph.
    with ThreadPoolExecutor(1) as first_steps:
        runs: Dict[str, Future[Step]] = {}
        for name in dict.fromkeys([NOTHING, *map(base_of, cell.names), *cell.names]):
            first_run, about[name] = _built(name, work, machine, devices, cell)
            runs[name] = first_steps.submit(first_run)
        steps = {name: run.result() for name, run in runs.items()}
    shared = {
        **{key: value for key, value in cell._asdict().items() if key not in ("hosts", "names")},
        "kind": "emulated",
        "gpus": machine.gpus,
        "kernels_ms": round(work.kernels_ms, 3),
        "op_us": round(op_us, 2),
    }
    results = []
    for host in cell.hosts:
        if work.kernels:
            plugin.set_host_us(1e3 * host * work.kernels_ms / work.kernels)
        load = Load()
        gaps: Dict[str, List[float]] = {name: [] for name in steps}
        watched = {name: _watched(step, gaps[name]) for name, step in steps.items()}
        times = timed_rounds(watched, cell.rounds, cell.scale)
        gap = max(map(statistics.median, gaps.values()))  # one round's do not change a median
        gap_ms = round(1e3 * gap / cell.scale, 3)
        seen = {"other_cores": load.of_others(), "longest_gap_ms": gap_ms}
        seconds = round(time.perf_counter() - started)
        results.append(
            {**shared, "host": host, **exposed(times, about), **seen, "seconds": seconds}
        )
        started = time.perf_counter()
    return results


def _watched(step: Step, gaps: List[float]) -> Step:
    """Return the step; it appends its longest gap."""

    def run() -> None:
        plugin.longest_gap()
        step()
        gaps.append(plugin.longest_gap())

    return run


def _built(
    name: str, work: Pass, machine: Machine, devices: List[str], cell: Cell
) -> Tuple[Callable[[], Step], Dict[str, Any]]:
    """Return what runs a step for the first time and returns it, and what is known about it."""
    started = time.perf_counter()
    if name.endswith(FUNCTION):
        base = name[: -len(FUNCTION)]
        reduce = BASELINES.get(base)
        if reduce is None and base != NOTHING:
            reduce = mirrored(devices, strategy_of(base))
        step = function_step(work, devices, reduce, cell.average)
        about = {"build_s": round(time.perf_counter() - started, 2)}
        return lambda: _has_run(step), about
    threads = "gpu_private" if name.endswith(PRIVATE) else "global"
    name = name.replace(PRIVATE, "")
    if name.startswith(UPDATE):
        built = updating_step(work, devices, name[len(UPDATE) :])
    else:
        reduce = None if name == NOTHING else all_reduce(name)
        built = training_step(work, devices, reduce, cell.average)
    build_s = round(time.perf_counter() - started, 2)
    limit_ms = 1e3 * limit(machine, copies_in(built.graph, devices))
    return lambda: _runner(built, len(devices), cell.scale, threads), {
        "build_s": build_s,
        "limit_ms": round(limit_ms, 3),
    }


def _run_before_others() -> None:
    """Let this process run before others, if it may, and wake up on time.

    Not by real-time priority: Linux keeps real-time threads from a core for 50 ms of each second if
    others want it, and a step would have a hole of 4 ms.
    """
    ctypes.CDLL(None).prctl(TIMER_SLACK, 1, 0, 0, 0)
    with contextlib.suppress(OSError):  # only root may
        for thread in os.listdir("/proc/self/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), -20)


def _runner(built: TrainingStep, towers: int, scale: float, threads: str = "global") -> Step:
    # TensorFlow reads these for each new session.
    os.environ.update(TF_GPU_THREAD_MODE=threads, TF_GPU_THREAD_COUNT="2")
    # At the end of a step a thread of the pool waits for each GPU. With as many threads as cores,
    # GPUs would wait for each other.
    config = tf1.ConfigProto(inter_op_parallelism_threads=3 * towers)
    config.gpu_options.polling_active_delay_usecs = int(POLL_US * scale)
    session = tf1.Session(graph=built.graph, config=config)
    session.run(built.fill)
    if built.start is not None:
        session.run(built.start)
    return _has_run(session.make_callable(built.step))


def _has_run(step: Step) -> Step:
    step()
    return step


def _set_price_of_an_op(machine: Machine, devices: List[str], scale: float) -> float:
    """Let an op cost the host what it costs on the machine, and return the µs that it costs.

    A part is this machine's own work, so the emulated launch takes the rest.
    """
    lengths = (100, 1100)
    steps = [_runner(chains(devices, length), len(devices), scale) for length in lengths]
    tries: Dict[float, float] = {}  # µs of an op, by those of a launch
    launch_us = LEAST_LAUNCH_US
    for _ in range(MOST_TRIES):
        plugin.set_launch_us(launch_us)
        tries[launch_us] = _slope(steps, lengths, scale)
        missing = machine.op_us - tries[launch_us]
        if abs(missing) < PRECISE * machine.op_us:
            break
        launch_us = max(LEAST_LAUNCH_US, launch_us + missing)
    best = min(tries, key=lambda launch: abs(tries[launch] - machine.op_us))
    plugin.set_launch_us(best)
    return tries[best]


def _slope(steps: Sequence[Step], lengths: Sequence[int], scale: float) -> float:
    """Return the µs of an op: the difference of two steps, of which the second has more ops."""
    times = timed_rounds({"short": steps[0], "long": steps[1]}, 5, scale)
    return (min(times["long"]) - min(times["short"])) / (lengths[1] - lengths[0]) * 1e3


def main() -> None:
    """Measure what the first argument says, into the file that the second one names."""
    cell = Cell(**json.loads(sys.argv[1]))
    pool = 3 * load_machine(cell.machine).gpus
    tf.config.threading.set_inter_op_parallelism_threads(pool)  # of functions, as of sessions
    results: Any
    status = 0
    try:
        results = measure(cell)
    except OpTooDear as error:
        print(error, file=sys.stderr)
        results = error.op_us
        status = OP_TOO_DEAR
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(results, file)
    sys.exit(status)


if __name__ == "__main__":
    main()
