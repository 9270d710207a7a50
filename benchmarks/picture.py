"""A picture of what ``emulated.py`` or ``real.py`` measured, from its JSON."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Tuple

import numpy as np

# The order of the tables. Okabe and Ito (2008): colours that colour-blind people tell apart.
COLORS = {
    "ours": "#d55e00",
    "ours in a tf.function": "#e69f00",
    "tensorpack packed": "#0072b2",
    "tensorpack": "#56b4e9",
    "tensorpack gpu": "#8fbbd6",
    "HierarchicalCopyAllReduce": "#009e73",
    "HierarchicalCopyAllReduce in 8 packs": "#7fceb9",
    "ReductionToOneDevice": "#9a9a9a",
}
OTHER = "#cc79a7"

Row = Tuple[str, str, float]


def draw(
    results: Dict[str, Any],
    path: str,
    model: Optional[str] = None,
    titles: Optional[Mapping[str, str]] = None,
) -> None:
    """Draw the exposed times of ours and of known baselines into a .png, .svg or .pdf file.

    A row is a machine, a model and a pass, a column a share of the host. Bars are medians. A line
    has the middle half of the rounds: the longest round says more of what else ran than of the
    all-reduce, and the JSON has it.

    Args:
        results: what ``emulated.py --json`` writes.
        path: of the picture.
        model: the only one to draw; None: all of them.
        titles: words for names of all-reduces and of machines; by default these names.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = [cell for cell in results["cells"] if model in (None, cell["model"])]
    rows = list(dict.fromkeys(map(_row_of, cells)))
    hosts = sorted({cell["host"] for cell in cells})
    size = (5 * len(hosts), 0.6 + 1.7 * len(rows))
    figure = Figure(figsize=size, dpi=120)
    axes = figure.subplots(len(rows), len(hosts), squeeze=False)
    for cell in cells:
        _bars(axes[rows.index(_row_of(cell))][hosts.index(cell["host"])], cell, titles or {})
    figure.supxlabel("bars: medians; lines: the middle half of the rounds", fontsize=8)
    figure.tight_layout()
    FigureCanvasAgg(figure).print_figure(path)


def _row_of(cell: Dict[str, Any]) -> Row:
    return cell["machine"], cell["model"], cell["pass_ms"]


def _bars(axis: Any, cell: Dict[str, Any], titles: Mapping[str, str]) -> None:
    shown = [name for name in COLORS if name in cell["contenders"]] or list(cell["contenders"])
    for place, name in enumerate(reversed(shown)):
        contender = cell["contenders"][name]
        median = contender["median_ms"]
        axis.barh(place, median, color=COLORS.get(name, OTHER), height=0.7)
        lower, upper = np.percentile(contender["exposed_ms"], [25, 75])
        axis.hlines(place, lower, upper, color="k")
        axis.text(max(median, upper), place, f"  {median:.1f}", va="center", fontsize=8)
    words = [titles.get(name, name) for name in reversed(shown)]
    axis.set_yticks(range(len(shown)), words, fontsize=8)
    machine = titles.get(cell["machine"], cell["machine"])
    where = f"{machine}, {cell['model']}"
    load = f"pass {cell['pass_ms']:g} ms, host {cell['host']:g}: exposed, ms"
    axis.set_title(f"{where}\n{load}", loc="left", fontsize=9)
    axis.margins(x=0.15)
    axis.tick_params(axis="x", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
