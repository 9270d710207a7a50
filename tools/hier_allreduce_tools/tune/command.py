"""``hier-allreduce tune -- python train.py``: the step of your program with each all-reduce."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import yaml

from hier_allreduce import Strategy

from ..text import names_in
from . import journal
from .candidates import BASELINES, changes_of
from .inside.sitecustomize import VARIABLE
from .report import Verdict, report, verdict
from .rounds import minutes, run_rounds
from .run import Runner, noted_signals

_WARNING = f"""\
Each run starts the program, which really trains: it writes its logs and checkpoints, and a program
that empties its log folder loses what it has there. What tune writes itself goes into a new folder
in {tempfile.gettempdir()}, or beside the journal of --continue. {VARIABLE} is set in each run:
    folder = "tune" if "{VARIABLE}" in os.environ else "train_log\""""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.usage = "hier-allreduce tune [OPTIONS] -- PROGRAM [ARGUMENTS]"
    one = parser.add_mutually_exclusive_group(required=True)
    one.add_argument("program", metavar="PROGRAM", nargs="*", default=[], help="and its arguments")
    help = "go on from the journal of an earlier call, with its program, for other --minutes"
    one.add_argument("--continue", metavar="JOURNAL", dest="journal", type=Path, help=help)
    add = parser.add_argument

    help = "minutes of all runs together (default 10)"
    add("--minutes", metavar="M", type=float, default=10.0, help=help)

    help = (
        "measure these beside the program as it is, instead of the usual ones: an algorithm of"
        f" Strategy, a strategy's YAML file or its name, or {', '.join(BASELINES)}"
    )
    add("--only", metavar="A,B", type=names_in, default=[], help=help)

    help = "longest time without a step, also before the first one, in seconds (default 180)"
    add("--patience", metavar="S", type=float, default=180.0, help=help)

    help = "new file for the best strategy, for strategy='FILE'"
    add("-o", metavar="FILE", type=_new_file, help=help)

    add("--yes", action="store_true", help="start without asking: each run really trains")


def _new_file(argument: str) -> Path:
    """Read the path of a file that does not exist, in a folder that does."""
    path = Path(argument)
    # A typing error such as ``-o train.py`` must not cost somebody a file.
    if path.exists() or not os.access(f"{path.absolute().parent}/", os.W_OK):
        raise argparse.ArgumentTypeError(f"{argument!r} exists, or its folder cannot be written")
    return path


def main(args: argparse.Namespace) -> int:
    """Run the command, and return its exit status.

    That is 1 if no two candidates were measured, 130 if it was interrupted.

    Raises:
        SystemExit: nobody has answered "y".
    """
    for name in args.only:
        changes_of(name)  # an unknown name is an error before the first run
    print(_WARNING, file=sys.stderr)
    if not args.yes:
        print("Start the first run? [y/N] ", end="", file=sys.stderr, flush=True)
        # Nobody can answer if standard input is closed.
        if not sys.stdin or sys.stdin.readline().strip().lower() != "y":
            sys.exit("nothing was started; --yes starts without asking")
    if args.journal:
        path = args.journal.absolute()
    else:
        path = Path(tempfile.mkdtemp(prefix="hier_allreduce_tune_"), "journal.jsonl")
        settings = {"program": args.program, "folder": os.getcwd(), "only": args.only}
        journal.append(path, {"settings": settings})
    settings, runs = journal.read(path)
    print(f"The journal and the outputs go into {path}.", file=sys.stderr)

    deadline = time.monotonic() + 60 * args.minutes
    with noted_signals() as signals:
        runner = Runner(path, settings, args.patience, deadline, signals)
        left_out = run_rounds(runner, runs, args.only or settings["only"])
    found = verdict(runs)
    text = report(found, left_out)
    print(text)
    if found.missing_pairs:
        more = minutes(runs, len(found.rows) * found.missing_pairs)
        print(
            f"for a certain answer {found.missing_pairs} more pairs of runs are missing:\n"
            f"hier-allreduce tune --continue {path} --minutes {more}",
            file=sys.stderr,
        )
    if args.o:
        _write_best(args.o, found, text)
    if signals:
        return 130
    return 0 if len(found.rows) > 1 else 1


def _write_best(path: Path, found: Verdict, text: str) -> None:
    """Write the best strategy, below the table as comments.

    Raises:
        HierAllreduceError: it has a function of the program, which no file can name.
    """
    # A baseline cannot be written, because a strategy file has the fields of ours only.
    if found.best is None or found.best.name in BASELINES:
        print(f"{path} is not written: {found.advice}", file=sys.stderr)
        return
    strategy = found.best.runs[0].strategy
    Strategy(**strategy)
    comments = "".join(f"# {line}\n" for line in text.splitlines())
    path.write_text(comments + yaml.safe_dump(strategy, sort_keys=False), encoding="utf-8")
    print(f"strategy={str(path)!r} is the best one", file=sys.stderr)
