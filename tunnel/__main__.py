"""Predicted and executed times of plans, as a table.

::

    python -m tunnel                                      the table of docs/tunnel.md (some 3 minutes)
    python -m tunnel dgx-a100 --bytes 1e8                 one machine, one size
    python -m tunnel dgx-a100:0,1,2 --arrival 20e-6       three of its devices, 20 µs of the host for each arrival
    python -m tunnel --lanes 4                            the table of docs/lanes.md: plans with and without lanes
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
from hier_allreduce.planning import choose, pack
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
LANES_MACHINES = ("dgx-1v", "dgx-1v-azure", "dgx-1p", "nvlink-bridges", "pcie-sockets", "dgx-a100", "dgx-h100")
SIZES = (10**6, 10**7, 10**8, 10**9)
OTHERS = ("two-group", "tree", "flat", "ring")


def machine(name, arrival=0.0):
    """A preset or a file in tests/topology/nvidia_smi, or a path, with ``:0,1,2`` for a part of its devices."""
    base, _, part = name.partition(":")
    file = _FILES / f"{base}.txt"
    topology = load(str(file) if file.exists() else base)
    if part:
        topology = subset(topology, [int(device) for device in part.split(",")])
    return replace(topology, speeds=replace(topology.speeds, arrival=arrival)) if arrival else topology


def cell(topology, size, algorithm, ordered=True, lanes=0):
    """One plan: the choice, and its seconds as TensorFlow executed it."""
    from .emulation import Run

    choice = choose(topology, size, algorithm, lanes)
    run = Run(choice.plan(), topology, choice.sizes(), ordered)
    try:
        return choice, run.seconds()
    finally:
        run.close()


def row(name, size, arrival):
    """A row of the table as text, and each plan's executed over predicted time."""
    topology = machine(name, arrival)
    choice, seconds = cell(topology, size, None)
    _, unordered = cell(topology, size, None, ordered=False)
    others = {other: cell(topology, size, other) for other in OTHERS}
    executed = {other: taken for other, (_, taken) in others.items()}
    columns = [
        name.replace(":0,1,2,3,4,5,6", ", 7 of 8").replace(":0,1,2,3,4", ", 5 of 8"),
        f"{size / 1e6:g} MB",
        f"{choice.recipe.algorithm}, {len(choice.recipe.fractions)}",
        f"{_us(choice.seconds)} / {_us(seconds)}",
        _us(unordered),
        f"{choice.bound / seconds:.0%}",
        *(f"{_us(other.seconds)} / {_us(taken)}" for other, taken in others.values()),
        f"{min(executed.values()) / seconds:.2f}",
    ]
    ratios = [seconds / choice.seconds, *(taken / other.seconds for other, taken in others.values())]
    return f"| {' | '.join(columns)} |", ratios


def lanes_row(name, size, arrival, lanes):
    """A row of the table with lanes as text, and each plan's executed over predicted time."""
    topology = machine(name, arrival)
    cells = [cell(topology, size, None), cell(topology, size, None, lanes=lanes)]
    (without, seconds), (choice, on_lanes) = cells
    columns = [
        name,
        f"{size / 1e6:g} MB",
        f"{_us(without.seconds)} / {_us(seconds)}",
        f"{_us(choice.seconds)} / {_us(on_lanes)}",
        f"{choice.recipe.lanes.count or 'none'}",
        choice.recipe.algorithm,
        f"{without.recipe.copies}, {choice.recipe.copies}",
        f"{seconds / on_lanes:.2f}",
        f"{size / pack(topology, ideal_links=True).bound / on_lanes:.0%}",
    ]
    return f"| {' | '.join(columns)} |", [taken / made.seconds for made, taken in cells]


def _us(seconds):
    return f"{seconds * 1e6:.0f}"


LANES_HEAD = (
    "machine",
    "bytes",
    "without lanes",
    "with lanes",
    "lanes used",
    "plan",
    "copies without, with",
    "times as fast",
    "of the limit of the links",
)
HEAD = (
    "machine",
    "bytes",
    "plan, chunks",
    "ours",
    "ours in TensorFlow's own order",
    "of the bound",
    *OTHERS,
    "best other / ours",
)


def main(argv=None):
    """Print the table, and write it into a page."""
    parser = argparse.ArgumentParser(prog="python -m tunnel", description=__doc__.split("\n")[0])
    parser.add_argument("machines", nargs="*", metavar="MACHINE")
    parser.add_argument("--bytes", nargs="+", type=lambda text: int(float(text)), default=SIZES, metavar="SIZE")
    parser.add_argument("--arrival", type=float, default=0.0, metavar="SECONDS", help="of the host, for each copy")
    parser.add_argument("--lanes", type=int, default=0, metavar="L", help="compare plans with and without lanes")
    parser.add_argument("--page", metavar="FILE", help="put the table between the <!-- tunnel --> marks of FILE")
    args = parser.parse_args(argv)
    from .emulation import CannotBuild, library

    try:
        library()
    except CannotBuild as error:
        print(f"tunnel: {error}", file=sys.stderr)
        return 2
    head = LANES_HEAD if args.lanes else HEAD
    lines, ratios = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)], []
    print(*lines, sep="\n", flush=True)
    for name in args.machines or (LANES_MACHINES if args.lanes else MACHINES):
        for size in args.bytes:
            line, own = lanes_row(name, size, args.arrival, args.lanes) if args.lanes else row(name, size, args.arrival)
            print(line, flush=True)
            lines.append(line)
            ratios += own
    off = [abs(ratio - 1) for ratio in ratios]
    lines += ["", f"Executed and predicted differ by {statistics.median(off):.1%} (median), {max(off):.1%} (worst)."]
    print(*lines[-2:], sep="\n")
    if args.page:
        page = Path(args.page)
        page.write_text(marked(page.read_text(encoding="utf-8"), "tunnel", "\n".join(lines)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
