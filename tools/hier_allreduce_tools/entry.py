"""``hier-allreduce COMMAND``: the command line, and errors as one line.

A command is a module with ``add_arguments(parser)`` and ``main(args) -> status``. Anything that it
calls may raise a :class:`.HierAllreduceError`, or a ModuleNotFoundError for a package of an extra;
its message is that line.
"""

from __future__ import annotations

import io
import os
import sys
from typing import List, Optional

from hier_allreduce._version import __version__
from hier_allreduce.errors import HierAllreduceError

from . import doctor, tune
from .options import Parser

COMMANDS = {
    "doctor": (
        doctor,
        "report versions, GPUs and known problems, to paste into an issue; try copies",
    ),
    "tune": (tune, "measure all-reduces in your program, and write the fastest"),
}
_EXAMPLES = """\
examples:
  hier-allreduce doctor                                  this machine's problems
  hier-allreduce doctor --copies                         and copies between its GPUs
  nvidia-smi topo -m | hier-allreduce doctor --topo -    groups along its NVLinks
  hier-allreduce tune -o best.yaml -- python train.py    your program's fastest all-reduce

exit status: 0 if all went well, 1 if problems were found, 2 for invalid input or a missing package,
130 if interrupted
"""


def parser() -> Parser:
    """Return the parser of the command line."""
    top = Parser(
        prog="hier-allreduce",
        description="An all-reduce for TensorFlow: problems and measurements.",
        epilog=_EXAMPLES,
    )
    top.add_argument("--version", action="version", version=f"hier_allreduce {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    for command, (module, summary) in COMMANDS.items():
        below = commands.add_parser(command, help=summary, description=summary)
        module.add_arguments(below)
        below.set_defaults(main=module.main)
    return top


def main(argv: Optional[List[str]] = None) -> int:
    """Run one command, and return its exit status.

    An error of this package or of the system, or a missing package, is printed as one line; the
    status is 2.
    """
    # Files on Windows have no ``→``, so a character that the encoding lacks is printed as ``?``.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    argv = sys.argv[1:] if argv is None else argv
    command = argv[0] if argv else ""
    try:
        if command.startswith("-"):
            # argparse would take the value of an unknown option for a command.
            argv = argv[:1]
        elif command and command not in COMMANDS:
            raise HierAllreduceError(f"{command!r} is no command; there are {', '.join(COMMANDS)}")
        args = parser().parse_args(argv)
        if args.command is None:
            raise HierAllreduceError(
                f"name a command: {', '.join(COMMANDS)}; `hier-allreduce --help` tells more"
            )
        status: int = args.main(args)
        # A full disk must show here; unlike sys.stdout.flush(), print needs no standard output.
        print(end="", flush=True)
        return status
    except BrokenPipeError:
        # The reader has read enough, as in `hier-allreduce doctor | head`.
        _forget_output()
        return 0
    except (HierAllreduceError, ModuleNotFoundError, OSError, KeyboardInterrupt) as error:
        # After an error of the system, such as a full disk, the output cannot be written.
        if isinstance(error, OSError):
            _forget_output()
        program = f"hier-allreduce {command}" if command in COMMANDS else "hier-allreduce"
        print(f"{program}: {' '.join(str(error).split()) or 'interrupted'}", file=sys.stderr)
        return 130 if isinstance(error, KeyboardInterrupt) else 2


def _forget_output() -> None:
    """Drop the output that is left, because writing it at exit would raise another error."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
