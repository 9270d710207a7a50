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
