"""Numbers, tables and warnings as people read them."""

from __future__ import annotations

import sys
import warnings
from itertools import zip_longest
from types import FrameType
from typing import Iterable, List, Optional, Sequence

_DECIMAL = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_LONGEST = 80  # characters of a value in an error
# Frames of these are between a program and this package.
_BETWEEN = ("hier_allreduce", "tensorflow", "tensorpack")


def shown(written: object) -> str:
    """Return how an error shows a value, which may be the content of a file."""
    text = repr(written)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def amount(size: float) -> str:
    """Return bytes as ``100 MB``."""
    for unit, symbol in _DECIMAL:
        if size >= unit:
            return f"{size / unit:.4g} {symbol}"
    return f"{size:.0f} B"


def count(quantity: int, noun: str) -> str:
    """Return ``1 chunk`` or ``4 chunks``."""
    return f"{quantity} {noun}" if quantity == 1 else f"{quantity} {noun}s"


def table(rows: Iterable[Sequence[object]]) -> str:
    """Return a header and rows as text, with two blanks between columns.

    A row may lack its last cells. Every column but the first is aligned right.
    """
    # Turn the table, because a column has one width and one alignment.
    lines = [list(map(str, row)) for row in rows]
    padded: List[List[str]] = []
    for column in zip_longest(*lines, fillvalue=""):
        width = max(map(len, column))
        padded.append([cell.rjust(width) if padded else cell.ljust(width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded))


def warn(words: str) -> None:
    """Give a ``UserWarning`` at the line of the program that this package works for."""
    level = 1
    frame: Optional[FrameType] = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _BETWEEN:
        level += 1
        frame = frame.f_back
    warnings.warn(words, stacklevel=level)
