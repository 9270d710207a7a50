"""A prediction as a picture: the machine and its limits, a schedule on it, and predicted steps. Needs matplotlib.

::

    ┌─ bus between sockets ─┐     PCIe above the GPUs, with the speed that copies share
    GPU0  GPU1    GPU2  GPU3      GPUs
      ╰────╯        ╰────╯        NVLinks below them
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Tuple

from .._lazy import advice
from ..errors import HierAllreduceError
from ..formatting import count, duration, rate
from ..planning.plan import Copy, root_of
from ..topology import PCIE, Topology, links_of, nvlinks
from .prediction import OURS, Prediction
from .report import link_rows

Point = Tuple[float, float]

# Okabe and Ito (2008), "Color Universal Design": people with any kind of colour blindness tell these apart
BLUE, VERMILLION, GREEN = "#0072B2", "#D55E00", "#009E73"
INK, PALE = "#22262b", "#d9dde2"  # text and outlines; the background
_STYLE: Dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "text.color": INK,
    "legend.frameon": False,
}


def draw(prediction: Prediction, path: Path) -> None:
    """Draw a prediction into a file: PNG, PDF or SVG by its ending."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise HierAllreduceError(advice("a picture", "matplotlib", "picture")) from None

    machine = prediction.machine
    has_both = (
        len({bool(nvlinks(kind)) for row in machine.kinds for kind in row if kind != "X"}) > 1
    )
    upper, lower = 2.2 + 0.8 * has_both + 0.2 * len(link_rows(machine)), 3.6  # inches
    with rc_context(_STYLE):
        figure = Figure(figsize=(8.3, upper + lower), constrained_layout=True)
        grid = figure.add_gridspec(2, 2, height_ratios=(upper, lower), width_ratios=(1, 1.1))
        draw_machine(figure.add_subplot(grid[0, :]), machine)
        draw_schedule(figure.add_subplot(grid[1, 0]), prediction)
        draw_steps(figure.add_subplot(grid[1, 1]), prediction)
        try:
            figure.savefig(
                path, format=path.suffix[1:], dpi=110, bbox_inches="tight", pad_inches=0.12
            )
        except (OSError, ValueError) as cause:
            raise HierAllreduceError(f"{str(path)!r} cannot be written: {cause}") from None


# ---- the machine -------------------------------------------------------------------------------------


def draw_machine(axes: Any, machine: Topology) -> None:
    """Draw GPUs in a row, PCIe and its shared speeds above them, and NVLinks below."""
    links = links_of(machine)
    shared = {name.split(" in")[0].split(" out")[0]: speed for name, speed in links.resources}
    kinds = {kind for row in machine.kinds for kind in row}
    at: Dict[str, Point] = {label: (float(x), 0.0) for x, label in enumerate(machine.devices)}
    if kinds & {*PCIE}:
        _draw_pcie(axes, at, shared, max(kinds & {*PCIE}, key=PCIE.index))
    _draw_nvlinks(axes, machine, shared)
    for label in machine.devices:
        _label(axes, at[label], label if len(machine) <= 8 else label[3:], BLUE, filled=True)
    for kind, pairs, speed, limit in link_rows(machine):
        style = "--" if "no peer" in limit else "-"
        color = BLUE if kind.startswith("NV") else VERMILLION if "no peer" in limit else INK
        label = "; ".join(filter(None, (f"{kind}: {pairs}, {speed}", limit)))
        axes.plot([], [], style, color=color, linewidth=_width(kind), label=label)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0.02))
    axes.set_title(f"{machine.name}: GPUs and links, with speeds in each direction")
    axes.margins(x=0.06, y=0.08)
    axes.axis("off")


def _draw_pcie(axes: Any, at: Dict[str, Point], shared: Dict[str, float], far: str) -> None:
    """Draw a tree of uplinks with their speeds; it is dashed where copies go through the host's memory."""
    groups = sorted((name for name in shared if "+" in name), key=lambda name: name.count("+"))
    sizes = sorted({name.count("+") for name in groups})
    color, style = (VERMILLION, "--") if "host" in shared else (INK, "-")
    top = ((len(at) - 1) / 2, 1.0 + len(sizes))
    for name in groups:
        members = [at[label][0] for label in name.split("+")]
        at[name] = (sum(members) / len(members), 1.0 + sizes.index(name.count("+")))
    for child, (x, y) in at.items():
        above = next(
            (group for group in groups if set(child.split("+")) < set(group.split("+"))), ""
        )
        end = at.get(above, top)
        axes.plot((x, end[0]), (y, end[1]), style, color=color, linewidth=1.2, zorder=1)
    for name in groups:
        _label(axes, at[name], f"uplink, {rate(shared[name])}", color)
    if "host" in shared:
        _label(axes, top, f"no peer access: host's memory, {rate(shared['host'])} in all", color)
    else:
        _label(axes, top, "bus between sockets" if far == "SYS" else "PCIe", color)


