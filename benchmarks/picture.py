"""A picture of what ``emulated.py`` or ``real.py`` measured, from its JSON."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional

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

LEAST_MS = 0.1  # a logarithm has no place for less


def draw(results: Dict[str, Any], path: str, titles: Optional[Mapping[str, str]] = None) -> None:
    """Draw the exposed times of ours and of known baselines into a .png, .svg or .pdf file.

    A row is a machine and a model. In it each all-reduce has a line, with a dot for the median of
    each cell: each pass and share of the host. Times are on a logarithmic scale.

    Args:
        results: what ``emulated.py --json`` writes.
        path: of the picture.
        titles: words for names of all-reduces and of machines; by default these names.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    words = titles or {}
    cells_by_row: Dict[str, List[Dict[str, Any]]] = {}
    for cell in results["cells"]:
        title = f"{words.get(cell['machine'], cell['machine'])}\n{cell['model']}"
        cells_by_row.setdefault(title, []).append(cell)
    figure = Figure(figsize=(9, 1.2 + 0.9 * len(cells_by_row)), dpi=120)
    axis = figure.subplots()
    for row, cells in enumerate(cells_by_row.values()):
        _dots(axis, row, cells, words)
    axis.set_yticks(range(len(cells_by_row)), list(cells_by_row), fontsize=8)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("exposed, ms: a dot for each pass and share of the host", fontsize=8)
    axis.grid(axis="x", color="#e4e7ea", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    line_by_word = dict(zip(*reversed(axis.get_legend_handles_labels())))
    figure.legend(line_by_word.values(), line_by_word, loc="upper center", ncol=4, fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.55 / figure.get_figheight()))
    FigureCanvasAgg(figure).print_figure(path)


def _dots(axis: Any, row: int, cells: List[Dict[str, Any]], words: Mapping[str, str]) -> None:
    """Draw the lines of a row, one below the other."""
    names = dict.fromkeys(name for cell in cells for name in cell["contenders"])
    shown = [name for name in COLORS if name in names] or list(names)
    for line, name in enumerate(shown):
        height = row + 0.8 * ((line + 0.5) / len(shown) - 0.5)
        medians = []
        for cell in cells:
            if name in cell["contenders"]:
                medians.append(max(LEAST_MS, cell["contenders"][name]["median_ms"]))
        label = words.get(name, name)
        look = {"color": COLORS.get(name, OTHER), "markersize": 5, "linewidth": 1}
        axis.plot(medians, [height] * len(medians), "o-", label=label, **look)
