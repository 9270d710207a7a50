"""Values of options: times with a unit, and files to write.

A reader raises ``argparse.ArgumentTypeError`` with the right form; argparse puts the option's name
before it.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

_SECONDS_BY_UNIT = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_DAY = 86400.0


def time(argument: str, unit: str) -> float:
    """Read a time such as ``60ms``, up to a day, as seconds; a number alone has the ``unit``."""
    match = re.match(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-zµ]*)\s*$", argument)
    # Without a match, or with an unknown unit, the time is 0, which is refused like a 0.
    digits, given = match.groups() if match else ("0", "")
    seconds = float(digits) * _SECONDS_BY_UNIT.get(given or unit, 0)
    if not 0 < seconds <= _DAY:
        raise argparse.ArgumentTypeError(
            f"{argument!r}: expected a time above 0, up to a day, in"
            f" {', '.join(_SECONDS_BY_UNIT)}, such as 10{unit}"
        )
    return seconds


def output(argument: str) -> Path:
    """Read the path of a file that is to be written, or written again, into any folder."""
    path = Path(argument)
    # A pipe, a device or a link to nothing would swallow the file.
    if (path.is_dir() or os.path.lexists(argument)) and not path.is_file():
        raise argparse.ArgumentTypeError(f"{argument!r} exists, and is no file")
    there = next(parent for parent in path.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(str(path if path.exists() else there), os.W_OK):
        raise argparse.ArgumentTypeError(f"{argument!r} cannot be written")
    return path