def _draw_nvlinks(axes: Any, machine: Topology, shared: Dict[str, float]) -> None:
    """Draw an arc for each pair with NVLinks, the wider the more of them; or the switch in which they end."""
    towers, middle = range(len(machine)), (len(machine) - 1) / 2
    switch = next((speed for name, speed in shared.items() if name.endswith("NVSwitch")), 0.0)
    if switch:
        for tower in towers:
            axes.plot((tower, middle), (0, -1), color=BLUE, linewidth=1.6, zorder=1)
        _label(axes, (middle, -1.0), f"NVSwitch, {rate(switch)} for each GPU", BLUE)
        return
    for i, j in ((i, j) for i in towers for j in towers if i < j and nvlinks(machine.kinds[i][j])):
        steps = [step / 20 for step in range(21)]
        depth = 4 * (0.3 + 0.2 * (j - i))
        xs, ys = (
            [i + (j - i) * step for step in steps],
            [-depth * step * (1 - step) for step in steps],
        )
        axes.plot(xs, ys, color=BLUE, linewidth=_width(machine.kinds[i][j]), alpha=0.75, zorder=1)


def _width(kind: str) -> float:
    """Return the width of a line for a kind of link, or for several."""
    return 0.4 + 1.2 * min(3, nvlinks(kind.split()[0]) or 0.7)


def _label(axes: Any, point: Point, text: str, color: str, filled: bool = False) -> None:
    box = {
        "boxstyle": "round,pad=0.3",
        "facecolor": color if filled else "white",
        "edgecolor": color,
    }
    axes.text(
        *point,
        text,
        ha="center",
        va="center",
        color="white" if filled else color,
        bbox=box,
        zorder=3,
    )


# ---- a schedule, and steps ---------------------------------------------------------------------------


def draw_schedule(axes: Any, prediction: Prediction) -> None:
    """Draw time downwards: an arrow for each copy of one chunk, solid into sums, dashed with the complete sum."""
    schedule, towers = prediction.plan.schedules[0], len(prediction.machine)
    after = [0] * towers
    root = (root_of(schedule), 0)
    for step in schedule:
        copied = isinstance(step, Copy)
        level = 1 + max(after[tower] for tower in (step.srcs if copied else (*step.srcs, step.dst)))
        for src in step.srcs:
            style = {
                "arrowstyle": "-|>",
                "color": GREEN if copied else BLUE,
                "linestyle": "--" if copied else "-",
            }
            axes.annotate(
                "",
                xy=(step.dst, level),
                xytext=(src, level - 1),
                arrowprops={**style, "linewidth": 1.3},
            )
        after[step.dst] = level
        root = root if copied else (step.dst, level)
    deepest = max(after, default=0)
    for tower, label in enumerate(prediction.machine.devices):
        axes.plot((tower, tower), (0, deepest), color=PALE, linewidth=1, zorder=0)
        axes.text(
            tower, -0.12, label if towers <= 8 else label[3:], ha="center", va="bottom", fontsize=8
        )
    axes.plot(*root, "o", color=INK, markersize=8, zorder=4)
    words = "time goes down; blue: gradients are added, until the\ndot has the sum of all; green: that sum is copied"
    axes.text((towers - 1) / 2, deepest + 0.12, words, ha="center", va="top")
    axes.set_ylim(deepest + 0.75, -0.45)
    axes.set_title(
        f"one of {count(len(prediction.chunks), 'chunk')} of gradients: {prediction.plan.algorithm}"
    )
    axes.axis("off")


def draw_steps(axes: Any, prediction: Prediction) -> None:
    """Draw a bar for each row: the step on one GPU in grey, then the exposed seconds with their range."""
    step, ours = prediction.training.step, prediction.rows[0]
    rows = [
        row for row in prediction.rows if row is ours or row[1:] != ours[1:]
    ]  # the rule may give the same plan
    for number, row in enumerate(rows):
        color = BLUE if row.name.startswith(OURS) else VERMILLION
        axes.barh(
            (number, number), (step, row.exposed), left=(0, step), height=0.5, color=(PALE, color)
        )
        axes.plot((step + row.low, step + row.high), (number, number), color=INK, linewidth=1.6)
        axes.text(
            0,
            number - 0.3,
            row.name.partition(", if")[0].replace(OURS, "hier_allreduce"),
            va="bottom",
        )
        numbers = f" {duration(step + row.exposed)}, +{duration(row.exposed)}"
        axes.text(step + row.high, number, numbers, va="center")
    axes.set_yticks([])
    axes.set_ylim(len(rows) - 0.6, -0.8)
    axes.set_xlim(0, 1.4 * (step + max(row.high for row in rows)))
    ticks = axes.get_xticks()[:-1]
    axes.set_xticks(ticks, labels=[duration(tick, digits=4) if tick else "0" for tick in ticks])
    axes.set_title(f"predicted step of {prediction.training.model}")
    words = "grey: step on one GPU; colour and +: time that\nthe all-reduce adds; line: the range of its end"
    axes.set_xlabel(words)
    axes.spines[["top", "right", "left"]].set_visible(False)
