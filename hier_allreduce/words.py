"""Numbers and tables as people read them."""

from __future__ import annotations

import re
from typing import Iterable, Sequence

_NUMBER = re.compile(r"[\d.]+( ?[kMGµm]?[Bsx]|%)?$")


def amount(size: float) -> str:
    """``100 MB``, ``64 kB``: bytes, in powers of 1000."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size:.0f} B"


def duration(seconds: float) -> str:
    """``3.76 ms``, ``76 µs``."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs"


def count(number: int, what: str) -> str:
    """``1 chunk``, ``4 chunks``."""
    return f"{number} {what}{'s' * (number != 1)}"


def table(rows: Iterable[Sequence[object]], all_right: bool = False) -> str:
    """A header and rows of text, two blanks between columns; a row may lack its last cells.

    Columns of numbers are set to the right; with ``all_right`` every column but the first.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    longest = max(map(len, cells))
    columns = list(zip(*(row + [""] * (longest - len(row)) for row in cells)))
    widths = [max(map(len, column)) for column in columns]
    right = [place > 0 if all_right else all(map(_NUMBER.match, column[1:])) for place, column in enumerate(columns)]
    lines = [
        "  ".join(cell.rjust(width) if r else cell.ljust(width) for cell, width, r in zip(row, widths, right))
        for row in zip(*columns)
    ]
    return "\n".join(line.rstrip() for line in lines)
