"""Numbers, names and tables as every command reads and prints them."""

from __future__ import annotations

from typing import Iterable, List, Sequence

from tabulate import tabulate


def rounded(quantity: float) -> str:
    """Return a number with two digits, and never as ``1e+03``."""
    return f"{float(f'{quantity:.2g}'):g}"


def names_in(argument: str) -> List[str]:
    """Read the names in ``a,b``, each once."""
    return list(dict.fromkeys(argument.split(",")))


def table(rows: Iterable[Sequence[str]]) -> str:
    """Return a header and rows as text; every column but the first is aligned right."""
    text = tabulate(
        rows,
        headers="firstrow",
        tablefmt="plain",
        disable_numparse=True,
        stralign="right",
        colalign=("left",),
    )
    return str(text)
