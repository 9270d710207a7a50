"""Kernels and copies over time as a picture: two bars for each device."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union

from .._lazy import require
from ..errors import HierAllreduceError
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
_PER_ROW = 0.42  # inches


class Bar(NamedTuple):
    """Something that ran: the number of its row, its kind, and its time in ms."""

    row: int
    kind: str
    begin: float
    end: float


def draw(
    bars: Sequence[Bar],
    rows: Sequence[str],
    title: str,
    path: Union[str, Path],
    pass_ends: Sequence[float] = (),
    time: str = "ms",
) -> None:
    """Draw a row for each device: its kernels, and below them the copies that it sends.

    Args:
        bars: of all rows.
        rows: their names.
        title: above the picture.
        path: of a file in a format of matplotlib, such as cost.png.
        pass_ends: ms at which the pass of each row ends. With them the picture has a second part,
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
    if tail < end / 3:
        windows.append((end - 1.5 * tail, end))
    height = 1.4 + len(windows) * (0.6 + _PER_ROW * len(rows))
    figure: Any = Figure(figsize=(11, height), dpi=110, layout="constrained")
    formats = figure.canvas.get_supported_filetypes()
    if Path(path).suffix[1:] not in formats:
        raise HierAllreduceError(
            f"{str(path)!r} ends with no format of matplotlib, such as cost.png; there are"
            f" {', '.join(formats)}"
        )
    parts = figure.subplots(len(windows), squeeze=False)[:, 0]
    for part, window in zip(parts, windows):
        _draw_window(part, bars, rows, window, pass_ends)
    parts[-1].set_xlabel(time)
    if len(windows) > 1:
        parts[0].set_title("the whole step; black: the end of each pass", loc="left", fontsize=8)
        parts[1].set_title("its end", loc="left", fontsize=8)
    figure.suptitle(title, fontsize=9, wrap=True, x=0.01, ha="left")
    _add_legend(parts[-1], bars)
    figure.savefig(path)


def _draw_window(
    part: Any,
    bars: Sequence[Bar],
    rows: Sequence[str],
    window: Tuple[float, float],
    pass_ends: Sequence[float],
) -> None:
    """Draw the bars of a window of time."""
    begin, end = window
    shortest = (end - begin) / 2000  # a bar is at least about half a pixel wide
    for kind, (_, color) in _COLORS.items():
        top, height = (0.44, 0.3) if kind == COPY else (0.0, 0.44)
        for row in range(len(rows)):
            of_row = [bar for bar in bars if bar.row == row and bar.kind == kind]
            spans = list(_joined(of_row, window, shortest))
            part.broken_barh(spans, (row + top, height), color=color, linewidth=0)
    for row, at in enumerate(pass_ends):
        part.plot([at, at], [row - 0.04, row + 0.78], color="black", linewidth=1)
    part.set_xlim(begin, end)
    part.set_ylim(len(rows) - 0.1, -0.15)
    part.set_yticks([row + 0.37 for row in range(len(rows))], rows, fontsize=8)
    part.tick_params(axis="x", labelsize=8)
    part.spines[["top", "right"]].set_visible(False)


def _joined(
    bars: Iterable[Bar], window: Tuple[float, float], shortest: float
) -> Iterable[Tuple[float, float]]:
    """Yield begin and length of bars in a window; those that nearly touch are joined."""
    first: Optional[float] = None
    last = 0.0
    for bar in sorted(bars, key=lambda bar: bar.begin):
        begin, end = max(bar.begin, window[0]), min(bar.end, window[1])
        if end < begin:
            continue
        if first is not None and begin - last < shortest:
            last = max(last, end)
            continue
        if first is not None:
            yield first, max(shortest, last - first)
        first, last = begin, end
    if first is not None:
        yield first, max(shortest, last - first)


def _add_legend(part: Any, bars: Iterable[Bar]) -> None:
    """Explain the colors that the picture has."""
    from matplotlib.patches import Patch

    kinds = {bar.kind for bar in bars}
    handles: List[Any] = []
    for kind, (words, color) in _COLORS.items():
        if kind in kinds:
            handles.append(Patch(facecolor=color, label=words))
    part.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        borderaxespad=4.5,  # letters: below the axis' own words
        ncol=len(handles),
        fontsize=8,
    )
