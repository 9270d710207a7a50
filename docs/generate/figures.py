"""``make figures`` draws the pictures of README and of the site from code and measured JSON."""

import sys
from pathlib import Path
from statistics import median

import measured
import real_steps
from matplotlib import rc_context
from matplotlib.figure import Figure

from hier_allreduce import Copy, Reduce
from hier_allreduce.planning.algorithms import hierarchical
from hier_allreduce_tools.cost.cost import cost_of

TOP = Path(__file__).parents[2]
sys.path += [str(TOP / "benchmarks"), str(TOP / "tests")]
import picture  # noqa: E402, because the line above makes it known
from helpers import traces  # noqa: E402, likewise

FIGURES = TOP / "docs" / "figures"
LINKS = TOP / "benchmarks" / "machines" / "dgx-1v.links"

# Okabe and Ito (2008), "Color Universal Design": colours that colour-blind people tell apart.
BLUE, GREEN = "#0072B2", "#009E73"
INK, PALE = "#22262b", "#c3c9d0"
STYLE = {"font.size": 8, "axes.titlesize": 9, "text.color": INK}
# Pages are about so wide, so that letters keep their size there.
WIDTH = 8.4  # inches

# Where the picture has each GPU of a DGX-1: two squares, side by side.
PLACES = {
    0: (0, 1),
    1: (1, 1),
    2: (1, 0),
    3: (0, 0),
    4: (2.6, 1),
    5: (3.6, 1),
    6: (3.6, 0),
    7: (2.6, 0),
}
NVLINK = 20e9  # bytes/s: slower copies between these GPUs go through PCIe


def nvlinks(path):
    """Return the speed in bytes/s of each pair of GPUs that an NVLink joins."""
    speeds = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        src, dst, speed = line.split()[:3]
        if int(src) < int(dst) and float(speed) > NVLINK:
            speeds[int(src), int(dst)] = float(speed)
    return speeds


def draw_gpus(axes):
    """Draw the eight GPUs of a DGX-1 in their two groups."""
    for gpu, place in PLACES.items():
        axes.plot(*place, "o", color=INK, markersize=15, zorder=3)
        axes.text(*place, str(gpu), color="white", ha="center", va="center", zorder=4)
    axes.set_xlim(-0.5, 4.1)
    axes.set_ylim(-0.5, 1.5)
    axes.set_aspect("equal")
    axes.axis("off")


def curve(src, dst):
    """Return how much the line between two GPUs bends: lines between the squares pass the GPUs."""
    crosses = (src < 4) != (dst < 4)
    if not crosses:
        return 0.0
    return -0.3 if PLACES[src][1] == 1 else 0.3


def draw_links(axes):
    """Draw a line for each pair with NVLinks, which is wider if it has two."""
    for (src, dst), speed in nvlinks(LINKS).items():
        width = 3.5 if speed > 1.5 * min(nvlinks(LINKS).values()) else 1.3
        arrow(axes, src, dst, color=BLUE, linewidth=width, arrowstyle="-")
    draw_gpus(axes)
    axes.set_title("NVLinks of a DGX-1:\none (thin), two (thick)")


def arrow(axes, src, dst, arrowstyle="-|>", **look):
    """Draw an arrow from one GPU to another."""
    bend = curve(min(src, dst), max(src, dst))
    bend = bend if src < dst else -bend
    properties = {
        "arrowstyle": arrowstyle,
        "connectionstyle": f"arc3,rad={bend}",
        "shrinkA": 8,
        "shrinkB": 8,
        **look,
    }
    axes.annotate("", xy=PLACES[dst], xytext=PLACES[src], arrowprops=properties)


def draw_steps(axes, steps, numbers, color, title):
    """Draw an arrow for each copy of some steps, with the number of its round."""
    for step in steps:
        for src in step.srcs:
            arrow(axes, src, step.dst, color=color, linewidth=1.8)
            label(axes, src, step.dst, numbers[step], color)
    draw_gpus(axes)
    axes.set_title(title)


