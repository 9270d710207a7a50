"""``hier-allreduce plan``: a machine's links, the plan for them, and predicted steps beside those of others."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from typing import Union

from .. import presets
from ..errors import HierAllreduceError
from ..planning.algorithms import Algorithm
from ..planning.strategy import AUTO, NAMES, Strategy
from .options import add_machine, naming, output, read_machine, size, time_up_to, working
from .picture import draw
from .prediction import EQUAL, MODEL, predict, training_of
from .report import as_json, report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    models, time = ", ".join(presets.names("models")), time_up_to(60)
    add_machine(parser)
    add = parser.add_argument
    add("--model", metavar="MODEL", help=f"gradients of {models} (default {MODEL}), or of a table in a file")
    add("--bytes", type=size, metavar="SIZE", help=f"of {EQUAL} equal gradients together, instead of a model: 100MB")
    add("--step", type=time, metavar="TIME", help="of a step on one GPU, without an all-reduce: 180ms")
    add("--backward", type=time, metavar="TIME", help="of its backward pass: 120ms (default: two thirds of the step)")
    add("--algorithm", metavar="NAME", help=f"{', '.join(NAMES)}, or FILE.py:NAME, a function of yours, which is run")
    add("--list", action="store_true", help="show our other algorithms and tensorpack's modes too")
    add("--json", action="store_true", help="print one JSON object instead")
    add("--picture", type=output, metavar="FILE", help="draw it too, into FILE (.png, .pdf, .svg)")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    training = training_of(args.model, args.bytes, args.step, args.backward)
    with naming("--algorithm"):
        algorithm = AUTO if args.algorithm is None else read_algorithm(args.algorithm)
    machine = read_machine(args.machine)
    if len(machine) < 2:
        raise HierAllreduceError(f"{machine.name} has one GPU, which has nothing to reduce")
    strategy = Strategy(algorithm, backward=training.backward if training.is_timed else None)
    with working(f"predicting {len(machine)} GPUs"), naming("--algorithm"):  # nothing else can fail here
        prediction = predict(machine, training, strategy, args.list)
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


def read_algorithm(text: str) -> Union[str, Algorithm]:
    """Return the algorithm's name, or the function ``FILE.py:NAME``, for which the file is run.

    Raises:
        HierAllreduceError: no such name, file or function, or the file raises an error.
    """
    file, colon, name = text.rpartition(":")
    if text in NAMES:
        return text
    if not colon:
        raise HierAllreduceError(f"{text!r} is unknown{presets.nearest(text, [*NAMES, 'FILE.py:NAME'])}")
    try:
        found = runpy.run_path(file)
    except Exception as cause:  # a user's file may raise anything
        raise HierAllreduceError(f"{file}: {type(cause).__name__}: {cause}; expected FILE.py:NAME") from cause
    functions = [key for key, value in found.items() if callable(value) and not key.startswith("_")]
    if name not in functions:
        raise HierAllreduceError(f"{file} has no function {name!r}{presets.nearest(name, functions)}")
    function: Algorithm = found[name]
    return function
