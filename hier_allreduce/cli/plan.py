"""``hier-allreduce plan``: the plan for a machine."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from typing import Any, Dict

from .. import presets
from .._version import __version__
from ..bench import load_model
from ..errors import HierAllreduceError
from ..figures import check_picture
from ..inspect import predicted_trace
from ..planning import (
    NAMES,
    THIS_MACHINE,
    Prediction,
    backward_pass,
    best_plan,
    named,
    plan_text,
    plan_values,
    verify,
)
from .common import lane_count, output, refuse_unused
from .describe_plan import describe_prediction
from .describe_steps import describe_steps
from .plan_picture import draw_plan
from .topo import add_topology, read_topology

_BYTES = "100MB"
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
    """Read ``60ms``, ``500us``, ``0.1s`` or ``0``: seconds, from 0 to 60."""
    match = re.match(r"\s*(\d+(?:\.\d+)?)\s*(s|ms|us|µs)?\s*$", text)
    unit = (match.group(2) or "") if match else ""
    seconds = float(match.group(1)) * _SECONDS[unit] if match and (unit or float(match.group(1)) == 0) else -1.0
    if not 0 <= seconds <= 60:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 0 to 60 s, for instance 60ms, 500us or 0")
    return seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_topology(parser)
    parser.add_argument("--bytes", type=read_bytes, metavar="SIZE", help=f"size of all gradients (default {_BYTES})")
    parser.add_argument(
        "--model",
        metavar="NAME|FILE",
        help="compare step times with other all-reduces on this table of gradient shapes, as `bench --model` has it",
    )
    parser.add_argument(
        "--step", type=read_seconds, metavar="TIME", help="with --model: of a step on one GPU, without an all-reduce"
    )
    parser.add_argument(
        "--lanes", type=lane_count, metavar="L", help="logical GPUs on each GPU that relay copies (default none)"
    )
    parser.add_argument(
        "--backward",
        type=read_seconds,
        metavar="TIME",
        help="of the backward pass (default: a second for each 1.7 GB; 0: an idle machine)",
    )
    parser.add_argument(
        "--dispatch",
        type=read_seconds,
        metavar="TIME",
        help="of the host for each op, instead of the machine's; 0: free",
    )
    parser.add_argument(
        "--algorithm",
        metavar="NAME",
        help=f"one of {', '.join(NAMES)} (default auto), or FILE.py:NAME, a function of yours: the file is executed",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    parser.add_argument(
        "--trace", metavar="FILE", type=output, help="write the predicted run as a trace for ui.perfetto.dev"
    )
    parser.add_argument("--steps", action="store_true", help="print every step too")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.picture:
        check_picture(args.picture)
    refuse_unused(args, "--json", "--steps")
    refuse_unused(args, "--model", "--bytes", "--algorithm", "--json", "--trace", "--steps", "--picture")
    if (args.model is None) != (not args.step):
        raise HierAllreduceError("--model and --step go together: `--model resnet50 --step 180ms`")
    shapes = load_model(args.model) if args.model else ()
    machine = read_topology(args.topology)
    if args.topology in (None, THIS_MACHINE) and len(machine) < 2:
        raise HierAllreduceError(
            "this machine has fewer than two GPUs, so there is nothing to plan; name a machine, one of"
            f" {', '.join(presets.names('machines'))}, or a file"
        )
    if args.dispatch is not None:
        machine = replace(machine, speeds=replace(machine.speeds, dispatch=args.dispatch))
    if shapes:
        print(describe_steps(machine, shapes, args.step, args.backward, args.lanes or 0))
        return 0
    size = args.bytes or read_bytes(_BYTES)
    backward = backward_pass(size, args.backward)
    prediction = best_plan(machine, size, backward, named(args.algorithm or "auto"), args.lanes or 0)
    verify(prediction.plan)
    if args.picture:  # before the text: its reader may close the pipe early
        draw_plan(prediction, args.picture)
    if args.trace:
        predicted_trace(prediction).write(args.trace)
    if args.json:
        print(plan_text(as_json(prediction)))
    else:
        print(describe_prediction(prediction, args.steps))
    return 0


def as_json(prediction: Prediction) -> Dict[str, Any]:
    """Return the plan as plain values: bytes of each chunk, steps in execution order, times in seconds."""
    plan, machine = prediction.plan, prediction.topology
    return {
        "version": __version__,
        "machine": machine.name,
        "bytes": prediction.size,
        **plan_values(plan),
        "copies": plan.copies,
        "sums": plan.sums,
        "backward_seconds": prediction.backward.seconds,
        "exposed_seconds": prediction.seconds,
        "bound_seconds": prediction.bound,
        "idle_seconds": prediction.idle_seconds,
        "host_seconds": prediction.host_seconds,
        "warnings": list(machine.warnings),
    }
