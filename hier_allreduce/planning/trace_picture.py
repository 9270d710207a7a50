"""Runs as a picture: for each device a lane for copies out and one for sums, executed above predicted."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

from ..figures import pyplot, save_picture
from ..formatting import duration
from .bars import COPY, EXECUTED, NETWORK, SUM, Run

_INK = "#000000"
_COLORS = {COPY: "#0072B2", SUM: "#E69F00", NETWORK: "#009E73"}  # Okabe and Ito's, for all kinds of colour vision
_LAST_GRADIENT, _BOUND = "#D55E00", "#CC79A7"
_WORDS = {COPY: "copy out (by sender)", SUM: "sum", NETWORK: "between hosts"}


def draw_runs(runs: Sequence[Run], path: str) -> None:
    """Draw the runs below each other on one axis of time; each begins at 0.

    Raises:
        HierAllreduceError: matplotlib is missing, or the file cannot be written.
    """
    lanes = [len(run.devices) for run in runs]
    figure, rows = pyplot().subplots(
        len(runs),
        1,
        sharex=True,
        squeeze=False,
        figsize=(12, 1.5 + 0.42 * sum(lanes)),
        gridspec_kw={"height_ratios": [max(1, count) for count in lanes]},
        constrained_layout=True,
    )
    longest = max((run.seconds for run in runs), default=0.0)
    unit, unit_name = (1e3, "ms") if longest >= 1e-3 else (1e6, "µs")
    for axes, run in zip(rows[:, 0], runs):
        _draw_run(axes, run, unit)
    rows[-1, 0].set_xlabel(f"{unit_name} since the first gradient was ready", color=_INK)
    rows[0, 0].legend(handles=_legend(runs), loc="lower right", bbox_to_anchor=(1, 1), ncol=5, fontsize=8)
    save_picture(figure, path)


def _draw_run(axes: Any, run: Run, unit: float) -> None:
    bars: Dict[Tuple[str, bool], List[Tuple[float, float, float]]] = {}
    for bar in run.bars:
        lane = bar.src + (-0.4 if bar.kind == COPY else 0.08)
        bars.setdefault((bar.kind, bar.exact), []).append((lane, bar.start - run.begin, bar.end - bar.start))
    for (kind, exact), placed in bars.items():
        axes.barh(
            [lane for lane, _, _ in placed],
            [seconds * unit for _, _, seconds in placed],
            left=[start * unit for _, start, _ in placed],
            height=0.42 if kind == COPY else 0.3,
            align="edge",
            color=_COLORS[kind],
            alpha=0.85 if exact else 0.25,
            edgecolor="white",
            linewidth=0.2 if len(run.bars) < 1500 else 0.0,
        )
    if run.kind == EXECUTED and run.last_gradient:
        axes.axvline((run.last_gradient - run.begin) * unit, color=_LAST_GRADIENT, linestyle="--", linewidth=1.2)
    if run.bound is not None:
        axes.axvline(run.bound * unit, color=_BOUND, linestyle=":", linewidth=1.6)
    axes.set_yticks(range(len(run.devices)))
    axes.set_yticklabels(run.devices, fontsize=8)
    axes.set_ylim(len(run.devices) - 0.4, -0.6)
    axes.set_title(f"{run.kind}: {duration(run.seconds)}", loc="left", fontsize=10, color=_INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend(runs: Sequence[Run]) -> List[Any]:
    pyplot()
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {bar.kind for run in runs for bar in run.bars}
    handles: List[Any] = [Patch(color=color, label=_WORDS[kind]) for kind, color in _COLORS.items() if kind in kinds]
    if any(not bar.exact for run in runs for bar in run.bars):
        handles.append(Patch(color=_COLORS[COPY], alpha=0.25, label="copy, latest possible end"))
    if any(run.kind == EXECUTED and run.last_gradient for run in runs):
        handles.append(Line2D([], [], color=_LAST_GRADIENT, linestyle="--", label="last gradient ready"))
    if any(run.bound is not None for run in runs):
        handles.append(Line2D([], [], color=_BOUND, linestyle=":", label="lower bound of the links"))
    return handles
