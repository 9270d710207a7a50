"""Values of options: times with a unit, and files to write.

A reader raises ``argparse.ArgumentTypeError`` with the right form; argparse puts the option's name
before it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import tempfile
from pathlib import Path
from typing import List

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
    """Read the path of a file that can be written; nothing is left of the attempt."""
    path = Path(argument)
    missing: List[Path] = []
    try:
        if path.is_dir():
            raise argparse.ArgumentTypeError(
                f"{argument!r} is no name of a file, such as folder/file"
            )
        # A pipe, a device or a link to nothing would swallow the file.
        if os.path.lexists(argument) and not path.is_file():
            raise argparse.ArgumentTypeError(f"{argument!r} exists, and is no file")
        # Only a file that was made proves that one can be: rights, quotas and mounts all count.
        missing = [folder for folder in path.absolute().parents if not folder.exists()]
        make_folder(path)
        with tempfile.TemporaryFile(dir=str(path.parent)):
            return path
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{argument!r} cannot be written: {error}") from None
    finally:
        # The innermost folder is the first one, because only an empty one can be removed.
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()


def make_folder(path: Path) -> None:
    """Make the folder of a file that is to be written now."""
    path.parent.mkdir(parents=True, exist_ok=True)
