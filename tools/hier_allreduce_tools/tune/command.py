"""``hier-allreduce tune -- python train.py``: the step of your program with each all-reduce."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import yaml

from hier_allreduce import HierAllreduceError

from .. import options
from ..doctor.nvidia_smi import ask_nvidia_smi, groups_of
from .candidates import OTHERS, changes_of
from .inside import VARIABLE
from .journal import Journal, Run
from .report import Verdict, as_json, report, verdict
from .rounds import NothingMeasured, Rounds
from .run import Runner, noted_signals

_FIRST_LINE = "# written by hier-allreduce tune, which may write it again"
_BETWEEN_LINES = 30.0  # seconds, where no terminal shows a bar
_WARNING = f"""\
Each run starts the program, which really trains: it writes its logs and checkpoints, and a program
that empties its log folder loses what it has there. {VARIABLE} is set in each run:
    folder = "tune" if "{VARIABLE}" in os.environ else "train_log"
"""
_NOT_ASKED = (
    "each run really trains, and writes where the program writes: without a terminal to ask, --yes"
    " says that this is meant"
)


def add_arguments(parser: Any) -> None:
    """Add the command's options."""
    parser.add_argument("program", metavar="PROGRAM", nargs="*", help="and its arguments")
    parser.usage = "hier-allreduce tune [OPTIONS] -- PROGRAM [ARGUMENTS]"
    parser.epilog = "example: hier-allreduce tune -o best.yaml -- python train.py --epochs 3"
    add = parser.add_argument

    help = "minutes of all runs together, such as 10 or 90s (default 10)"
    add("--minutes", metavar="M", type=partial(options.time, unit="min"), default=600.0, help=help)

    help = (
        "measure these beside the program as it is, instead of the usual ones: an algorithm of"
        " Strategy, also with the size of its chunks (flat-8MiB) or with groups along NVLink"
        f" (hierarchical-nvlink), or {', '.join(OTHERS)}"
    )
    add("--only", metavar="A,B", type=_candidates, default=[], help=help)

    help = (
        "longest time without a step, such as 60s or 2min (default 60s); the start of the first run"
        " may take a third of --minutes, up to 10min"
    )
    add("--patience", metavar="TIME", type=partial(options.time, unit="s"), default=60.0, help=help)

    help = "file for the best strategy, for strategy='FILE'"
    add("-o", metavar="FILE", type=_strategy_file, help=help)

    add("--json", action="store_true", help="one JSON object instead of the table")

    help = "go on from the journal of an earlier call, with its program, for other --minutes"
    add("--continue", metavar="JOURNAL", dest="journal", type=Path, help=help)

    add("--yes", action="store_true", help="start without asking: each run really trains")


def _candidates(argument: str) -> List[str]:
    """Read names of candidates, each once."""
    names = list(dict.fromkeys(name.strip() for name in argument.split(",")))
    for name in names:
        try:
            changes_of(name, None)
        except HierAllreduceError as error:
            fault = f"{name!r}: {error}, or one of {', '.join(OTHERS)}"
            raise argparse.ArgumentTypeError(fault) from None
    return names


def _strategy_file(argument: str) -> Path:
    """Read the path of a file to write; one that exists must be of ``tune`` itself."""
    path = options.output(argument)
    if path.exists():
        # A typing error such as ``-o train.py`` must not cost somebody a file.
        with path.open(encoding="utf-8", errors="replace") as file:
            if file.readline().rstrip() != _FIRST_LINE:
                fault = f"{argument!r} exists, and tune has not written it: choose another name"
                raise argparse.ArgumentTypeError(fault)
    return path


def main(args: argparse.Namespace) -> int:
    """Run the command, and return its exit status.

    That is 1 if no two candidates were measured, 2 if a run could not start, 130 if interrupted.
    """
    if sys.platform == "win32":
        raise HierAllreduceError("tune needs process groups: use Linux, macOS or WSL2")
    if not (args.program or args.journal):
        raise HierAllreduceError("expected a program: hier-allreduce tune -- python train.py")
    if args.program and args.journal:
        raise HierAllreduceError("--continue: the program is in the journal, so leave it out")
    groups = groups_of(ask_nvidia_smi())
    if not _agrees(args):
        return 1
    journal, settings, runs = _opened(args)
    fault: Optional[Exception] = None
    with noted_signals() as signals, _bar(args.minutes) as (show, say):
        rounds = Rounds(Runner(settings, journal, args.minutes, signals, show), runs, say)
        try:
            rounds.run_all(settings["only"], groups)
        except (NothingMeasured, OSError) as error:
            # Minutes of runs must not be lost because a later one cannot start.
            fault = error
    if not rounds.runs and not isinstance(fault, NothingMeasured):
        raise fault or KeyboardInterrupt
    conclusion = verdict(rounds.runs, rounds.left_out)
    if rounds.runs:
        _tell(args, conclusion, rounds, journal)
    if fault is not None:
        print(f"hier-allreduce tune: {fault}", file=sys.stderr)
        return 2 if isinstance(fault, OSError) else 1
    if signals:
        return 128 + signal.SIGINT
    return 0 if sum(bool(row.runs) for row in conclusion.rows) > 1 else 1


