"""Kernels and copies over time as a picture: two bars for each device."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple, Union

import numpy as np

from .step import COPY, PACK, PASS, SUM, UNPACK, UPDATE

# In the order in which kinds are drawn: a short kernel beside a pass remains visible.
_COLORS = {
    PASS: "#c7c7c7",
    PACK: "#9467bd",
    COPY: "#ff7f0e",
    SUM: "#d62728",
    UNPACK: "#8c564b",
    UPDATE: "#1f77b4",
}
_PER_LANE = 0.42  # inches

# By kind: the number of a lane, and when something began and ended there, in ms.
Bars = Dict[str, List[Tuple[int, float, float]]]


def draw(
    bars: Bars,
    lanes: Sequence[str],
    title: str,
    path: Union[str, Path],
    pass_ends: Sequence[float],
) -> None:
    """Draw a lane for each device: its kernels, and below them the copies that it sends.

    ``path`` is a file in a format of matplotlib, such as cost.png; ``pass_ends`` are the ms at
    which the pass of each lane ends.
    """
    from matplotlib.figure import Figure  # takes a second, and is needed for a picture only

    end = max(end for of_kind in bars.values() for _, _, end in of_kind)
    begins = [0.0]
    tail = end - min(pass_ends)
    # A short end of the step is drawn enlarged, because what the all-reduce adds is there.
    if tail < end / 3:
        begins = [end - 1.5 * tail, 0.0]
    height = 1.4 + len(begins) * (0.6 + _PER_LANE * len(lanes))
    figure: Any = Figure(figsize=(11, height), dpi=110, layout="constrained")
    parts = figure.subplots(len(begins), squeeze=False)[:, 0]
    rows = np.arange(len(lanes))
    for axes, begin in zip(parts, begins):
        shortest = (end - begin) / 2000  # a bar is at least about half a pixel wide
        for kind in filter(bars.__contains__, _COLORS):
            # Copies are below the kernels, because both run at the same time.
            below, inches = (0.59, 0.12) if kind == COPY else (0.22, 0.18)
            lane, start, stop = np.array(bars[kind]).T
            stop = np.maximum(stop, start + shortest)
            look = {"color": _COLORS[kind], "linewidth": 72 * inches, "label": kind}
            axes.hlines(lane + below, start, stop, **look)
        axes.vlines(pass_ends, rows - 0.04, rows + 0.78, "black", linewidth=1, label="pass ends")
        axes.set_xlim(begin, end)
        axes.set_ylim(len(lanes) - 0.1, -0.15)
        axes.set_yticks(rows + 0.37, lanes, fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    parts[-1].set_xlabel("ms")
    # The title wraps, because the summary of a step is a long line.
    figure.suptitle(title, fontsize=9, wrap=True, x=0.01, ha="left")
    # 4.5 letters below the axis are below its own words.
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "borderaxespad": 4.5}
    parts[-1].legend(ncol=len(bars) + 1, fontsize=8, **place)
    figure.savefig(path)
