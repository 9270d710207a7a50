"""Kernels and copies over time as a picture: two bars for each device."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union

from hier_allreduce._lazy import require
from hier_allreduce.errors import HierAllreduceError
from .traced import COPY, PACK, PASS, SUM, UNPACK, UPDATE

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


class Bar(NamedTuple):
    """Something that ran: the number of its lane, its kind, and its time in ms."""

    lane: int
    kind: str
    begin: float
    end: float


def draw(
    bars: Sequence[Bar],
    lanes: Sequence[str],
    title: str,
    path: Union[str, Path],
    pass_ends: Sequence[float] = (),
    time: str = "ms",
) -> None:
    """Draw a lane for each device: its kernels, and below them the copies that it sends.

    Args:
        bars: what ran, in all lanes.
        lanes: their names.
        title: above the picture.
        path: a file in a format of matplotlib, such as cost.png.
        pass_ends: ms at which the pass of each lane ends. With them the picture has a second part,
            the end of the step enlarged, if that is short.
        time: the words below the axis of time.

    Raises:
        HierAllreduceError: matplotlib is missing, or has no such format.
    """
    try:
        require("matplotlib", "a picture")
    except ModuleNotFoundError as error:
        raise HierAllreduceError(str(error)) from None
    from matplotlib.figure import Figure  # needed for a picture only

    end = max((bar.end for bar in bars), default=1.0)
    windows = [(min([0.0, *(bar.begin for bar in bars)]), end)]
    tail = end - min(pass_ends, default=0.0)
    # A short end of the step is drawn once more, because what the all-reduce adds is there.
    if tail < end / 3:
        windows.append((end - 1.5 * tail, end))
    height = 1.4 + len(windows) * (0.6 + _PER_LANE * len(lanes))
    figure: Any = Figure(figsize=(11, height), dpi=110, layout="constrained")
    # The check is here, because the error of matplotlib would not name the file.
    formats = figure.canvas.get_supported_filetypes()
    if Path(path).suffix[1:] not in formats:
        raise HierAllreduceError(
            f"{str(path)!r} ends with no format of matplotlib, such as cost.png; there are"
            f" {', '.join(formats)}"
        )
    axes = figure.subplots(len(windows), squeeze=False)[:, 0]
    for window_axes, window in zip(axes, windows):
        _draw_window(window_axes, bars, lanes, window, pass_ends)
    axes[-1].set_xlabel(time)
    if len(windows) > 1:
        axes[0].set_title("the whole step; tall line: the end of each pass", loc="left", fontsize=8)
        axes[1].set_title("its end", loc="left", fontsize=8)
    # The title wraps, because the summary of a step is a long line.
    figure.suptitle(title, fontsize=9, wrap=True, x=0.01, ha="left")
    _add_legend(axes[-1], bars)
    figure.savefig(path)


def _draw_window(
    axes: Any,
    bars: Sequence[Bar],
    lanes: Sequence[str],
    window: Tuple[float, float],
    pass_ends: Sequence[float],
) -> None:
    """Draw the bars of a window of time."""
    begin, end = window
    shortest = (end - begin) / 2000  # a bar is at least about half a pixel wide
    for kind, (_, color) in _COLORS.items():
        # Copies are below the kernels, because both run at the same time.
        top, height = (0.44, 0.3) if kind == COPY else (0.0, 0.44)
        for lane in range(len(lanes)):
            of_lane = [bar for bar in bars if bar.lane == lane and bar.kind == kind]
            spans = list(_joined(of_lane, window, shortest))
            axes.broken_barh(spans, (lane + top, height), color=color, linewidth=0)
    for lane, at in enumerate(pass_ends):
        axes.plot([at, at], [lane - 0.04, lane + 0.78], color="black", linewidth=1)
    axes.set_xlim(begin, end)
    axes.set_ylim(len(lanes) - 0.1, -0.15)
    axes.set_yticks([lane + 0.37 for lane in range(len(lanes))], lanes, fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _joined(
    bars: Iterable[Bar], window: Tuple[float, float], shortest: float
) -> Iterable[Tuple[float, float]]:
    """Yield begin and length of bars in a window; those that nearly touch are joined."""
    # Bars that nearly touch become one, because a picture of all of them would be slow and large.
    span_begin: Optional[float] = None
    span_end = 0.0
    for bar in sorted(bars, key=lambda bar: bar.begin):
        begin, end = max(bar.begin, window[0]), min(bar.end, window[1])
        if end < begin:
            continue
        if span_begin is not None and begin - span_end < shortest:
            span_end = max(span_end, end)
            continue
        if span_begin is not None:
            yield span_begin, max(shortest, span_end - span_begin)
        span_begin, span_end = begin, end
    if span_begin is not None:
        yield span_begin, max(shortest, span_end - span_begin)


def _add_legend(axes: Any, bars: Iterable[Bar]) -> None:
    """Explain the colors that the picture has."""
    from matplotlib.patches import Patch

    kinds = {bar.kind for bar in bars}
    handles: List[Any] = []
    for kind, (words, color) in _COLORS.items():
        if kind in kinds:
            handles.append(Patch(facecolor=color, label=words))
    axes.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        borderaxespad=4.5,  # letters: below the axis' own words
        ncol=len(handles),
        fontsize=8,
    )
