"""``hier-allreduce COMMAND``: the command line, and errors as one line.

A command is a module with ``add_arguments(parser)`` and ``main(args) -> status``.
"""

from __future__ import annotations

import argparse
import io
import sys
from typing import List, Optional

from hier_allreduce import HierAllreduceError, __version__

from .doctor import command as doctor
from .tune import command as tune

COMMANDS = {
    "doctor": (
        doctor,
        "report versions, GPUs and known problems, to paste into an issue; try copies",
    ),
    "tune": (tune, "measure all-reduces in your program, and write the fastest"),
}
_EPILOG = """\
examples:
  hier-allreduce doctor --copies                         problems, and copies between GPUs
  nvidia-smi topo -m | hier-allreduce doctor --topo -    groups along its links
  hier-allreduce tune -o best.yaml -- python train.py    your program's fastest all-reduce

exit status: 0 if all went well, 1 if problems were found, 2 for invalid input, 130 if interrupted
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="hier-allreduce", epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--version", action="version", version=f"hier_allreduce {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command, (module, summary) in COMMANDS.items():
        # An abbreviation would change its meaning when a command gets another option.
        below = commands.add_parser(command, help=summary, description=summary, allow_abbrev=False)
        module.add_arguments(below)
        below.set_defaults(main=module.main)
    return top


def main(argv: Optional[List[str]] = None) -> int:
    """Run one command, and return its exit status.

    An error of this package or of the system is printed as one line; the status is 2.

    Raises:
        SystemExit: argparse has printed the help, or an error of the arguments; or a command ends
            with a line of its own.
    """
    # A character that the encoding lacks is printed as ``?``; standard error does so by itself.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    args = parser().parse_args(argv)
    try:
        status: int = args.main(args)
        return status
    except (HierAllreduceError, OSError) as error:
        print(f"hier-allreduce {args.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
