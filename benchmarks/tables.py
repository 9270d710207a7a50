"""Results of the programs as text, and the files that they write."""

from __future__ import annotations

import importlib
import json
import statistics
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

from ratios import OURS, best_baseline, exposed_ms, exposed_ratio, price, step_ratio
from rounds import COMPARED, STEP, UNFLAGGED

from hier_allreduce.formatting import table

Result = Dict[str, Any]  # of one cell, as in the JSON file


def check_files(json_path: Optional[str], picture_path: Optional[str] = None) -> None:
    """Check what would otherwise fail after minutes of measuring.

    Raises:
        SystemExit: a file cannot be in this place, or is no picture.
        ModuleNotFoundError: matplotlib is missing.
    """
    for path in map(Path, filter(None, [json_path, picture_path])):
        if not path.absolute().parent.is_dir():
            raise SystemExit(f"{path}: there is no such folder")
        if path.is_dir():
            raise SystemExit(f"{path}: expected a file, not a folder")
    if picture_path:
        if Path(picture_path).suffix not in (".png", ".svg", ".pdf"):
            raise SystemExit(f"{picture_path}: expected a .png, .svg or .pdf")
        importlib.import_module("matplotlib")


def write(results: Any, path: Optional[str]) -> None:
    """Write the results as JSON, if there is a path."""
    if path:
        Path(path).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def list_of(kind: Callable[[str], Any]) -> Callable[[str], List[Any]]:
    """Return the parser of a list with commas, on a command line."""
    return lambda text: [kind(part) for part in text.split(",")]


def cell_table(cells: Sequence[Result]) -> str:
    """Return the table of cells that differ in the host's share only."""
    header = ["exposed, ms"]
    for cell in cells:
        header += [f"host {cell['host']:g}", "least–most"]
    rows: List[List[str]] = [[*header, "limit, ms"]]
    for name, contender in cells[0]["contenders"].items():
        row = [name]
        for cell in cells:
            rounds = cell["contenders"][name]["exposed_ms"]
            row += [f"{exposed_ms(cell, name):.1f}", f"{min(rounds):.1f}–{max(rounds):.1f}"]
        row.append(f"{contender['limit_ms']:.1f}" if "limit_ms" in contender else "–")
        rows.append(row)
    lines = [title(cells), table(rows)]
    lines += [f"host {cell['host']:g} is refused: {cell['refused']}" for cell in faulty(cells)]
    return "\n".join(lines)


def title(cells: Sequence[Result]) -> str:
    """Return the line above the table of some cells."""
    first = cells[0]
    bases = [f"{cell['base_ms']:.1f} (host {cell['host']:g})" for cell in cells]
    scale = f", scale {first['scale']:g}" if "scale" in first else ""
    op = f" An op costs the host {first['op_us']:.1f} µs." if "op_us" in first else ""
    return (
        f"{first['machine']}, {first['model']}, {kind(first)}, pass {first['pass_ms']:g}{scale}."
        f" A step without all-reduce: {', '.join(bases)} ms.{op}"
    )


def faulty(cells: Sequence[Result]) -> List[Result]:
    """Return the cells that are refused."""
    return [cell for cell in cells if "refused" in cell]


def kind(cell: Result) -> str:
    """Return what the all-reduces compute."""
    return "mean" if cell["average"] else "sum"


def summary(cells: Sequence[Result]) -> str:
    """Return ours beside the best baseline in each cell, and the medians of the ratios."""
    head = ["machine", "model", "pass", "host", "ours", "best baseline", "", "÷ exposed", "÷ step"]
    rows = [head]
    exposed, steps = [], []
    for cell in cells:
        baseline = best_baseline(cell)
        exposed.append(exposed_ratio(cell, OURS, baseline))
        steps.append(step_ratio(cell, OURS, baseline))
        row = [cell["machine"], cell["model"], f"{cell['pass_ms']:g}", f"{cell['host']:g}"]
        row += [f"{exposed_ms(cell, OURS):.1f}", f"{exposed_ms(cell, baseline):.1f}", baseline]
        rows.append([*row, f"{exposed[-1]:.2f}", f"{steps[-1]:.3f}"])
    last = (
        f"ours ÷ best baseline: exposed times {statistics.median(exposed):.2f} in the median,"
        f" {min(exposed):.2f} to {max(exposed):.2f}; steps {statistics.median(steps):.3f}"
    )
    return f"{table(rows)}\n{last}"


def price_rows(results: Sequence[Result]) -> List[List[str]]:
    """Return a table of the steps, and of what they take longer for a check."""
    about = ("ops", "built in, s")  # without compared copies, and with them
    lines = [["", "pass, ms", "host", "step, ms", "the flag, ms", "copies compared, ms", *about]]
    for result in results:
        step_ms = result["step_ms"]
        own = statistics.median(step_ms[STEP])
        where = f"{result['machine']}, {result['model']}"
        host = f"{result.get('host', '–')}"
        prices = [price(step_ms, STEP, STEP + UNFLAGGED), price(step_ms, STEP + COMPARED, STEP)]
        words = [
            f"{middle:.1f} ({low:.1f} to {high:.1f}), {middle / own:.1%}"
            for low, middle, high in prices
        ]
        built = [
            ", ".join(f"{result[key][kind]}" for kind in (STEP, STEP + COMPARED))
            if key in result
            else "–"
            for key in ("ops", "build_s")
        ]
        lines.append([where, f"{result['pass_ms']:g}", host, f"{own:.1f}", *words, *built])
    return lines