def _agrees(args: argparse.Namespace) -> bool:
    """Tell that each run trains, and where it writes, and return whether the user wants that.

    Raises:
        HierAllreduceError: there is no terminal to ask, and no ``--yes``.
    """
    is_asked = not args.yes
    if is_asked and (sys.stdin is None or not sys.stdin.isatty()):
        raise HierAllreduceError(_NOT_ASKED)
    written = args.journal.parent if args.journal else f"a new folder in {tempfile.gettempdir()}"
    also = f", the best strategy into {args.o}" if args.o else ""
    print(f"{_WARNING}The journal and the outputs go into {written}{also}.", file=sys.stderr)
    if is_asked:
        print("Start the first run? [y/N] ", end="", file=sys.stderr, flush=True)
    return not is_asked or sys.stdin.readline().strip().lower() in ("y", "yes")


def _opened(args: argparse.Namespace) -> Tuple[Journal, Dict[str, Any], List[Run]]:
    """Return a new journal, or the one to be continued, with its first line and its runs.

    Raises:
        HierAllreduceError: ``tune`` has not written it.
        OSError: it cannot be read.
    """
    if args.journal is not None:
        journal = Journal(args.journal.absolute())
        settings, runs = journal.read()
        only = args.only or settings["only"]
        return journal, {**settings, "only": only, "patience": args.patience}, runs
    folder = Path(tempfile.mkdtemp(prefix="hier_allreduce_tune_"))
    journal = Journal(folder / "journal.jsonl")
    options = {"only": args.only, "patience": args.patience}
    settings = {"program": args.program, "folder": os.getcwd(), **options}
    journal.write(settings)
    print(f"Journal: {journal.path}", file=sys.stderr)
    return journal, settings, []


@contextmanager
def _bar(seconds: float) -> Iterator[Tuple[Callable[[str], None], Callable[[str], None]]]:
    """Yield a function that moves a bar, and one that prints a line above it."""
    from tqdm import tqdm

    # Its thread would make forks unsafe, and a run is looked at often enough.
    tqdm.monitor_interval = 0
    pause = 0.5 if sys.stderr is not None and sys.stderr.isatty() else _BETWEEN_LINES
    form = "{percentage:3.0f}%|{bar}| {n:.0f} of {total:.0f} s{postfix}"
    with tqdm(total=round(seconds), bar_format=form, mininterval=pause, file=sys.stderr) as bar:

        def show(message: str) -> None:
            bar.set_postfix_str(message, refresh=False)
            bar.update(min(bar.format_dict["elapsed"], bar.total) - bar.n)

        yield show, lambda line: bar.write(line, file=sys.stderr)


def _tell(args: argparse.Namespace, conclusion: Verdict, rounds: Rounds, journal: Journal) -> None:
    """Print the table, and what makes a rough answer certain; write the best strategy."""
    print(json.dumps(as_json(conclusion)) if args.json else report(conclusion))
    if conclusion.missing_pairs:
        measured = [row for row in conclusion.rows if row.runs]
        minutes = rounds.minutes(len(measured) * conclusion.missing_pairs)
        print(
            f"for a certain answer {conclusion.missing_pairs} more pairs of runs are missing:\n"
            f"hier-allreduce tune --continue {journal.path} --minutes {minutes}",
            file=sys.stderr,
        )
    best = conclusion.best
    if not args.o:
        return
    strategy = best.runs[0].built.strategy if best else {}
    reason = ""
    # A baseline cannot be written, because a strategy file has the fields of ours only.
    if best is None or best.candidate.baseline:
        reason = conclusion.sentences[0]
    elif strategy.get("algorithm", "auto") is None:
        reason = f"its algorithm is a function; write {best.candidate.changes} into your Strategy"
    if reason:
        print(f"{args.o} is not written: {reason}", file=sys.stderr)
        return
    options.make_folder(args.o)
    comments = [_FIRST_LINE, *(f"# {line}".rstrip() for line in report(conclusion).splitlines())]
    lines = [*comments, yaml.safe_dump(strategy, sort_keys=False)]
    args.o.write_text("\n".join(lines), encoding="utf-8")
    print(f"strategy={str(args.o)!r} is the best one", file=sys.stderr)
