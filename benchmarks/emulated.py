"""A training step with each all-reduce on emulated machines, by TensorFlow's own executor.

::

    python benchmarks/emulated.py dgx-1v,pcie-pairs resnet50 --json FILE --picture FILE
    python benchmarks/emulated.py --published        # measures what results/published lacks
    python benchmarks/emulated.py dgx-1v resnet50 --sweep

It begins with the anchors: steps that a real GPU has timed, too. Each cell is a machine, a model, a
backward pass and a share: how much of the kernels' time the host is busy launching them. That share
decides how far the host is ahead of the GPUs. A cell runs in its own process. *Exposed* is the time
of a step minus the median step without an all-reduce. Nothing else should run meanwhile: a cell
notes what did, and is refused above a limit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import tensorflow as tf
from anchors import anchors_table, to_emulate
from baselines import why_not
from emulated_cell import MOST_OP_ERROR, OP_TOO_DEAR, Cell
from emulation import environment
from machines import load_machine
from picture import draw
from ratios import COMPARED, OURS, WITHOUT_EDGES
from rounds import FUNCTION
from sweep import sweep_table, swept
from tables import cell_table, check_files, faulty, list_of, summary, write

HERE = Path(__file__).parent
PUBLISHED = HERE / "results" / "published"
REFUSED = HERE.parent / "build" / "refused"
ABOUT = """\
Emulated: the GPUs, their kernels (they compute nothing and take their time), the links, the pace
of the host. Real: TensorFlow {tensorflow} with its executor and Grappler, all graphs, all code of
the all-reduces. Milliseconds of the emulated machine; medians (least to most) of the rounds.
"""
# An op keeps a core of this machine for so long, by the chains of ops that a cell begins with, on
# two cores of 2.7 GHz. Times are stretched until it costs the host what it does with real GPUs.
OP_CORE_US = 37.0
LEAST_SCALE = 8.0
# Where an op is too dear nevertheless, on slower or busy cores, times are stretched as it asks.
MARGIN, MOST_STARTS = 1.05, 4

PASSES_MS = [60.0, 20.0]  # ResNet-50's backward pass on a V100, and on a GPU three times as fast
HOSTS = [0.2, 0.8]

# A cell is refused above these limits.
MOST_OTHER_CORES = 0.25  # that other programs use
# For so long a thread was due and did not run, in ms of this machine. Where no other program runs,
# the threads of 8 GPUs keep each other from 2 cores for up to 16 ms: all published cells say how
# long. Programs beside them made holes of 36 to 50 ms, when the threads had real-time priority.
MOST_GAP_MS = 25.0
SOME_REFUSED = "some cells are refused: measure them again when nothing else runs"

# The order of what is published: first the machines that differ most.
MACHINES = (
    "dgx-1v",
    "pcie-pairs",
    "dgx-a100",
    "4x-rtx-4090",
    "pcie-switch",
    "dgx-1p",
    "2x-rtx-5090",
)
MODELS_AND_PASSES = (
    ("resnet50", 60.0),
    ("resnet50", 20.0),
    ("bert_base", 20.0),
    ("vgg16", 20.0),
    ("bert_base", 60.0),
    ("vgg16", 60.0),
)


def run(cell: Cell, trace: Optional[str] = None) -> List[Dict[str, Any]]:
    """Measure a cell in a process of its own, and return a result for each share of the host.

    It begins again, with times that are stretched more, where an op costs this machine too much.

    Raises:
        SystemExit: the process failed; its output stands above.
    """
    asked_us = load_machine(cell.machine).op_us
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cell.json")
        for _ in range(MOST_STARTS):
            around = environment(load_machine(cell.machine), cell.scale, trace)
            command = [sys.executable, str(HERE / "emulated_cell.py"), json.dumps(cell._asdict())]
            ended = subprocess.run(
                [*command, str(path)], env=around, stderr=subprocess.PIPE, text=True
            )
            if ended.returncode != OP_TOO_DEAR:
                break
            dearer = json.loads(path.read_text("utf-8")) / asked_us
            cell = cell._replace(scale=round(MARGIN * dearer * cell.scale, 1))
        if ended.returncode:
            raise SystemExit(f"{ended.stderr}\n{cell} failed")
        results: List[Dict[str, Any]] = json.loads(path.read_text("utf-8"))
    return results


def fault_of(result: Dict[str, Any]) -> Optional[str]:
    """Return why a result is refused; None if it is not."""
    others, gap = result["other_cores"], result["longest_gap_ms"]
    asked = load_machine(result["machine"]).op_us
    if others is not None and others > MOST_OTHER_CORES:
        return f"other programs used {others:.2f} cores"
    if gap * result["scale"] > MOST_GAP_MS:
        return f"a thread was due and did not run for {gap * result['scale']:.0f} ms"
    if abs(result["op_us"] / asked - 1) > MOST_OP_ERROR:
        return f"an op costs {result['op_us']:.1f} µs instead of {asked:.1f} (see --scale)"
    return None


def scale_of(name: str) -> float:
    """Return the scale by which this machine has the time for the ops of an emulated one."""
    machine = load_machine(name)
    op_us = OP_CORE_US * machine.gpus / len(os.sched_getaffinity(0))
    return round(max(LEAST_SCALE, op_us / machine.op_us), 1)


def usual_names(machine: str) -> List[str]:
    """Return ours, with and without control edges and in a tf.function, and all baselines."""
    towers = load_machine(machine).gpus
    baselines = [name for name in COMPARED if not why_not(name, towers)]
    return [OURS, OURS + WITHOUT_EDGES, OURS + FUNCTION, *baselines]


def names_for(machine: str, options: argparse.Namespace) -> List[str]:
    """Return the all-reduces that run on a machine."""
    names = usual_names(machine)
    if options.only:
        names = list(options.only.split(","))
    elif options.sweep:
        names = swept(load_machine(machine).gpus)
    return [name + WITHOUT_EDGES for name in names] if options.without_edges else names


def anchor_cells(rounds: int) -> Iterator[Cell]:
    """Yield the cells that a real GPU has timed, too."""
    for (machine, model, pass_ms), (hosts, names) in to_emulate().items():
        scale = scale_of(machine)
        yield Cell(machine, model, pass_ms, hosts, scale, True, rounds, names)


def published_cells(rounds: int) -> Iterator[Cell]:
    """Yield the cells that are published, the most important ones first."""
    yield from anchor_cells(rounds)
    for (model, pass_ms), machine in itertools.product(MODELS_AND_PASSES, MACHINES):
        scale = scale_of(machine)
        yield Cell(machine, model, pass_ms, HOSTS, scale, True, rounds, usual_names(machine))


def about() -> Dict[str, Any]:
    """Return where and when the cells were measured."""
    commit = subprocess.run(
        ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"],
        stdout=subprocess.PIPE,
        text=True,
    )
    return {
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip() or None,
        "tensorflow": tf.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def measured(cell: Cell) -> List[Dict[str, Any]]:
    """Measure a cell, print its table, and return its results; a refused one says why."""
    results = run(cell)
    for result in results:
        fault = fault_of(result)
        if fault:
            result["refused"] = fault
    print(f"{cell_table(results)}\n", flush=True)
    return results


def publish(options: argparse.Namespace) -> int:
    """Measure the published cells that have no file yet, and return how many were refused."""
    for folder in (PUBLISHED, REFUSED):
        folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    refused = 0
    for cell in published_cells(options.rounds):
        name = f"{cell.machine}-{cell.model}-{cell.pass_ms:g}.json"
        if (PUBLISHED / name).exists():
            continue
        minutes = (time.monotonic() - began) / 60
        if options.minutes is not None and minutes > options.minutes:
            print(f"stopped after {minutes:.0f} minutes; the same command goes on")
            break
        print(f"after {minutes:.1f} minutes: {name}", flush=True)
        where = about()
        cells = measured(cell)
        is_refused = bool(faulty(cells))
        refused += is_refused
        write({**where, "cells": cells}, str((REFUSED if is_refused else PUBLISHED) / name))
    print(f"{refused} cells were refused (in {REFUSED}); the same command measures them again")
    return refused


def main() -> None:
    """Measure the cells, print their tables, and write the JSON file and the picture."""
    options = parser().parse_args()
    check_files(options.json, options.picture)
    where = about()
    print(ABOUT.format(**where), flush=True)
    if options.published:
        raise SystemExit(min(1, publish(options)))
    results: Dict[str, Any] = {**where, "anchors": [], "cells": []}
    if options.anchors:
        for cell in anchor_cells(options.rounds):
            results["anchors"] += measured(cell)
            write(results, options.json)
        print(f"{anchors_table(results['anchors'])}\n", flush=True)
    for machine, model, pass_ms in itertools.product(
        options.machines, options.models, options.passes
    ):
        scale = options.scale or scale_of(machine)
        asked = (machine, model, pass_ms, options.host, scale, not options.sum, options.rounds)
        results["cells"] += measured(Cell(*asked, names_for(machine, options), options.ids))
        write(results, options.json)  # after each cell: an interrupted run keeps what it has
    if options.sweep:
        print(sweep_table(results["cells"]))
    elif results["cells"] and not options.only:
        print(f"{summary(results['cells'])}\n")
    if options.picture:
        draw(results, options.picture)
    if faulty(results["cells"] + results["anchors"]):
        raise SystemExit(SOME_REFUSED)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    described = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = described.add_argument
    words, numbers = list_of(str), list_of(float)
    add("machines", nargs="?", type=words, default=[], help="of benchmarks/machines, with commas")
    add("models", nargs="?", type=words, default=[], help="of benchmarks/models, with commas")
    add("--anchors", action="store_true", help="begin with the steps that a real GPU timed, too")
    add("--published", action="store_true", help="measure what results/published lacks")
    add("--minutes", type=float, help="of --published: begin no cell later than this")
    passes = "ms of ResNet-50's backward pass; others' are as their bytes (60,20)"
    add("--passes", type=numbers, default=PASSES_MS, metavar="MS", help=passes)
    add("--host", type=numbers, default=HOSTS, help="shares of the kernels' time (0.2,0.8)")
    add("--scale", type=float, help="stretch times by this (8 to 20)")
    add("--rounds", type=int, default=3, metavar="N", help="measured steps of each (3)")
    add("--sum", action="store_true", help="the sum instead of the mean")
    add("--only", metavar="NAMES", help="these all-reduces: ours,tree/8,tensorpack packed")
    ids = "rows of each embedding that a tower reads; 0: embeddings are left out (0)"
    add("--ids", type=int, default=0, metavar="N", help=ids)
    add("--sweep", action="store_true", help="all algorithms × 1 to 64 MiB")
    add("--without-edges", action="store_true", help="no control edges")
    add("--json", metavar="FILE", help="write each round's milliseconds")
    add("--picture", metavar="FILE", help="draw the exposed times into a .png, .svg or .pdf")
    return described


if __name__ == "__main__":
    main()
