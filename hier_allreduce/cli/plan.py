"""``hier-allreduce plan``: a machine's links, the plan for them, and predicted steps beside those of others."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Optional

from .. import presets
from ..errors import HierAllreduceError
from ..topology import Topology, from_text, this_machine
from .options import naming, output, size, time
from .picture import draw
from .prediction import EQUAL, MODEL, predict, training_of
from .report import as_json, report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    machines, models = (", ".join(presets.names(kind)) for kind in ("machines", "models"))
    pasted = "a YAML file, a file with the output of `nvidia-smi topo -m`, or - for this output on standard input"
    add = parser.add_argument
    add(
        "machine",
        nargs="?",
        metavar="MACHINE",
        help=f"{machines}; {pasted} (default: this machine)",
    )
    add(
        "--model",
        metavar="MODEL",
        help=f"{models}, or a file with a table of gradients (default {MODEL})",
    )
    add(
        "--bytes",
        type=size,
        metavar="SIZE",
        help=f"bytes of {EQUAL} equal gradients, instead of a model: 100MB",
    )
    add(
        "--step",
        type=time,
        metavar="TIME",
        help="seconds of a step on one GPU, without an all-reduce: 180ms",
    )
    backward = "seconds of the backward pass in it: 120ms (default: two thirds of the step)"
    add("--backward", type=time, metavar="TIME", help=backward)
    add(
        "--list",
        action="store_true",
        help="rows for our other algorithms and tensorpack's modes, too",
    )
    add("--json", action="store_true", help="one JSON object instead of the text")
    add(
        "--picture",
        type=output,
        metavar="FILE",
        help="file for a picture of it, too: .png, .pdf or .svg",
    )


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    training = training_of(args.model, args.bytes, args.step, args.backward)
    machine = read_machine(args.machine)
    if len(machine) < 2:
        raise HierAllreduceError(f"{machine.name} has one GPU, which has nothing to reduce")
    if len(machine) > 8:  # it takes longer than 3 seconds on a slow host
        print(f"predicting {len(machine)} GPUs …", file=sys.stderr)
    prediction = predict(machine, training, args.list)
    if args.picture:  # before the text: its reader may close the pipe early
        with naming("--picture"):
            draw(prediction, args.picture)
    if not args.json:
        print(report(prediction))
        return 0
    print(json.dumps(as_json(prediction)))
    for warning in machine.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def read_machine(name: Optional[str]) -> Topology:
    """Return the machine that the argument names."""
    if name is None:
        found = this_machine()
        if found is None:
            known = ", ".join(presets.names("machines"))
            raise HierAllreduceError(
                f"nvidia-smi shows no GPUs here; name a machine, one of {known}, or a file"
            )
        return found
    if name != "-":
        return Topology.load(name)
    if sys.stdin is None:
        raise HierAllreduceError(
            "standard input is closed; expected the output of `nvidia-smi topo -m` on it"
        )
    if sys.stdin.isatty():
        print(
            "paste the output of `nvidia-smi topo -m`, then press Enter and Ctrl-D", file=sys.stderr
        )
    with naming("standard input"):
        return from_text(presets.decoded(sys.stdin.buffer.read()), "standard input")
