"""Kernels and copies over time as a picture: two bars for each device."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple, Union

from .step import COPY, PACK, PASS, SUM, UNPACK, UPDATE

_COLORS = {
    # kind: its words in the legend, and its color
    PASS: ("forward and backward pass", "#c7c7c7"),
    PACK: ("packing", "#9467bd"),
    COPY: ("copies that it sends", "#ff7f0e"),
    SUM: ("sums", "#d62728"),
    UNPACK: ("unpacking", "#8c564b"),
    UPDATE: ("updates", "#1f77b4"),
}
_PER_LANE = 0.42  # inches


# Of the number of a lane and a kind: when something ran, as its begin and how long, in ms.
Bars = Dict[Tuple[int, str], List[Tuple[float, float]]]


def draw(
    bars: Bars,
    lanes: Sequence[str],
    title: str,
    path: Union[str, Path],
    pass_ends: Sequence[float] = (),
    time: str = "ms",
) -> None:
    """Draw a lane for each device: its kernels, and below them the copies that it sends.

    ``path`` is a file in a format of matplotlib, such as cost.png. With ``pass_ends``, the ms at
    which the pass of each lane ends, a short end of the step is enlarged first.
    """
    from matplotlib.figure import Figure  # takes a second, and is needed for a picture only

    end = max(begin + ms for of_kind in bars.values() for begin, ms in of_kind)
    windows = {"the whole step": (0.0, end)}
    tail = end - min(pass_ends, default=0.0)
    # A short end of the step is drawn enlarged, because what the all-reduce adds is there.
    if tail < end / 3:
        windows = {"the end of the step": (end - 1.5 * tail, end), **windows}
    height = 1.4 + len(windows) * (0.6 + _PER_LANE * len(lanes))
    figure: Any = Figure(figsize=(11, height), dpi=110, layout="constrained")
    parts = figure.subplots(len(windows), squeeze=False)[:, 0]
    for axes, (words, window) in zip(parts, windows.items()):
        _draw_window(axes, bars, lanes, window)
        for lane, at in enumerate(pass_ends):
            axes.plot([at, at], [lane - 0.04, lane + 0.78], color="black", linewidth=1)
        mark = "; tall line: the end of each pass" if pass_ends else ""
        axes.set_title(words + mark, loc="left", fontsize=8)
    parts[-1].set_xlabel(time)
    # The title wraps, because the summary of a step is a long line.
    figure.suptitle(title, fontsize=9, wrap=True, x=0.01, ha="left")
    kinds = len({kind for _, kind in bars})
    # 4.5 letters below the axis are below its own words.
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "borderaxespad": 4.5}
    parts[-1].legend(ncol=kinds, fontsize=8, **place)
    figure.savefig(path)


def _draw_window(axes: Any, bars: Bars, lanes: Sequence[str], window: Tuple[float, float]) -> None:
    """Draw the bars of a window of time."""
    begin, end = window
    shortest = (end - begin) / 2000  # a bar is at least about half a pixel wide
    for kind, (words, color) in _COLORS.items():
        # Copies are below the kernels, because both run at the same time.
        top, height = (0.44, 0.3) if kind == COPY else (0.0, 0.44)
        for lane in range(len(lanes)):
            if (lane, kind) not in bars:
                continue
            seen = [(at, max(shortest, ms)) for at, ms in bars[lane, kind]]
            axes.broken_barh(seen, (lane + top, height), color=color, linewidth=0, label=words)
            words = ""  # one entry of the legend is enough
    axes.set_xlim(begin, end)
    axes.set_ylim(len(lanes) - 0.1, -0.15)
    axes.set_yticks([lane + 0.37 for lane in range(len(lanes))], lanes, fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
