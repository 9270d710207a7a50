"""A training step with each all-reduce on emulated machines, by TensorFlow's own executor.

::

    python benchmarks/emulated.py dgx-1v,pcie-pairs resnet50 --json FILE --picture FILE
    python benchmarks/emulated.py dgx-1v resnet50 --sweep

Each cell is a machine, a model and a share: how much of the kernels' time the host is busy
launching them. That share decides how far the host is ahead of the GPUs. A cell runs in its own
process; a round runs one step of each all-reduce in random order. *Exposed* is the time of a step
minus the median step without an all-reduce.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

from baselines import BASELINES, OF_8_TOWERS
from emulated_cell import MIB, OURS, Cell, work_of
from emulation import environment
from machines import load_machine
from picture import draw
from sweep import sweep_table, swept
from tables import anchors_table, cell_table, summary

HERE = Path(__file__).parent
ABOUT = """\
Emulated: the GPUs, their kernels (they compute nothing and take their time), the links, the pace
of the host. Real: TensorFlow {tensorflow} with its executor and Grappler, all graphs, all code of
the all-reduces. Milliseconds of the emulated machine; medians (least to most) of the rounds.
"""
# A step is stretched to so long, at least by 8: then an op costs the host of 2 cores below 10 µs of
# the emulated machine, about as much as on a machine with GPUs. By 3 it cost 22 µs.
STEP_SECONDS = 1.1
LEAST_SCALE = 8.0
MOST_SCALE = 12.0
ANCHOR_MACHINE = "dgx-1p"


class Anchor(NamedTuple):
    """An all-reduce without a backward pass whose time is known from elsewhere."""

    what: str
    model: str
    name: str
    known_ms: float
    source: str


def anchors() -> List[Anchor]:
    """Return TensorFlow's two groups on a DGX-1 with P100, and a copy at its link's speed."""
    link = load_machine(ANCHOR_MACHINE).links[0, 1]
    copy_ms = 1e3 * (link.seconds + 64 * MIB / link.bytes_per_second)
    published = "reported for tf_cnn_benchmarks, hierarchical_copy; no address"
    return [
        Anchor("two groups, 51 MB in 8 packs", "51 MB in 8", "tensorpack", 10.0, published),
        Anchor("two groups, 51 MB in 161 tensors", "51 MB in 161", "tensorpack", 26.0, published),
        Anchor("copy of 64 MiB, GPU 0 to 1", "64 MiB in 1", "copy 0 to 1", copy_ms, "the link"),
    ]


def run(cell: Cell, trace: Optional[str] = None) -> List[Dict[str, Any]]:
    """Measure a cell in a process of its own, and return a result for each share of the host.

    Raises:
        SystemExit: the process failed; its output stands above.
    """
    around = environment(load_machine(cell.machine), cell.scale, trace)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cell.json")
        command = [sys.executable, str(HERE / "emulated_cell.py"), json.dumps(cell._asdict())]
        ended = subprocess.run([*command, str(path)], env=around, stderr=subprocess.PIPE, text=True)
        if ended.returncode:
            raise SystemExit(f"{ended.stderr}\n{cell} failed")
        results: List[Dict[str, Any]] = json.loads(path.read_text("utf-8"))
    return results


def scale_of(model: str) -> float:
    """Return a scale by which a step takes about a second, from 8 to 12."""
    return min(MOST_SCALE, max(LEAST_SCALE, STEP_SECONDS / (1e-3 * work_of(model).kernels_ms)))


def names_for(machine: str, options: argparse.Namespace) -> List[str]:
    """Return the all-reduces that run on a machine."""
    gpus = load_machine(machine).gpus
    if options.only:
        return list(options.only.split(","))
    if options.sweep:
        return swept(gpus)
    left_out = {"tensorpack cpu", *(() if gpus == 8 else OF_8_TOWERS)}
    return [OURS, *(name for name in BASELINES if name not in left_out)]


def run_anchors(scale: float) -> List[Dict[str, Any]]:
    """Return the anchors, with the milliseconds that are emulated."""
    found = []
    for anchor in anchors():
        cell = Cell(ANCHOR_MACHINE, anchor.model, [0.0], scale, False, 5, [anchor.name])
        (result,) = run(cell)
        emulated = result["contenders"][anchor.name]["median_ms"]
        found.append({**anchor._asdict(), "emulated_ms": emulated, "cell": result})
    return found


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
        "tensorflow": version("tensorflow_cpu"),
        "cores": len(os.sched_getaffinity(0)),
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def main() -> None:
    """Measure the cells, print their tables, and write the JSON file and the picture."""
    options = parser().parse_args()
    where = about()
    print(ABOUT.format(**where), flush=True)
    results: Dict[str, Any] = {"cells": [], "anchors": [], **where}
    for machine, model in itertools.product(options.machines, options.models):
        scale = options.scale or scale_of(model)
        names = names_for(machine, options)
        cell = Cell(machine, model, options.host, scale, not options.sum, options.rounds, names)
        found = run(cell)
        print(f"{cell_table(found)}\n", flush=True)
        results["cells"] += found
        write(results, options.json)  # after each cell: an interrupted run keeps what it has
    if options.sweep:
        print(sweep_table(results["cells"]))
    elif not options.only:
        print(f"{summary(results['cells'])}\n")
        results["anchors"] = run_anchors(MOST_SCALE)
        print(anchors_table(results["anchors"]))
        write(results, options.json)
    if options.picture:
        draw(results, options.picture)


def write(results: Dict[str, Any], path: Optional[str]) -> None:
    """Write the results as JSON, if there is a path."""
    if path is not None:
        Path(path).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    described = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = described.add_argument
    add("machines", type=words, metavar="MACHINES", help="of benchmarks/machines, with commas")
    add("models", type=words, metavar="MODELS", help="of benchmarks/models, with commas")
    add("--host", type=shares, default=[0.2, 0.8], help="shares of the kernels' time (0.2,0.8)")
    add("--scale", type=float, help="stretch times by this (8 to 12)")
    add("--rounds", type=int, default=4, metavar="N", help="measured steps of each (4)")
    add("--sum", action="store_true", help="the sum instead of the mean")
    add("--only", metavar="NAMES", help="these all-reduces: ours,tree/8,tensorpack packed")
    add("--sweep", action="store_true", help="all algorithms × 1 to 64 MiB")
    add("--json", metavar="FILE", help="write each round's milliseconds")
    add("--picture", metavar="FILE", help="draw the exposed times into a .png, .svg or .pdf")
    return described


def words(text: str) -> List[str]:
    """Return the parts of a list with commas."""
    return text.split(",")


def shares(text: str) -> List[float]:
    """Return numbers from a list with commas."""
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
