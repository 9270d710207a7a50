"""``hier-allreduce launch``: all hosts of a job as processes on this machine."""

from __future__ import annotations

import argparse
import sys

from ..cluster import launch
from ..errors import ClusterError
from .common import count, device_count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("-n", "--hosts", type=device_count, required=True, metavar="HOSTS", help="number of hosts")
    parser.add_argument(
        "--restarts",
        type=lambda text: count(text, 0),
        default=0,
        metavar="N",
        help="when a host fails, start all hosts again, N times at most; the program restores its last checkpoint",
    )
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="-- PROGRAM …",
        help="the program that each host runs, for example: -- python train.py",
    )


def main(args: argparse.Namespace) -> int:
    """Run the command; return the exit status of the first host that failed in the last try, or 0."""
    command = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not command:
        raise ClusterError("no program: hier-allreduce launch -n 2 -- python train.py")
    try:
        return launch(args.hosts, command, _write, args.restarts)
    except KeyboardInterrupt:
        return 130


def _write(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()
