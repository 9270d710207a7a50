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
    from matplotlib.patches import Patch

    # matplotlib counts bars from the bottom, so that the table's first row comes last.
    rows = [row for row in reversed(verdict.rows) if row.runs]
    figure: Any = Figure(figsize=(9, 2 + 0.34 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    titles = []
    for height, row in enumerate(rows):
        is_best = row is verdict.best
        titles.append(f"use this → {row.title}" if is_best else row.title)
        _bar(axes, height, row)
        # The others are compared with the program as it is, so that its step has a line.
        if row.candidate.is_as_it_is:
            axes.axvline(1e3 * row.step, color="black", linestyle="--", linewidth=1, zorder=0.5)
    axes.set_yticks(range(len(rows)), titles)
    axes.set_xlabel(
        "time of a training step, ms (shorter is better); line: the middle half of the runs"
    )
    axes.set_title(f"{program}\n{verdict.sentences[0]}", fontsize=10, loc="left", wrap=True)
    axes.margins(y=0.02)
    axes.set_xlim(0, 1.15 * max(_end(row) for row in rows))

    handles = [
        Patch(facecolor=OURS, label="hier_allreduce"),
        Patch(facecolor=OURS, edgecolor="black", hatch="//", label="the program as it is"),
    ]
    if any(row.candidate.baseline for row in rows):
        handles.append(Patch(facecolor=THEIRS, label="of TensorFlow, tensorpack, NCCL"))
    # The padding counts letters, so that the legend is below the axis' words under any bars.
    places = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "borderaxespad": 5.5}
    axes.legend(handles=handles, fontsize=8, ncol=3, **places)
    figure.savefig(path, dpi=120)


def _bar(axes: Any, height: int, row: Row) -> None:
    """Draw the bar of a candidate, the quartiles of its runs, and its step in figures."""
    step = 1e3 * row.step
    color = THEIRS if row.candidate.baseline else OURS
    is_as_it_is = row.candidate.is_as_it_is
    axes.barh(
        height,
        step,
        color=color,
        edgecolor="black" if is_as_it_is else color,
        hatch="//" if is_as_it_is else None,
        linewidth=1.5 if is_as_it_is else 0,
    )
    axes.plot(_quartiles(row), [height, height], color="black", linewidth=1.2, marker="|")
    # The figures have a white ground, because the line of the program as it is may cross them.
    axes.annotate(
        f"{step:.3g}",
        (_end(row), height),
        (6, 0),
        textcoords="offset points",
        va="center",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )


def _quartiles(row: Row) -> List[float]:
    """Return the milliseconds below which a quarter of the runs are, and three quarters."""
    steps = [1e3 * run.step for run in row.runs]
    return [float(ms) for ms in np.percentile(steps, [25, 75])]


def _end(row: Row) -> float:
    """Return the milliseconds at which the bar and its line end."""
    return max(1e3 * row.step, *_quartiles(row))
