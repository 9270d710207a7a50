"""A plan as a picture: the bytes on each link, the ways of the sums, and the timeline. Needs matplotlib."""

from __future__ import annotations

import math
from typing import Any, Dict, Sequence

from ..figures import COLORS, INK, ink_on, pyplot, save_picture
from ..formatting import amount, count, duration
from ..planning import Plan, Prediction, Timing
from ..topology import Topology
from .describe_plan import Way, algorithms_of, reached, sums_by_chunk
from .machine_picture import device_positions, draw_devices, draw_link_bytes, spaced

_OTHER_WAYS = "#bcc4cd"  # the colour of the ways that have no drawing


def draw_plan(prediction: Prediction, path: str) -> None:
    """Draw a plan into a file: its ways on the machine's links, the bytes on each link, and the timeline.

    With a backward pass the timeline shows its end, and what is exposed after it.

    Raises:
        HierAllreduceError: matplotlib is missing, or the file cannot be written.
    """
    topology, run = prediction.topology, prediction.timing()
    colors = way_colors(prediction.plan)
    shown = [way for way, color in colors.items() if way and color != _OTHER_WAYS]
    rows = 2 if len(shown) > 2 else 1
    columns = max(1, math.ceil(len(shown) / rows))
    lower = 1.2 + 0.36 * len(topology)  # inches
    figure = pyplot().figure(figsize=(11, 4.9 + lower), constrained_layout=True)
    grid = figure.add_gridspec(2, 1, height_ratios=(4.9, lower))
    upper = grid[0].subgridspec(rows, columns + rows, width_ratios=(1.25,) * rows + (1,) * columns)
    axes = figure.add_subplot(upper[:, :rows])
    draw_link_bytes(axes, topology, run.link_bytes)
    axes.set_title("bytes on each link (width)" if len(topology) > 1 else "", fontsize=9, color=INK)
    for number, way in enumerate(shown):
        axes = figure.add_subplot(upper[number // columns, rows + number % columns])
        axes.set_title(f"way {number + 1}: sums on {way[-1][1]}", fontsize=8, color=INK, pad=1)
        _draw_way(axes, topology, way, colors[way])
    draw_timeline(figure.add_subplot(grid[1]), run, prediction)
    omitted = f" ({len(shown)} of {len(colors)} ways shown)" if _OTHER_WAYS in colors.values() else ""
    figure.suptitle(_title(prediction) + omitted, fontsize=12, color=INK)
    save_picture(figure, path)


def _title(prediction: Prediction) -> str:
    plan = prediction.plan
    lanes = f" over {count(plan.lanes, 'lane')}" if plan.lanes else ""
    what = "exposed" if prediction.backward.seconds else f"predicted, {reached(prediction, prediction.seconds)}"
    return (
        f"{prediction.topology.name}, {amount(prediction.size)}: {algorithms_of(prediction)}{lanes},"
        f" {duration(prediction.seconds)} {what}"
    )


def way_colors(plan: Plan) -> Dict[Way, str]:
    """Return a colour for each way. Eight have their own, first those of the last buckets; all others share one."""
    sums = sums_by_chunk(plan)
    last_first = sorted(sums, key=lambda chunk: -plan.buckets[chunk] if plan.buckets else 0)
    ways = dict.fromkeys(sums[chunk] for chunk in last_first)
    colors = [INK] * len(COLORS) if plan.lanes else COLORS  # with lanes, colours are theirs
    return {way: colors[number] if number < len(colors) else _OTHER_WAYS for number, way in enumerate(ways)}


def _draw_way(axes: Any, topology: Topology, way: Way, color: str) -> None:
    """Draw one chunk's reductions as arrows towards its root."""
    positions = device_positions(topology)
    few = len(topology) <= 8
    arrow = {
        "arrowstyle": "-|>",
        "color": color,
        "shrinkA": 6 if few else 4,
        "shrinkB": 7 if few else 4.5,
        "linewidth": 1.6,
        "mutation_scale": 10 if few else 7,
    }
    for srcs, dst in way:
        for src in srcs:
            axes.annotate("", xy=positions[dst], xytext=positions[src], arrowprops=arrow)
    draw_devices(axes, positions, size=130 if few else 45, root=way[-1][1], color=color)


# ---- the timeline ------------------------------------------------------------------------------------


def draw_timeline(axes: Any, run: Timing, prediction: Prediction) -> None:
    """Draw a row for each device: outgoing copies above, sums below, in the colour of the chunk's way."""
    if not prediction.seconds:
        axes.text(0.5, 0.5, "nothing to reduce", ha="center", fontsize=11, color=INK)
        axes.axis("off")
        return
    plan, shown = prediction.plan, run.seconds - _begin(prediction)
    unit, unit_name = (1e3, "ms") if shown >= 1e-3 else (1e6, "µs")
    colors = way_colors(plan)
    key = [f"{unit_name}; upper bars: outgoing copies (number: receiver), lower bars: sums"]
    if plan.lanes:
        _draw_lane_bars(axes, run, plan, unit)
        key = [f"{unit_name}; outgoing copies of each GPU, in the colour of its lane; the top strip: of its tower"]
    else:
        _draw_bars(axes, run, plan, colors, unit, shown / 60)
        if _OTHER_WAYS in colors.values():
            key.append("pale grey: the ways not shown")
    _draw_mark(axes, prediction, unit)
    _label_rows(axes, [spaced(label) for label in prediction.topology.devices])
    axes.set_xlim(_begin(prediction) * unit, (run.seconds + 0.01 * shown) * unit)
    axes.set_xlabel("; ".join(key), fontsize=9, color=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _begin(prediction: Prediction) -> float:
    """Return when the timeline begins: shortly before the end of the backward pass."""
    return max(0.0, prediction.backward.seconds - 2 * prediction.seconds)


def _draw_bars(
    axes: Any, run: Timing, plan: Plan, colors: Dict[Way, str], unit: float, least_with_number: float
) -> None:
    """Draw a bar for each copy, with its receiver's number where there is room, and for each sum."""
    chunk_colors = {chunk: colors[way] for chunk, way in sums_by_chunk(plan).items()}
    edge = 0.3 if len(run.spans) < 1500 else 0.0
    for step, device, dst, start, end in run.spans:
        is_copy, color = dst != device, chunk_colors[plan.steps[step].chunk]
        axes.barh(
            device + (-0.17 if is_copy else 0.29),
            (end - start) * unit,
            left=start * unit,
            height=0.52 if is_copy else 0.2,
            color=color,
            alpha=0.9 if is_copy else 0.45,
            edgecolor="white",
            linewidth=edge,
        )
        if is_copy and end - start > least_with_number:
            middle = (start + end) / 2 * unit
            axes.text(
                middle, device - 0.17, str(dst), ha="center", va="center", fontsize=6, color=ink_on(color), clip_on=True
            )


def _draw_lane_bars(axes: Any, run: Timing, plan: Plan, unit: float) -> None:
    """Draw a strip for the tower and for each lane of a GPU, with a bar for each copy that leaves from there."""
    strips = 1 + plan.lanes
    height = 0.86 / strips
    for _, device, dst, start, end in run.spans:
        if dst == device:
            continue
        tower = plan.tower(device)
        strip = 0 if device == tower else 1 + (device - plan.towers) % plan.lanes
        place = tower - 0.43 + (strip + 0.5) * height
        color = COLORS[(strip - 1) % len(COLORS)] if strip else INK
        axes.barh(place, (end - start) * unit, left=start * unit, height=height, color=color, linewidth=0)


def _draw_mark(axes: Any, prediction: Prediction, unit: float) -> None:
    """Draw a line at the end of the backward pass, or on an idle machine at the bound, labelled above the rows."""
    end = prediction.backward.seconds
    mark, text = (end, " end of the backward pass ") if end else (prediction.bound, " lower bound ")
    axes.axvline(mark * unit, color=INK, linestyle=":", linewidth=1.2)
    side = "right" if end or mark > prediction.seconds / 2 else "left"
    above_rows = axes.get_xaxis_transform()  # y = 1 is the top, however many rows there are
    axes.text(mark * unit, 1.01, text, ha=side, fontsize=8, color=INK, transform=above_rows)


def _label_rows(axes: Any, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)))
    axes.set_yticklabels(labels, fontsize=8)
    axes.set_ylim(len(labels) - 0.4, -0.6)
