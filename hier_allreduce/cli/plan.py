"""``hier-allreduce plan``: the plan for a machine."""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import Any, Dict, Optional

from .. import __version__, presets
from ..errors import TopologyError
from ..figures import check_picture
from ..planning import (
    PLANNER_ALGORITHMS,
    THIS_MACHINE,
    Backward,
    Reduce,
    Step,
    TrainingChoice,
    algorithms_for,
    baseline_seconds,
    choose,
    choose_for_training,
    operands,
    predicted_trace,
    verify,
)
from ..topology import Topology
from .common import lane_count, output, refuse_unused
from .describe import describe_choice
from .plan_picture import draw_plan
from .topo import add_topology, read_topology

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}


_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


def read_bytes(text: str) -> int:
    """Read ``100MB``, ``64 kB``, ``1.5GiB`` or ``4096``: a number of bytes, from 1 to 1e15."""
    match = re.match(r"\s*(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*([kmgt]i?)?b?\s*$", text, re.I)
    size = float(match.group(1)) * _UNITS[(match.group(2) or "").lower()] if match else 0.0
    if not 1 <= size <= 1e15:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 1 to 1e15 bytes, for instance 100MB, 64kB, 10MiB or 4096")
    return round(size)


def read_seconds(text: str) -> float:
    """Read ``10ms``, ``500us``, ``0.01s`` or ``0``: seconds, from 0 to 1."""
    match = re.match(r"\s*(\d+(?:\.\d+)?)\s*(s|ms|us|µs)?\s*$", text)
    unit = (match.group(2) or "") if match else ""
    seconds = float(match.group(1)) * _SECONDS[unit] if match and (unit or float(match.group(1)) == 0) else -1.0
    if not 0 <= seconds <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 0 to 1 s, for instance 10ms, 500us or 0")
    return seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_topology(parser)
    parser.add_argument(
        "--bytes", type=read_bytes, default="100MB", metavar="SIZE", help="size of the bucket (default 100MB)"
    )
    parser.add_argument(
        "--lanes", type=lane_count, metavar="L", help="logical GPUs on each GPU that relay copies (default none)"
    )
    parser.add_argument(
        "--backlog",
        type=read_seconds,
        metavar="TIME",
        help="kernels that the host has queued on each GPU during the backward pass (default 10ms; 0: an idle machine)",
    )
    names = f"auto (the default), or one of: {', '.join(PLANNER_ALGORITHMS)}"
    parser.add_argument("--algorithm", metavar="NAME", type=_algorithm, help=names)
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    parser.add_argument(
        "--trace", metavar="FILE", type=output, help="write the predicted run as a trace for ui.perfetto.dev"
    )
    parser.add_argument("--steps", action="store_true", help="print every step too")


def _algorithm(name: str) -> Optional[str]:
    return None if name == "auto" else name


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.picture:
        check_picture(args.picture)
    refuse_unused(args, "--json", "--steps")
    machine = read_topology(args.topology, args.calibration)
    if args.topology in (None, THIS_MACHINE) and len(machine) < 2:
        raise TopologyError(
            "this machine has fewer than two GPUs, so there is nothing to plan; name a machine, one of"
            f" {', '.join(presets.names('machines'))}, or a file"
        )
    backward = Backward() if args.backlog is None else Backward(args.backlog)
    choice = _searched(machine, args.bytes, args.algorithm, args.lanes or 0, backward)
    verify(choice.plan())
    if args.picture:  # before the text: its reader may close the pipe early
        draw_plan(choice, machine, args.picture)
    if args.trace:
        predicted_trace(choice, machine).write(args.trace)
    if args.json:
        print(json.dumps(as_json(choice, machine)))
    else:
        print(describe_choice(choice, machine, args.steps))
    return 0


def _searched(machine: Topology, size: int, algorithm: Optional[str], lanes: int, backward: Backward) -> TrainingChoice:
    """Return the plan, with a progress bar on a terminal: large machines take seconds.

    There the plans that will be compared with it are made too.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        return choose_for_training(machine, size, algorithm, lanes, backward)
    from tqdm import tqdm

    with tqdm(total=len(PLANNER_ALGORITHMS) + 1, desc="searching plans", leave=False, file=sys.stderr) as bar:
        choice = choose_for_training(machine, size, algorithm, lanes, backward)
        for name in algorithms_for(machine):
            bar.update()
            choose(machine, size // choice.schedule.buckets, name)
    return choice


def as_json(choice: TrainingChoice, machine: Topology) -> Dict[str, Any]:
    """Return the plan as plain values: bytes of each chunk, steps in execution order, times in seconds."""
    whole = choice.plan()
    return {
        "version": __version__,
        "machine": machine.name,
        "devices": len(machine),
        "bytes": choice.size,
        "algorithm": choice.recipe.algorithm,
        "lanes": whole.lanes,
        "chunks": list(choice.sizes()),
        "buckets": list(whole.buckets or [0] * whole.chunks),
        "steps": [_step(step) for step in whole.steps],
        "copies": sum(whole.transfers().values()),
        "sums": sum(added > 1 for added in operands(whole)),
        "predicted_seconds": choice.seconds,
        "lower_bound_seconds": choice.bound,
        "baselines": baseline_seconds(machine, choice.size),
        "warnings": list(machine.warnings),
        "backlog_seconds": choice.backward.backlog,
        "exposed_seconds": choice.exposed,
    }


def _step(step: Step) -> Dict[str, Any]:
    if isinstance(step, Reduce):
        return {"op": "reduce", "chunk": step.chunk, "srcs": list(step.srcs), "dst": step.dst}
    return {"op": "copy", "chunk": step.chunk, "src": step.src, "dst": step.dst}
