"""``hier-allreduce plan``."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any, Dict

from .. import planner, report
from ..plan import Reduce, Step, verify
from ..topology import Topology
from .topo import add_topology, read_topology

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def read_bytes(text: str) -> int:
    """``100MB``, ``64 kB``, ``1.5GiB``, ``4096``: a number of bytes, at least 1."""
    found = re.match(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmg]i?)?b?\s*$", text, re.I)
    size = round(float(found.group(1)) * _UNITS[(found.group(2) or "").lower()]) if found else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected bytes, for instance 100MB, 64kB, 10MiB or 4096")
    return size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_topology(parser)
    parser.add_argument("--bytes", type=read_bytes, default="100MB", metavar="SIZE", help="the bucket (default 100MB)")
    parser.add_argument("--algorithm", metavar="NAME", help=f"one of: {', '.join(planner.ALGORITHMS)}")
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    parser.add_argument("--steps", action="store_true", help="print every step too")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    machine = read_topology(args.topology, args.calibration)
    choice = planner.choose(machine, args.bytes, args.algorithm)
    verify(choice.recipe.plan())
    if args.json:
        print(json.dumps(as_json(choice, machine)))
    else:
        print(report.describe_choice(choice, machine, args.steps))
    if args.picture:
        report.draw_plan(choice, machine, args.picture)
    return 0


def as_json(choice: planner.Choice, machine: Topology) -> Dict[str, Any]:
    """The plan as plain values: bytes of each chunk, steps in execution order, times in seconds."""
    return {
        "devices": len(machine),
        "bytes": choice.size,
        "algorithm": choice.recipe.algorithm,
        "chunks": list(choice.recipe.sizes(choice.size)),
        "steps": [_step(step) for step in choice.recipe.plan().steps],
        "predicted_seconds": choice.seconds,
        "lower_bound_seconds": choice.bound,
        "baselines": choice.baselines,
        "warnings": list(machine.warnings),
    }


def _step(step: Step) -> Dict[str, Any]:
    if isinstance(step, Reduce):
        return {"op": "reduce", "chunk": step.chunk, "srcs": list(step.srcs), "dst": step.dst}
    return {"op": "copy", "chunk": step.chunk, "src": step.src, "dst": step.dst}
