"""The measured steps as a picture: a bar for each candidate, with the quartiles of its runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

import numpy as np

from ..._lazy import require
from ...errors import HierAllreduceError
from .verdict import Row, Verdict

OURS = "#1f77b4"
THEIRS = "#ff7f0e"


def check(path: Path) -> None:
    """Check that a picture can be drawn, before anything is measured.

    Raises:
        ModuleNotFoundError: matplotlib is missing; the message says what installs it.
        HierAllreduceError: it has no such format.
    """
    require("matplotlib", "tune --picture")
    from matplotlib.figure import Figure  # needed for a picture only

    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:] not in formats:
        raise HierAllreduceError(
            f"--picture: {str(path)!r} ends with no format of matplotlib, such as steps.png;"
            f" there are {', '.join(formats)}"
        )


def draw(verdict: Verdict, path: Path, program: str) -> None:
    """Write a picture of a verdict, in the format that the name of the file asks for.

    Rows have the order of the table. The line shows half of the runs, and not the longest one,
    which another program may have disturbed.
    """
    from matplotlib.figure import Figure

    rows = [row for row in reversed(verdict.rows) if row.runs]  # from the bottom to the top
    figure: Any = Figure(figsize=(9, 2 + 0.34 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for number, row in enumerate(rows):
        _bar(axes, number, row)
    as_it_is = next((row for row in rows if row.candidate.is_as_it_is), None)
    if as_it_is is not None:
        axes.axvline(1e3 * as_it_is.step, color="black", linestyle="--", linewidth=1, zorder=0.5)
    axes.set_yticks(range(len(rows)), [_label(row, row is verdict.best) for row in rows])
    axes.set_xlabel(
        "time of a training step, ms (shorter is better); line: the middle half of the runs"
    )
    axes.set_title(f"{program}\n{verdict.sentences[0]}", fontsize=10, loc="left", wrap=True)
    axes.margins(y=0.02)
    axes.set_xlim(0, 1.15 * max(_end(row) for row in rows))
    _legend(axes, rows)
    figure.savefig(path, dpi=120)


def _bar(axes: Any, number: int, row: Row) -> None:
    """Draw the bar of a candidate, the quartiles of its runs, and its step in figures."""
    step = 1e3 * row.step
    color = THEIRS if row.candidate.peer else OURS
    is_as_it_is = row.candidate.is_as_it_is
    axes.barh(
        number,
        step,
        color=color,
        edgecolor="black" if is_as_it_is else color,
        hatch="//" if is_as_it_is else None,
        linewidth=1.5 if is_as_it_is else 0,
    )
    axes.plot(_quartiles(row), [number, number], color="black", linewidth=1.2, marker="|")
    axes.annotate(
        f"{step:.3g}",
        (_end(row), number),
        (6, 0),
        textcoords="offset points",
        va="center",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )


def _quartiles(row: Row) -> List[float]:
    """Return the milliseconds below which a quarter of the runs are, and three quarters."""
    return [float(ms) for ms in np.percentile([1e3 * run.step for run in row.runs], [25, 75])]


def _end(row: Row) -> float:
    """Return the milliseconds at which the bar and its line end."""
    return max(1e3 * row.step, *_quartiles(row))


def _label(row: Row, is_best: bool) -> str:
    return f"use this → {row.title}" if is_best else row.title


def _legend(axes: Any, rows: List[Row]) -> None:
    """Explain the colours that the picture has."""
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=OURS, label="hier_allreduce"),
        Patch(facecolor=OURS, edgecolor="black", hatch="//", label="the program as it is"),
    ]
    if any(row.candidate.peer for row in rows):
        handles.append(Patch(facecolor=THEIRS, label="of TensorFlow, tensorpack, NCCL"))
    axes.legend(
        handles=handles,
        fontsize=8,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        borderaxespad=5.5,  # letters: below the axis' own words, however many bars there are
        ncol=3,
    )
