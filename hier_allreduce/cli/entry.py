"""``hier-allreduce topo | plan | bench | launch | demo``: finds the command's module and turns errors into one line."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from typing import List, Optional

from .. import __version__
from ..errors import HierAllreduceError

COMMANDS = {
    "topo": "what a machine's links are understood to be",
    "plan": "the plan for a machine, its predicted time, and how it compares",
    "bench": "step time, graph size and memory beside every peer",
    "launch": "start all hosts of a job on this machine",
    "demo": "train a small model on real data and check the result",
}


def parser() -> argparse.ArgumentParser:
    """The whole command line; each command's own options come from its module."""
    top = argparse.ArgumentParser(prog="hier-allreduce", description=__doc__.split(":")[0].replace("``", ""))
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    commands.required = True
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary)
        module = importlib.import_module(f".{name}", __package__)
        module.add_arguments(sub)
        sub.set_defaults(main=module.main)
    return top


def main(argv: Optional[List[str]] = None) -> int:
    """Run one command; an error of this package, or of the system, is printed as one line, exit status 2.

    What the encoding of standard output lacks is printed as ``?``: Windows' for files has no ``→``.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    args = parser().parse_args(argv)
    try:
        status = int(args.main(args) or 0)
        print(end="", flush=True)  # there may be no standard output at all
        return status
    except HierAllreduceError as error:
        print(f"hier-allreduce {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `hier-allreduce plan … | head`
        _write_no_more()
        return 0
    except OSError as error:  # a full disk
        _write_no_more()
        print(f"hier-allreduce {args.command}: {error}", file=sys.stderr)
        return 2


def _write_no_more() -> None:
    """What is still to be written goes nowhere."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
