"""``hier-allreduce plan``: the plan for a machine."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    return 0
