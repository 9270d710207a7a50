"""What several commands read from their command lines."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A whole number of 1 or more: of devices, hosts, rounds."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of 1 or more")
    return number


def gib(text: str) -> int:
    """GiB, 0 or more, as bytes."""
    try:
        size = float(text) * 2**30
    except ValueError:
        size = -1.0
    if not 0 <= size < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of GiB, 0 or more")
    return int(size)
