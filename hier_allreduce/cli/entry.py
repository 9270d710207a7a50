"""``hier-allreduce topo | plan | bench | launch | demo``: the command line, and errors as one line."""

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
    "topo": "show a machine's links, their speeds, and the bound that they set",
    "plan": "show the plan for a machine, its predicted time, and how it compares",
    "bench": "measure step time, graph size and memory, compared with every peer",
    "launch": "start all hosts of a job on this machine",
    "demo": "train a small model on real data and check the result",
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; each command's module adds its own options."""
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
    """Run one command; print an error of this package or of the system as one line, and return 2.

    Characters that the encoding of standard output lacks are printed as ``?``: that of files on Windows has no ``→``.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    args = parser().parse_args(argv)
    try:
        status = int(args.main(args) or 0)
        print(end="", flush=True)  # unlike sys.stdout.flush(), this works without standard output
        return status
    except HierAllreduceError as error:
        print(f"hier-allreduce {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `hier-allreduce plan … | head`
        _discard_output()
        return 0
    except OSError as error:  # a full disk
        _discard_output()
        print(f"hier-allreduce {args.command}: {error}", file=sys.stderr)
        return 2


def _discard_output() -> None:
    """Send what is still buffered for standard output nowhere, or writing it at exit would raise another error."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
