"""A training step with each all-reduce on real GPUs.

The machine's GPUs are used; if there are fewer than --gpus, logical ones are cut from the first.
Steps are those of emulated.py: a forward and a backward pass of kernels that compute nothing
useful, all gradients of a model, the all-reduce, and updates. TensorFlow, copies, sums and updates
are real. A round runs one step of each all-reduce, in random order. Exposed is the time of a step
minus the median step without an all-reduce.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import json
import os
import re
import sys
from datetime import date
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import calibration
import numpy as np
import tensorflow as tf
from baselines import BASELINES, prepare, why_not
from candidates import all_reduce, check_names
from over_host import send_over_host
from picture import draw
from ratios import COMPARED, OURS, WITHOUT_EDGES, baselines_in
from real_devices import Devices, find
from real_tower import CALIBRATED, HOST_WORK, RealTower, Scans
from rounds import NOTHING, Load, Step, exposed, timed_rounds
from shapes import load_model
from tables import cell_table, check_files, list_of, summary, write
from training_step import Pass, load_pass, training_step

from hier_allreduce import __version__

tf1 = tf.compat.v1

# CUDA reads from it how many hardware queues a chip has for a program.
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
USUAL_QUEUES, MOST_QUEUES = "8", "32"

EXAMPLES = """\
examples:
  python benchmarks/real.py --json mine.json                 all GPUs, ResNet-50, some minutes
  python benchmarks/real.py --gpus 8 --models bert_base      8 GPUs, or 8 logical ones of the first
  python benchmarks/real.py --gpus 8 --over host             slow links: each copy over the host
  python benchmarks/real.py --only "ours,tree/8,ours without edges" --trace build/traces
  python benchmarks/real.py --cpu --gpus 2 --models mobilenet_v2 --passes 1 --rounds 2   a trial

The JSON has every round, the calibration and the names of GPU and TensorFlow, and nothing else of
your machine. Please attach it to an issue: https://github.com/hier-allreduce/hier_allreduce/issues
"""


class Runner(NamedTuple):
    """A session that has run a step once, and the step for so many int32 on the host."""

    session: Any
    step: Any
    feed: Any
    about: Dict[str, Any]

    def with_host(self, ints: Any) -> Step:
        """Return the step that keeps the host busy by adding these integers."""
        return functools.partial(self.session.make_callable(self.step, [self.feed]), ints)


def main() -> None:
    """Measure the cells, print tables, and write the JSON file, the picture and the traces."""
    options = parser().parse_args()
    devices = find(options.gpus, options.cpu, options.memory)
    if devices.logical_mb and QUEUES not in os.environ:
        # Logical GPUs share one chip's queues: of the usual 8, streams wait for other towers'. CUDA
        # has read the variable by now, so that this program begins again.
        more = {**os.environ, QUEUES: MOST_QUEUES}
        os.execve(sys.executable, [sys.executable, *sys.argv], more)
    names = names_for(devices, options)
    check(names, options)
    prepare(names)
    devices.check()
    print(f"{devices.machine}, TensorFlow {tf.__version__}", flush=True)
    costs = calibrate(devices, options.over == "host", any(options.passes))
    print(f"calibrated: {json.dumps(costs)}\n", flush=True)
    results: Dict[str, Any] = {**about(devices), "calibration": costs, "cells": []}
    for model in options.models:
        for pass_ms in options.passes:
            try:
                cells = measure(devices, names, (model, pass_ms), costs, options)
            except tf.errors.ResourceExhaustedError:
                raise SystemExit(
                    f"{model}, pass {pass_ms:g}: out of memory. All all-reduces of a cell have"
                    " their variables at once: name fewer of them (--only), or take fewer --gpus"
                ) from None
            print(f"{cell_table(cells)}\n", flush=True)
            results["cells"] += cells
            write(results, options.json)  # after each cell: an interrupted run keeps what it has
    if all(OURS in cell["contenders"] and baselines_in(cell) for cell in results["cells"]):
        print(summary(results["cells"]))
    if options.picture:
        draw(results, options.picture)


def check(names: List[str], options: Any) -> None:
    """Check what would otherwise fail after minutes of measuring.

    Raises:
        SystemExit: no such model or all-reduce, or no place for the results.
        ModuleNotFoundError: matplotlib is missing.
    """
    for model in options.models:
        load_model(model)
    check_names(names)
    check_files(options.json, options.picture)


def calibrate(devices: Devices, over_host: bool, has_pass: bool) -> Dict[str, Any]:
    """Return what the machine costs, as the JSON has it; scans only if they are needed."""
    count = devices.towers
    ring = [(number, (number + 1) % count) for number in range(count)]
    costs: Dict[str, Any] = {
        "op_us": {one: calibration.op_us(devices, one) for one in sorted({1, count})},
        "scan_us": calibration.scan_us(devices, CALIBRATED) if has_pass else {},
        "host_us": calibration.addition_us(devices),
    }
    if count > 1 and devices.kind == "gpu":
        copies = functools.partial(calibration.copy_gbs, devices, over_host=over_host)
        costs["hop_us"] = calibration.hop_us(devices, over_host)
        costs["copy_gbs"] = {f"{src}-{dst}": round(copies([(src, dst)]), 1) for src, dst in ring}
        costs["copy_gbs"]["ring"] = round(copies(ring), 1)
    return costs


def measure(
    devices: Devices,
    names: List[str],
    place: Tuple[str, float],
    costs: Dict[str, Any],
    options: Any,
) -> List[Dict[str, Any]]:
    """Run all-reduces in rounds, and return a result for each share of the host.

    ``place`` is the model, and the ms of ResNet-50's backward pass.
    """
    model, pass_ms = place
    work = load_pass(model, pass_ms)
    runners: Dict[str, Runner] = {}
    with contextlib.ExitStack() as stack:
        for name in [NOTHING, *names]:
            runners[name] = stack.enter_context(_runner(name, devices, work, costs, options))
        shared = {
            "machine": devices.machine,
            "model": model,
            "pass_ms": pass_ms,
            "average": not options.sum,
            "rounds": options.rounds,
            "kind": "real" if devices.kind == "gpu" else "cpu",
            "over": options.over,
            "gpus": devices.towers,
            "kernels_ms": round(work.kernels_ms, 3),
            "op_us": costs["op_us"][devices.towers],
        }
        results = []
        for host in options.host:
            kernel_us = 1e3 * host * work.kernels_ms / max(1, work.kernels)
            count = calibration.additions_lasting(kernel_us, costs["host_us"])
            ints = np.ones(count, np.int32)
            steps = {name: runner.with_host(ints) for name, runner in runners.items()}
            timed_rounds(steps, 1)
            load = Load()
            times = timed_rounds(steps, options.rounds)
            facts = exposed(times, {name: runner.about for name, runner in runners.items()})
            seen = {"ints": count, "other_cores": load.of_others()}
            results.append({**shared, "host": host, **facts, **seen})
            if options.trace:
                _trace(runners, ints, Path(options.trace), f"{model}-{pass_ms:g}-{host:g}")
    return results


@contextlib.contextmanager
def _runner(name: str, devices: Devices, work: Pass, costs: Dict[str, Any], options: Any) -> Any:
    """Yield a session with the step of an all-reduce, which has run once."""
    scans = Scans(costs["scan_us"]) if work.kernels else None
    new_tower: Callable[[int, str], RealTower] = functools.partial(RealTower, scans=scans)
    reduce = None if name == NOTHING else all_reduce(name)
    built = training_step(work, devices.names, reduce, not options.sum, new_tower)
    facts: Dict[str, Any] = {}
    if options.over == "host":
        facts["over_host"] = send_over_host(built.graph, devices)._asdict()
    feed = built.graph.get_tensor_by_name(f"{HOST_WORK}:0")
    with devices.session(built.graph) as session:
        session.run(built.fill)
        runner = Runner(session, built.step, feed, facts)
        runner.with_host(np.ones(1, np.int32))()  # Grappler works in the first step
        yield runner


def _trace(runners: Dict[str, Runner], ints: Any, folder: Path, name: str) -> None:
    """Write the StepStats of one step of each, as ``tf.compat.v1.profiler`` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    for contender, runner in runners.items():
        seen = tf1.RunMetadata()
        asked = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE)
        runner.session.run(runner.step, {runner.feed: ints}, asked, seen)
        path = folder / f"{re.sub('[^a-z0-9]+', '-', contender.lower())}-{name}.pb.gz"
        path.write_bytes(gzip.compress(seen.step_stats.SerializeToString()))


