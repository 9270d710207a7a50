"""``hier-allreduce tune -- python train.py``: the step of your program with each all-reduce."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Sequence, Union

from hier_allreduce import configs
from hier_allreduce._lazy import require
from hier_allreduce.cluster.environment import job_of
from hier_allreduce.errors import HierAllreduceError
from .. import options
from ..doctor.nvidia_smi import ask_nvidia_smi, groups_of
from .candidates import CANDIDATES, RULE, check_name
from .faults import NothingMeasured
from .observer import VARIABLE
from .progress import Progress
from .report import WRITTEN_BY_TUNE, as_json, as_yaml, report
from .rounds import Rounds
from .run import Runner
from .verdict import Verdict, verdict

_PYTHON = re.compile(r"(.*/)?python[\d.]*$")


def add_arguments(parser: Any) -> None:
    """Add the command's options."""
    parser.add_argument("program", metavar="PROGRAM", nargs="*", help="and its arguments")
    parser.usage = "hier-allreduce tune [OPTIONS] -- PROGRAM [ARGUMENTS]"
    parser.epilog = "example: hier-allreduce tune -o best.yaml -- python train.py --epochs 3"
    add = parser.add_argument

    help = "minutes of all runs together, such as 10 or 90s (default 10)"
    add("--minutes", metavar="M", type=partial(options.time, unit="min"), default=600.0, help=help)

    help = (
        "measure these beside the program as it is, instead of the usual ones: an algorithm, or one"
        f" with the size of its chunks (flat-8MiB), or another of {', '.join(CANDIDATES)}"
    )
    add("--only", metavar="A,B", type=candidate_names, default=[], help=help)

    help = (
        "longest time without a step, such as 60s or 2min (default 60s); the start of the first run"
        " may take a third of --minutes, up to 10min"
    )
    add("--patience", metavar="TIME", type=partial(options.time, unit="s"), default=60.0, help=help)

    help = "file for the best strategy, for strategy='FILE'"
    add("-o", metavar="FILE", type=strategy_file, help=help)

    add("--json", action="store_true", help="one JSON object instead of the table")


def candidate_names(argument: str) -> List[str]:
    """Read names of candidates, each once."""
    candidates = list(dict.fromkeys(name.strip() for name in argument.split(",")))
    for candidate in candidates:
        try:
            check_name(candidate)
        except HierAllreduceError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return candidates


def strategy_file(argument: str) -> Path:
    """Read the path of a file to write; one that exists must be of ``tune`` itself."""
    path = options.output(argument)
    if path.exists():
        # A typing error such as ``-o train.py`` must not cost somebody a file.
        with path.open(encoding="utf-8", errors="replace") as file:
            if file.readline().rstrip() != WRITTEN_BY_TUNE:
                raise argparse.ArgumentTypeError(
                    f"{argument!r} exists, and tune has not written it: choose another name"
                )
    return path


def main(args: argparse.Namespace) -> int:
    """Run the command, and return its exit status.

    That is 1 if no two candidates were measured, 2 if a run could not start, 130 if interrupted.
    """
    # All is checked before the first run, because a run takes minutes.
    for package in ("psutil", "tqdm"):
        require(package, "tune")
    _check_program(args.program)
    folder = Path(tempfile.mkdtemp(prefix="hier_allreduce_tune_"))
    print(
        f"First a short run of the program as it is. Each run really trains: let it have another"
        f" log folder. {VARIABLE} is set, so that the program can skip checkpoints."
        f"\nOutputs: {folder}",
        file=sys.stderr,
    )
    _end_as_by_ctrl_c()
    progress = Progress(args.minutes)
    runner = Runner(args.program, args.patience, args.minutes, folder, progress)
    rounds = Rounds(runner, groups_of(ask_nvidia_smi()), args.only, progress)
    stopped: Union[KeyboardInterrupt, OSError, None] = None
    try:
        rounds.run_all()
    except NothingMeasured as error:
        progress.close()
        print(f"hier-allreduce tune: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, OSError) as error:
        # Minutes of runs must not be lost because a later one is interrupted, or cannot start.
        if not rounds.runs:
            raise
        stopped = error
    finally:
        progress.close()
    conclusion = verdict(rounds.runs, rounds.left_out)
    print(json.dumps(as_json(conclusion)) if args.json else report(conclusion))
    _write(args, conclusion, rounds.facts.kept)
    if isinstance(stopped, OSError):
        print(f"hier-allreduce tune: {stopped}", file=sys.stderr)
        return 2
    if stopped is not None:
        return 130
    return 0 if sum(bool(row.runs) for row in conclusion.rows) > 1 else 1


def _end_as_by_ctrl_c() -> None:
    """Let other signals end the program and print what there is, too."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        # One that is ignored stays so, because nohup lets tune outlive its terminal.
        if signal.getsignal(ending) != signal.SIG_IGN:
            signal.signal(ending, signal.default_int_handler)


def _check_program(program: Sequence[str]) -> None:
    """Check that a program is given and can be started.

    Raises:
        HierAllreduceError: it is not, or this is not the place to measure.
    """
    if sys.platform == "win32":
        raise HierAllreduceError("tune needs process groups: use Linux, macOS or WSL2")
    if not program:
        raise HierAllreduceError("expected a program: hier-allreduce tune -- python train.py")
    if shutil.which(program[0]) is None:
        hint = "expected a program"
        if program[0].endswith(".py"):
            hint = f"write: hier-allreduce tune -- python {' '.join(program)}"
        raise HierAllreduceError(f"{program[0]!r} cannot be started; {hint}")
    # Python's own message about a missing script would come after a start, as a run's last line.
    script = program[1] if len(program) > 1 and _PYTHON.match(program[0]) else ""
    if script.endswith(".py") and not Path(script).is_file():
        scripts = [path.name for path in Path(script).parent.glob("*.py")]
        hint = configs.nearest(Path(script).name, scripts) if scripts else f" in {Path.cwd()}"
        raise HierAllreduceError(f"{script!r}: there is no such file{hint}")
    # A job's variables would let each run wait for hosts that nobody starts.
    hosts = len(job_of(os.environ).hosts)
    if hosts > 1:
        raise HierAllreduceError(
            f"this environment describes {hosts} hosts, and tune measures one: set TF_CONFIG={{}}"
        )


def _write(args: argparse.Namespace, verdict: Verdict, kept: Dict[str, Any]) -> None:
    """Write the best strategy if a file is asked for, or say why there is none."""
    if not args.o:
        return
    best = verdict.best.candidate if verdict.best else None
    # A baseline cannot be written, because a strategy file has the fields of ours only.
    if best is None or best.baseline:
        print(f"{args.o} is not written: {verdict.sentences[0]}", file=sys.stderr)
    elif {**kept, **best.changes}.get("algorithm", RULE) is None:
        changes = ", ".join(f"{field}={choice!r}" for field, choice in best.changes.items())
        print(
            f"{args.o} is not written: a file cannot have the function that is your algorithm;"
            f" write {changes} into your Strategy",
            file=sys.stderr,
        )
    else:
        options.make_folder(args.o)
        args.o.write_text(as_yaml(verdict, kept), encoding="utf-8")
        print(f"strategy={str(args.o)!r} is the best one", file=sys.stderr)
