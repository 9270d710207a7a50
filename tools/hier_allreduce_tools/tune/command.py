"""``hier-allreduce tune -- python train.py``: the step of your program with each all-reduce."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import yaml

from hier_allreduce import HierAllreduceError

from .candidates import OTHERS, changes_of
from .inside import VARIABLE
from .journal import Journal, Run
from .report import Verdict, report, verdict
from .rounds import NothingMeasured, Rounds
from .run import Runner, noted_signals

_SECONDS_BY_UNIT = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_DAY = 86400.0
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
    add("--minutes", metavar="M", type=partial(_time, unit="min"), default=600.0, help=help)

    help = (
        "measure these beside the program as it is, instead of the usual ones: an algorithm of"
        f" Strategy, also with the size of its chunks (flat-8MiB), or {', '.join(OTHERS)}"
    )
    add("--only", metavar="A,B", type=_candidates, default=[], help=help)

    help = (
        "longest time without a step, such as 60s or 2min (default 60s); the start of the first run"
        " may take a third of --minutes, up to 10min"
    )
    add("--patience", metavar="TIME", type=partial(_time, unit="s"), default=60.0, help=help)

    help = "file for the best strategy, for strategy='FILE'"
    add("-o", metavar="FILE", type=_new_file, help=help)

    help = "go on from the journal of an earlier call, with its program, for other --minutes"
    add("--continue", metavar="JOURNAL", dest="journal", type=Path, help=help)

    add("--yes", action="store_true", help="start without asking: each run really trains")


def _candidates(argument: str) -> List[str]:
    """Read names of candidates, each once."""
    names = list(dict.fromkeys(name.strip() for name in argument.split(",")))
    for name in names:
        try:
            changes_of(name)
        except HierAllreduceError as error:
            fault = f"{name!r}: {error}, or one of {', '.join(OTHERS)}"
            raise argparse.ArgumentTypeError(fault) from None
    return names


def _time(argument: str, unit: str) -> float:
    """Read a time such as ``90s``, up to a day, as seconds; a number alone has the ``unit``."""
    match = re.match(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*$", argument)
    # Without a match, or with an unknown unit, the time is 0, which is refused like a 0.
    digits, given = match.groups() if match else ("0", "")
    seconds = float(digits) * _SECONDS_BY_UNIT.get(given or unit, 0)
    if not 0 < seconds <= _DAY:
        units = ", ".join(_SECONDS_BY_UNIT)
        fault = f"{argument!r}: expected a time above 0, up to a day, in {units}, such as 10{unit}"
        raise argparse.ArgumentTypeError(fault)
    return seconds


def _new_file(argument: str) -> Path:
    """Read the path of a file that does not exist, in any folder that can be made."""
    path = Path(argument)
    # A typing error such as ``-o train.py`` must not cost somebody a file.
    if path.exists() or os.path.lexists(argument):
        raise argparse.ArgumentTypeError(f"{argument!r} exists: choose another name")
    there = next(parent for parent in path.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(str(there), os.W_OK):
        raise argparse.ArgumentTypeError(f"{argument!r} cannot be written")
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
    if not _agrees(args):
        return 1
    journal, settings, runs = _opened(args)
    fault: Optional[Exception] = None
    with noted_signals() as signals, _bar(args.minutes) as (show, say):
        rounds = Rounds(Runner(settings, journal, args.minutes, signals, show), runs, say)
        try:
            rounds.run_all(settings["only"])
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
    print(report(conclusion))
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
        reason = conclusion.advice
    elif strategy.get("algorithm", "auto") is None:
        reason = f"its algorithm is a function; write {best.candidate.changes} into your Strategy"
    if reason:
        print(f"{args.o} is not written: {reason}", file=sys.stderr)
        return
    args.o.parent.mkdir(parents=True, exist_ok=True)
    comments = [f"# {line}".rstrip() for line in report(conclusion).splitlines()]
    lines = [*comments, yaml.safe_dump(strategy, sort_keys=False)]
    args.o.write_text("\n".join(lines), encoding="utf-8")
    print(f"strategy={str(args.o)!r} is the best one", file=sys.stderr)