def names_for(devices: Devices, options: Any) -> List[str]:
    """Return the all-reduces to run, and print why baselines are left out."""
    names = [OURS, OURS + WITHOUT_EDGES, "hierarchical/4", *COMPARED]
    if options.only:
        names = options.only.split(",")
    reason_by_name = {name: why_not(name, devices.towers) for name in names}
    for name, reason in reason_by_name.items():
        if reason:
            print(f"{name} is left out: {reason}")
    return [name for name in names if not reason_by_name[name]]


def about(devices: Devices) -> Dict[str, Any]:
    """Return what the JSON says about the machine."""
    return {
        "date": date.today().isoformat(),
        "kind": "real" if devices.kind == "gpu" else "cpu",
        "gpu": devices.what,
        "logical": bool(devices.logical_mb),
        "queues": int(os.environ.get(QUEUES, USUAL_QUEUES)),
        "tensorflow": tf.__version__,
        "hier_allreduce": __version__,
        "cores": os.cpu_count(),
    }


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    described = argparse.ArgumentParser(
        prog="python benchmarks/real.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = described.add_argument_group("the machine").add_argument
    where("--gpus", type=int, default=0, metavar="K", help="all GPUs; of one GPU, 2 logical ones")
    where("--memory", type=int, default=0, metavar="MB", help="of each logical GPU (80 %% of all)")
    over = "gpu: as TensorFlow copies; host: over the host, as without peer access (gpu)"
    where("--over", choices=("gpu", "host"), default="gpu", help=over)
    where("--cpu", action="store_true", help="CPU devices, to try this program without a GPU")
    what = described.add_argument_group("the steps").add_argument
    words, numbers = list_of(str), list_of(float)
    what("--models", type=words, default=["resnet50"], help="of benchmarks/models (resnet50)")
    passes = "ms of ResNet-50's backward pass; others' are as their bytes; 0: no pass (60)"
    what("--passes", type=numbers, default=[60.0], metavar="MS", help=passes)
    host = "for which shares of the kernels' time the host is busy (0,0.5)"
    what("--host", type=numbers, default=[0.0, 0.5], metavar="SHARES", help=host)
    what("--rounds", type=int, default=9, metavar="N", help="measured steps of each (9)")
    what("--sum", action="store_true", help="the sum instead of the mean")
    ours = f"ours, ALGORITHM/MiB, and these with {WITHOUT_EDGES!r} after them"
    names = f"some of: {', '.join(BASELINES)}, {ours}"
    what("--only", metavar="NAMES", help=names)
    out = described.add_argument_group("the results").add_argument
    out("--json", metavar="FILE", help="each round's milliseconds")
    out("--picture", metavar="FILE", help="the exposed times, as .png, .svg or .pdf")
    out("--trace", metavar="FOLDER", help="one traced step of each, as gzipped StepStats")
    return described


if __name__ == "__main__":
    main()