def label(axes, src, dst, number, color):
    """Write the number of a step's round on its arrow."""
    (x, y), (to_x, to_y) = PLACES[src], PLACES[dst]
    bend = curve(min(src, dst), max(src, dst))
    lift = -0.5 * bend * abs(to_x - x)
    box = {"boxstyle": "circle,pad=0.15", "facecolor": "white", "edgecolor": color}
    axes.text(
        (x + to_x) / 2,
        (y + to_y) / 2 + lift,
        str(number),
        fontsize=6,
        ha="center",
        va="center",
        bbox=box,
    )


def rounds_of(steps):
    """Return the round in which each step can run: one after the last step that it reads."""
    ready = {}
    numbers = {}
    for step in steps:
        read = [*step.srcs, step.dst] if isinstance(step, Reduce) else step.srcs
        numbers[step] = 1 + max(ready.get(gpu, 0) for gpu in read)
        ready[step.dst] = numbers[step]
    return numbers


def draw_two_groups(path):
    """Draw the NVLinks of a DGX-1, and the sums and copies of chunk 0 in its two groups."""
    steps = hierarchical(8, 0)
    numbers = rounds_of(steps)
    sums = [step for step in steps if isinstance(step, Reduce)]
    copies = [step for step in steps if isinstance(step, Copy)]
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.9), constrained_layout=True)
        links, adding, copying = figure.subplots(1, 3)
        draw_links(links)
        draw_steps(
            adding, sums, numbers, BLUE, "steps 1 and 2: add up\nin each group, then over both"
        )
        draw_steps(copying, copies, numbers, GREEN, "steps 3 and 4:\ncopy the sum back")
        figure.savefig(path, dpi=110)


def draw_real_steps(path):
    """Draw what each all-reduce added to steps on the real chip: a panel for each kind of step."""
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 2.3), constrained_layout=True)
        for axes, (place, title) in zip(figure.subplots(1, 3), real_steps.KINDS.items()):
            draw_bars(axes, real_steps.exposed_by_name(*place))
            axes.set_title(f"as {title}")
        figure.savefig(path, dpi=110)


def draw_bars(axes, runs_by_name):
    """Draw a bar for each all-reduce, the shortest on top; a line has the range of several runs."""
    names = sorted(runs_by_name, key=lambda name: median(runs_by_name[name]))
    for row, name in enumerate(names):
        runs_ms = runs_by_name[name]
        middle = median(runs_ms)
        axes.barh(row, middle, height=0.7, color=BLUE if name.startswith("ours") else PALE)
        axes.plot([min(runs_ms), max(runs_ms)], [row, row], color=INK, linewidth=1)
        axes.text(max(runs_ms), row, f" {middle:.1f}", va="center", fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("exposed, ms, on one H100", fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.margins(x=0.18)
    axes.spines[["top", "right"]].set_visible(False)


def _without(cell, left_out):
    return {name: found for name, found in cell["contenders"].items() if name != left_out}


def draw_all(folder):
    """Draw all pictures into a folder, and return their paths."""
    groups = folder / "two-groups.png"
    draw_two_groups(groups)
    real = folder / "real-steps.png"
    draw_real_steps(real)
    steps = folder / "measured-steps.png"
    cells = [cell for *_, cells in measured.places(["resnet50"]) for cell in cells]
    # Functions of these cells had no control edges; those of today have a table of their own.
    shown = [
        {**cell, "contenders": _without(cell, measured.OURS + measured.FUNCTION)} for cell in cells
    ]
    # the machines' order and the names are those of the page's table
    picture.draw({"cells": shown}, str(steps), titles={**measured.SHORT, **measured.MACHINES})
    cost = folder / "step-cost.png"
    traced = "h100-ours-0.5"
    cost_of(traces.step_stats(traced), traces.all_reduces(traced)).draw(cost)
    return [groups, real, steps, cost]


if __name__ == "__main__":
    print(*draw_all(FIGURES), sep="\n")
