"""``hier-allreduce completion SHELL``: a completion script, made from the options of all commands."""

from __future__ import annotations

import argparse

from .arguments import installed

_SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("shell", choices=_SHELLS, help="for bash: source <(hier-allreduce completion bash)")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from .entry import parser  # which imports this module when the command runs

    with installed("a completion script", "completion"):
        import shtab
    print(shtab.complete(parser(), args.shell))
    return 0
