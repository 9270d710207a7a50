"""Results of ``emulated.py`` as text."""

from __future__ import annotations

import statistics
from typing import Any, Dict, List, Sequence

from emulated_cell import OURS

from hier_allreduce.formatting import table

Result = Dict[str, Any]  # of one cell, as in the JSON file


def cell_table(cells: Sequence[Result]) -> str:
    """Return the table of cells that differ in the host's share only."""
    first = cells[0]
    kind = "mean" if first["average"] else "sum"
    shares = "  ".join(
        f"host {cell['host']:g}: a step without all-reduce {cell['base_ms']:.1f} ms,"
        f" an op costs the host {cell['host_us_an_op']:.2f} µs."
        for cell in cells
    )
    title = f"{first['machine']}, {first['model']}, {kind}, scale {first['scale']:g}. {shares}"
    header = ["exposed, ms"]
    for cell in cells:
        header += [f"host {cell['host']:g}", "least–most", "÷ limit"]
    rows: List[List[str]] = [header + ["limit, ms"]]
    for name, contender in first["contenders"].items():
        row = [name]
        for cell in cells:
            row += _numbers(cell["contenders"][name])
        rows.append([*row, f"{contender['limit_ms']:.1f}"])
    return f"{title}\n{table(rows, all_right=True)}"


def _numbers(contender: Result) -> List[str]:
    median = contender["median_ms"]
    least, most = min(contender["exposed_ms"]), max(contender["exposed_ms"])
    of_limit = median / contender["limit_ms"] if contender["limit_ms"] else 0
    return [f"{median:.1f}", f"{least:.1f}–{most:.1f}", f"{of_limit:.2f}"]


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
    rows = [["machine", "model", "", "host", "ours", "limit", "best peer", "", "ours ÷ peer"]]
    ratios = []
    for cell in cells:
        peer = best_peer(cell)
        ratios.append(ours_of_best_peer(cell))
        ours = cell["contenders"][OURS]
        where = [cell["machine"], cell["model"], "mean" if cell["average"] else "sum"]
        numbers = [f"{cell['host']:g}", f"{ours['median_ms']:.1f}", f"{ours['limit_ms']:.1f}"]
        beside = [f"{cell['contenders'][peer]['median_ms']:.1f}", peer, f"{ratios[-1]:.2f}"]
        rows.append([*where, *numbers, *beside])
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
