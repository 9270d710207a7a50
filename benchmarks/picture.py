"""A picture of what ``emulated.py`` or ``real.py`` measured, from its JSON."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

COLORS = {
    "ours": "tab:orange",
    "ours in a tf.function": "gold",
    "tensorpack packed": "tab:blue",
    "tensorpack": "tab:purple",
    "tensorpack gpu": "tab:cyan",
    "HierarchicalCopyAllReduce in 8 packs": "tab:green",
    "ReductionToOneDevice": "tab:gray",
}

Row = Tuple[str, str, float]


def draw(results: Dict[str, Any], path: str, model: Optional[str] = None) -> None:
    """Draw the exposed times of ours and of known peers into a .png, .svg or .pdf file.

    A row is a machine, a model and a pass, a column a share of the host. Bars are medians, lines
    the rounds' range.

    Args:
        results: what ``emulated.py --json`` writes.
        path: of the picture.
        model: the only one to draw; None: all of them.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = [cell for cell in results["cells"] if model in (None, cell["model"])]
    rows = list(dict.fromkeys(map(_row_of, cells)))
    hosts = sorted({cell["host"] for cell in cells})
    size = (4.5 * len(hosts), 0.4 + 1.2 * len(rows))
    figure = Figure(figsize=size, dpi=120)
    axes = figure.subplots(len(rows), len(hosts), squeeze=False)
    for cell in cells:
        _bars(axes[rows.index(_row_of(cell))][hosts.index(cell["host"])], cell)
    for axis, host in zip(axes[0], hosts):
        title = f"{axis.get_title(loc='left')}\nhost busy {host:g} of the step"
        axis.set_title(title, loc="left", fontsize=9)
    figure.tight_layout()
    FigureCanvasAgg(figure).print_figure(path)


def _row_of(cell: Dict[str, Any]) -> Row:
    return cell["machine"], cell["model"], cell["pass_ms"]


def _bars(axis: Any, cell: Dict[str, Any]) -> None:
    shown = [name for name in COLORS if name in cell["contenders"]] or list(cell["contenders"])
    for place, name in enumerate(reversed(shown)):
        contender = cell["contenders"][name]
        median = contender["median_ms"]
        axis.barh(place, median, color=COLORS.get(name, "tab:purple"), height=0.7)
        least, most = min(contender["exposed_ms"]), max(contender["exposed_ms"])
        axis.hlines(place, least, most, color="k")
        axis.text(max(median, most), place, f"  {median:.1f}", va="center", fontsize=8)
    axis.set_yticks(range(len(shown)), list(reversed(shown)), fontsize=8)
    where = f"{cell['machine']}, {cell['model']}, pass {cell['pass_ms']:g}"
    axis.set_title(f"{where}: exposed, ms", loc="left", fontsize=9)
    axis.margins(x=0.15)
    axis.tick_params(axis="x", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
