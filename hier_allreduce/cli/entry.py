"""``hier-allreduce COMMAND``: the command line, and errors as one line.

A command's module is imported only when that command runs, so that ``--version`` and ``--help`` answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from typing import List, Optional

from .._version import __version__
from ..errors import HierAllreduceError

COMMANDS = {
    "topo": "show a machine's links, their speeds, and the bound that they set",
    "plan": "show the plan for a machine, its predicted time, and how it compares",
    "calibrate": "measure this machine's links, and which copies wait for each other",
    "tune": "measure strategies on this machine, and write the fastest",
    "bench": "measure step time, graph size and memory, compared with every peer",
    "launch": "start all hosts of a job on this machine",
    "demo": "train a small model on real data and check the result",
    "doctor": "report versions, GPUs and known problems, to paste into an issue",
}
_EXAMPLES = """\
examples:
  hier-allreduce topo                        the links of this machine
  hier-allreduce topo --list                 the machines that are known by name
  hier-allreduce plan dgx-1v --bytes 100MB   a plan and its predicted time
  hier-allreduce bench peers --devices 4     compare with other all-reduces, on this machine
  hier-allreduce doctor                      what to paste into an issue

exit status: 0 if all went well, 1 if a check failed, 2 for invalid input or a missing package,
130 if interrupted; that of the first host that failed for launch
"""


def parser(only: Optional[str] = None) -> argparse.ArgumentParser:
    """Return the parser of the command line; each command's module adds its own options.

    Args:
        only: the command whose options are needed; None for those of all commands.
    """
    top = argparse.ArgumentParser(
        prog="hier-allreduce",
        description="Hierarchical all-reduce for TensorFlow graph mode: machines, plans, measurements, jobs.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"hier_allreduce {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    commands.required = True
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary)
        if only in (None, name):
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
    argv = sys.argv[1:] if argv is None else argv
    command = next((argument for argument in argv if not argument.startswith("-")), "")
    args = parser(command).parse_args(argv)
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
