"""Predicted and executed times of plans, as a table.

::

    python -m tunnel                                      docs/tunnel.md's first table: idle machines
    python -m tunnel --training                           its second one: plans for a backward pass, and that pass
    python -m tunnel dgx-a100 --bytes 1e8                 one machine, one size
    python -m tunnel dgx-a100:0,1,2 --arrival 20e-6       three of its devices, 20 µs of the host for each arrival
    python -m tunnel --lanes 4                            the table of docs/lanes.md: plans with and without lanes
    python -m tunnel --lanes 4 --training                 the same for a backward pass
"""

import argparse
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from hier_allreduce.formatting import marked
from hier_allreduce.planning import IDLE, alternatives, best_plan, named
from hier_allreduce.topology import load, subset

_FILES = Path(__file__).resolve().parents[1] / "tests" / "topology" / "nvidia_smi"
MACHINES = (
    "dgx-1v",
    "nvlink-bridges",
    "8x-a800-80gb-pcie-sys-pix-nv8-nic2",
    "dgx-1v-azure",
    "pcie-sockets",
    "nvlink-bridges:0,1,2,3,4",
    "dgx-a100",
    "nvlink-bridges:0,1,2,3,4,5,6",
    "8x-rtx-4090-sys-pxb-pix-nic2",
)
SIZES = (10**6, 10**8)
LANES_SIZES = (10**8, 10**9)
TRAINING = ("dgx-1v", "dgx-1p", "nvlink-bridges", "pcie-pairs", "pcie-sockets", "dgx-a100", "p3.8xlarge")
TRAINING += ("8x-a800-80gb-pcie-sys-pix-nv8-nic2", "8x-rtx-4090-sys-pxb-pix-nic2", "h100-nvl-4")
LANES_MACHINES = ("dgx-1v", "dgx-1p", "nvlink-bridges", "pcie-sockets", "dgx-a100")


def machine(name, arrival=0.0):
    """A preset or a file in tests/topology/nvidia_smi, or a path, with ``:0,1,2`` for a part of its devices."""
    base, _, part = name.partition(":")
    file = _FILES / f"{base}.txt"
    topology = load(str(file) if file.exists() else base)
    if part:
        topology = subset(topology, [int(device) for device in part.split(",")])
    return replace(topology, speeds=replace(topology.speeds, arrival=arrival)) if arrival else topology


def executed(found, ordered=True):
    """The seconds that TensorFlow takes for a plan: all of them, or those after the backward pass."""
    from .emulation import Run

    run = Run(found.plan, found.topology, found.plan.sizes(found.size), ordered, found.backward)
    try:
        return run.seconds() - found.backward.seconds, run.before_its_turn()
    finally:
        run.close()


def row(topology, name, size, backward, lanes, algorithm):
    """A row of the table as text, and each plan's executed over predicted time."""
    found = best_plan(topology, size, backward, algorithm, lanes)
    seconds, overtaken = executed(found)
    unordered, _ = executed(found, ordered=False)
    others = [best_plan(topology, size, backward, lanes=0)] if lanes else alternatives(found, 1)
    times = [executed(other)[0] for other in others]
    columns = [
        name.replace(":0,1,2,3,4,5,6", ", 7 of 8").replace(":0,1,2,3,4", ", 5 of 8"),
        f"{size / 1e6:g} MB",
        f"{found.plan.algorithm}{f' over {found.plan.lanes} lanes' if found.plan.lanes else ''}",
        f"{found.buckets}, {found.plan.chunks}, {found.plan.copies}",
        f"{_us(found.seconds)} / {_us(seconds)}",
        _us(unordered),
        f"{overtaken}",
        *(f"{other.plan.algorithm} {_us(other.seconds)} / {_us(taken)}" for other, taken in zip(others, times)),
        f"{found.bound / seconds:.0%}",
    ]
    ratios = [seconds / found.seconds, *(taken / other.seconds for other, taken in zip(others, times))]
    return f"| {' | '.join(columns)} |", ratios


def _us(seconds):
    return f"{seconds * 1e6:.0f}"


HEAD = (
    "machine",
    "bytes",
    "plan",
    "buckets, chunks, copies",
    "ours",
    "ours in TensorFlow's own order",
    "copies out of order",
    "next best",
    "of the bound",
)


def main(argv=None):
    """Print the table, and write it into a page."""
    parser = argparse.ArgumentParser(prog="python -m tunnel", description=__doc__.split("\n")[0])
    parser.add_argument("machines", nargs="*", metavar="MACHINE")
    parser.add_argument("--bytes", nargs="+", type=lambda text: int(float(text)), metavar="SIZE")
    parser.add_argument("--arrival", type=float, default=0.0, metavar="SECONDS", help="of the host, for each copy")
    parser.add_argument("--lanes", type=int, default=0, metavar="L", help="compare plans with and without lanes")
    parser.add_argument("--algorithm", default="auto", metavar="NAME", help="a name, or your FILE.py:FUNCTION")
    parser.add_argument("--training", action="store_true", help="during a backward pass, 100 MB")
    parser.add_argument("--page", metavar="FILE", help="put the table between the <!-- tunnel --> marks of FILE")
    args = parser.parse_args(argv)
    from .emulation import CannotBuild, library

    try:
        library()
    except CannotBuild as error:
        print(f"tunnel: {error}", file=sys.stderr)
        return 2
    head = [name.replace("next best", "without lanes") for name in HEAD] if args.lanes else HEAD
    lines, ratios = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)], []
    print(*lines, sep="\n", flush=True)
    names = LANES_MACHINES if args.lanes else TRAINING if args.training else MACHINES
    sizes = (10**8,) if args.training else LANES_SIZES if args.lanes else SIZES
    for name in args.machines or names:
        for size in args.bytes or sizes:
            backward = None if args.training else IDLE
            line, own = row(machine(name, args.arrival), name, size, backward, args.lanes, named(args.algorithm))
            print(line, flush=True)
            lines.append(line)
            ratios += own
    off = [abs(ratio - 1) for ratio in ratios]
    lines += ["", f"Executed and predicted differ by {statistics.median(off):.1%} (median), {max(off):.1%} (worst)."]
    print(*lines[-2:], sep="\n")
    if args.page:
        mark = "tunnel training" if args.training else "tunnel"
        page = Path(args.page)
        page.write_text(marked(page.read_text(encoding="utf-8"), mark, "\n".join(lines)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
