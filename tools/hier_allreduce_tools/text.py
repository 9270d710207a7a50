"""Numbers and tables as every command prints them."""

from __future__ import annotations

import re
from itertools import zip_longest
from typing import Iterable, List, Sequence

_NUMBER = re.compile(r"[\d.]+(e[-+]\d+)?( ?[kMGTµm]?[Bsx]|%)?$")
_DECIMAL = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_BINARY = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def amount(size: float, binary: bool = False) -> str:
    """Return bytes as ``100 MB``, or with ``binary`` as ``64 KiB``."""
    for unit, symbol in _BINARY if binary else _DECIMAL:
        if size >= unit:
            return f"{size / unit:.4g} {symbol}"
    return f"{size:.0f} B"


def duration(seconds: float, digits: int = 2) -> str:
    """Return seconds as ``3.8 ms`` or ``76 µs``."""
    for unit, symbol in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{rounded(seconds / unit, digits)} {symbol}"
    return f"{rounded(seconds * 1e6, digits)} µs"


def rate(bytes_per_second: float) -> str:
    """Return bytes/s as ``24 GB/s``; in a smaller unit below 0.01 GB/s."""
    if bytes_per_second < 1e7:
        return f"{amount(bytes_per_second)}/s"
    return f"{rounded(bytes_per_second / 1e9)} GB/s"


def rounded(quantity: float, digits: int = 2) -> str:
    """Return a number with so many digits, and never as ``1e+03``."""
    return f"{float(f'{quantity:.{digits}g}'):g}"


def count(quantity: int, noun: str) -> str:
    """Return ``1 chunk`` or ``4 chunks``."""
    return f"{quantity} {noun}" if quantity == 1 else f"{quantity} {noun}s"


def table(rows: Iterable[Sequence[object]], all_right: bool = False) -> str:
    """Return a header and rows as text, with two blanks between columns.

    A row may lack its last cells.

    Columns of numbers are aligned right; with ``all_right``, every column but the first.
    """
    # Turn the table, because a column has one width and one alignment.
    lines = [list(map(str, row)) for row in rows]
    padded: List[List[str]] = []
    for column in zip_longest(*lines, fillvalue=""):
        width = max(map(len, column))
        is_right = bool(padded) if all_right else all(map(_NUMBER.match, column[1:]))
        padded.append([cell.rjust(width) if is_right else cell.ljust(width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded))
