"""Results of ``emulated.py`` as text."""

from __future__ import annotations

import statistics
from typing import Any, Dict, List, Sequence

from emulated_cell import OURS

from hier_allreduce.formatting import table

Result = Dict[str, Any]  # of one cell, as in the JSON file


def cell_table(cells: Sequence[Result]) -> str:
    """Return the table of cells that differ in the host's share only."""
    header = ["exposed, ms"]
    for cell in cells:
        header += [f"host {cell['host']:g}", "least–most", "÷ limit"]
    rows: List[List[str]] = [[*header, "limit, ms"]]
    for name, contender in cells[0]["contenders"].items():
        row = [name]
        for cell in cells:
            row += _numbers(cell["contenders"][name])
        row.append(f"{contender['limit_ms']:.1f}")
        rows.append(row)
    return f"{_title(cells)}\n{table(rows, all_right=True)}"


def _title(cells: Sequence[Result]) -> str:
    first = cells[0]
    bases = [f"{cell['base_ms']:.1f} (host {cell['host']:g})" for cell in cells]
    return (
        f"{first['machine']}, {first['model']}, {_kind(first)}, scale {first['scale']:g}."
        f" A step without all-reduce: {', '.join(bases)} ms."
        f" An op costs the host {first['host_us_an_op']:.2f} µs."
    )


def _kind(cell: Result) -> str:
    return "mean" if cell["average"] else "sum"


def _numbers(contender: Result) -> List[str]:
    median = contender["median_ms"]
    rounds = contender["exposed_ms"]
    of_limit = median / contender["limit_ms"]
    return [f"{median:.1f}", f"{min(rounds):.1f}–{max(rounds):.1f}", f"{of_limit:.2f}"]


def best_peer(cell: Result) -> str:
    """Return the name of the contender that leaves least exposed beside ours."""
    medians = {name: one["median_ms"] for name, one in cell["contenders"].items()}
    return min((name for name in medians if name != OURS), key=medians.__getitem__)


def ours_of_best_peer(cell: Result) -> float:
    """Return what ours leaves exposed, divided by what the best peer does."""
    contenders = cell["contenders"]
    ours: float = contenders[OURS]["median_ms"]
    return ours / float(contenders[best_peer(cell)]["median_ms"])


def summary(cells: Sequence[Result]) -> str:
    """Return ours beside the best peer in each cell, and the median of the ratios."""
    rows = [["machine", "model", "", "host", "ours", "÷ limit", "best peer", "", "ours ÷ peer"]]
    for cell in cells:
        ours = cell["contenders"][OURS]
        peer = best_peer(cell)
        row = [cell["machine"], cell["model"], _kind(cell), f"{cell['host']:g}"]
        row += [f"{ours['median_ms']:.1f}", f"{ours['median_ms'] / ours['limit_ms']:.2f}"]
        row += [f"{cell['contenders'][peer]['median_ms']:.1f}", peer]
        row.append(f"{ours_of_best_peer(cell):.2f}")
        rows.append(row)
    ratios = [ours_of_best_peer(cell) for cell in cells]
    middle = statistics.median(ratios)
    last = f"ours ÷ best peer: median {middle:.2f}, least {min(ratios):.2f}, most {max(ratios):.2f}"
    return f"{table(rows)}\n{last}"


def anchors_table(anchors: Sequence[Result]) -> str:
    """Return numbers that are known from elsewhere beside the emulated ones."""
    rows = [["anchor", "known", "emulated", "source"]]
    for anchor in anchors:
        known, emulated = f"{anchor['known_ms']:.1f} ms", f"{anchor['emulated_ms']:.1f} ms"
        rows.append([anchor["what"], known, emulated, anchor["source"]])
    return table(rows)
