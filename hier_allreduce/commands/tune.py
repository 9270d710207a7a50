"""``hier-allreduce tune -- python train.py``: the step of your program with each all-reduce, measured."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import List

from .. import configs
from ..cluster.environment import job_of
from ..errors import HierAllreduceError
from ..measured import VARIABLE
from ..tune import MOST, NAMES, Run, as_json, as_yaml, measure_all, report, verdict
from .options import output, time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    shares = (
        f"minutes of all runs: each ends after an equal share, or after {MOST} steps (default 10)"
    )
    add("--minutes", type=minutes, default=600.0, metavar="M", help=shares)
    add("--only", metavar="A,B", help=f"candidates beside the program as it is: {', '.join(NAMES)}")
    add(
        "--patience",
        type=time,
        default=60.0,
        metavar="TIME",
        help="longest time without a step (default 60s)",
    )
    add(
        "-o",
        type=output,
        metavar="FILE",
        help="file for the best strategy, as strategy='FILE' reads it",
    )
    add("--json", action="store_true", help="one JSON object instead of the table")
    add("program", nargs="*", metavar="-- PROGRAM", help="program to measure, with its arguments")


def minutes(text: str) -> float:
    """Read minutes, up to a day, as seconds."""
    if not re.match(r"\d+(\.\d+)?$", text) or not 0 < float(text) <= 1440:
        raise argparse.ArgumentTypeError(f"{text!r}: expected minutes up to 1440, such as 10")
    return 60 * float(text)


def main(args: argparse.Namespace) -> int:
    """Run the command; return 1 if no candidate was measured, 130 if interrupted."""
    if sys.platform == "win32":
        raise HierAllreduceError("tune needs process groups: use Linux, macOS or WSL2")
    only = args.only.split(",") if args.only else []
    for name in only:
        if name not in NAMES:
            raise HierAllreduceError(
                f"--only: {name!r} is no candidate{configs.nearest(name, NAMES)}"
            )
    if not args.program:
        raise HierAllreduceError("expected a program: hier-allreduce tune -- python train.py")
    if shutil.which(args.program[0]) is None:
        raise HierAllreduceError(f"{args.program[0]!r} cannot be started here; expected a program")
    hosts = len(job_of(os.environ).hosts)
    if hosts > 1:
        raise HierAllreduceError(
            f"this environment describes {hosts} hosts, and tune measures one: unset TF_CONFIG"
        )
    folder = Path(tempfile.mkdtemp(prefix="hier_allreduce_tune_"))
    print(
        f"Each run really trains, so let it have another log folder. {VARIABLE} is set: programs can skip checkpoints."
        f"\nOutputs: {folder}",
        file=sys.stderr,
    )
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            ending, signal.default_int_handler
        )  # as Ctrl-C: end the program, print what there is
    runs: List[Run] = []
    interrupted = False
    try:
        for run in measure_all(args.program, args.minutes, args.patience, only, folder):
            runs.append(run)
    except KeyboardInterrupt:
        if not runs:
            raise
        interrupted = True
    found = verdict(runs)
    print(json.dumps(as_json(found)) if args.json else report(found))
    if args.o and found.best:
        args.o.write_text(as_yaml(found, runs[0].facts["kept"]), encoding="utf-8")
        print(f"strategy={str(args.o)!r} is the best one", file=sys.stderr)
    elif args.o:
        print(f"{args.o} is not written: no strategy has won", file=sys.stderr)
    return 130 if interrupted else 0 if any(run.seconds for run in runs) else 1
