"""``hier-allreduce topo``."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    raise NotImplementedError
