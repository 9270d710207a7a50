"""Topologies, plans and timelines for people: text, and pictures drawn by matplotlib without a display."""

from __future__ import annotations

import math
import re
from collections import Counter
from itertools import groupby
from typing import Any, Dict, Iterable, List, Sequence, Tuple

from .errors import TopologyError
from .plan import Plan, Reduce
from .planner import Choice, timing
from .smi import nvlinks
from .topology import GB, Topology
from .trees import pack, ring


def amount(size: float) -> str:
    """``100 MB``, ``64 kB``: bytes, in powers of 1000."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size:.0f} B"


def duration(seconds: float) -> str:
    """``3.76 ms``, ``76 µs``."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs"


def table(rows: Iterable[Sequence[object]]) -> str:
    """A header and rows of text, two blanks between columns; columns of numbers are set to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    right = [all(re.match(r"[\d.]+( ?[kMGµm]?[Bsx])?$", cell) for cell in column[1:]) for column in zip(*cells)]
    lines = [
        "  ".join(cell.rjust(width) if r else cell.ljust(width) for cell, width, r in zip(row, widths, right))
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


# ---- text -------------------------------------------------------------------------------------------


def describe(topology: Topology) -> str:
    """What was understood of a machine: its table, its kinds of links with their speeds, what is shared, its bound."""
    count = len(topology)
    gpu = f", {topology.gpu}" if topology.gpu else ""
    parts = [f"{topology.name}: {count} device{'s' * (count != 1)}{gpu}", topology.table().rstrip()]
    kinds = Counter(topology.kinds[i][j] for i in range(count) for j in range(i))
    speeds: Dict[str, set] = {}
    for link in topology.links:
        speeds.setdefault(link.kind, set()).add(f"{link.bandwidth / GB:.4g}")
    if kinds:
        rows = [("links", "pairs", "GB/s each way")]
        rows += [(kind, str(pairs), " or ".join(sorted(speeds[kind]))) for kind, pairs in sorted(kinds.items())]
        parts.append(table(rows))
    shared = [(name, f"{speed / GB:.4g}") for name, speed in topology.shared if " of " in name]
    if shared:
        parts.append(table([("shared by", "GB/s"), *shared]))
    if count > 1:
        parts.append(
            f"At most {pack(topology).bound / GB:.4g} GB/s of gradients can be all-reduced under TensorFlow's rule "
            f"(one outgoing copy a device at a time); {pack(topology, ideal_links=True).bound / GB:.4g} GB/s if links "
            "worked side by side."
        )
    parts += [f"warning: {warning}" for warning in topology.warnings]
    return "\n\n".join(parts)


def describe_choice(choice: Choice, topology: Topology, steps: bool = False) -> str:
    """A plan for people: the time it takes, how near to the bound that is, the other algorithms, the chunks' ways."""
    recipe, size = choice.recipe, choice.size
    sizes = recipe.sizes(size)
    speed = f" ({size / choice.seconds / GB:.3g} GB/s)" if choice.seconds else ""
    parts = [
        f"{topology.name}, {amount(size)}: {recipe.algorithm}, {len(sizes)} chunk{'s' * (len(sizes) != 1)} "
        f"of {amount(min(sizes))}" + (f" to {amount(max(sizes))}" if max(sizes) > min(sizes) * 1.01 else "")
    ]
    parts.append(
        f"predicted    {duration(choice.seconds)}{speed}\nlower bound  {duration(choice.bound)}\n"
        f"             {choice.share_of_bound:.0%} of what this machine can do"
    )
    others = sorted(choice.others.items(), key=lambda item: item[1])
    if len(others) > 1 and choice.seconds:
        compared = [("algorithm", "time", "beside this plan")]
        compared += [(name, duration(seconds), f"{seconds / choice.seconds:.2f}x") for name, seconds in others]
        parts.append(table(compared))
    parts.append(ways(recipe.plan(), sizes))
    if steps:
        parts.append(str(recipe.plan()))
    parts += [f"warning: {warning}" for warning in topology.warnings]
    return "\n\n".join(part for part in parts if part)


def ways(plan: Plan, sizes: Sequence[int]) -> str:
    """The reductions of each different way, with the bytes that take it; the copies go the same way back."""
    taken: Dict[Tuple, int] = {}
    for chunk, way in _ways(plan).items():
        taken[way] = taken.get(way, 0) + sizes[chunk]
    rows = [("sums", "bytes")]
    rows += [(_line(way), amount(size)) for way, size in taken.items()]
    return table(rows) + "\nThe copies of each sum go the same way back." if any(taken) else ""


def _line(way: Sequence[Tuple[Tuple[int, ...], int]]) -> str:
    """``1,2,3→0  0→4``: neighbouring sums on the same device share a term."""
    terms = [(dst, [src for srcs, _ in hops for src in srcs]) for dst, hops in groupby(way, key=lambda hop: hop[1])]
    return "  ".join(f"{','.join(map(str, srcs))}→{dst}" for dst, srcs in terms)


def _ways(plan: Plan) -> Dict[int, Tuple[Tuple[Tuple[int, ...], int], ...]]:
    """For each chunk its reductions as (srcs, dst)."""
    found: Dict[int, List[Tuple[Tuple[int, ...], int]]] = {chunk: [] for chunk in range(plan.chunks)}
    for step in plan.steps:
        if isinstance(step, Reduce):
            found[step.chunk].append((step.srcs, step.dst))
    return {chunk: tuple(hops) for chunk, hops in found.items()}


# ---- pictures ---------------------------------------------------------------------------------------

_INK, _PALE = "#22262b", "#d9dde2"
_NEAR_COLORS = {"PIX": "#3d4752", "PXB": "#5f6c7a", "PHB": "#7d8a98", "NODE": "#98a4b0", "SYS": "#a9b3bd"}
_CYCLE = ("#1b6ca8", "#d1495b", "#2a9d5c", "#e08e0b", "#6a4c93", "#0f8b8d", "#a44a3f", "#5c677d")


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise TopologyError("pictures need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: str) -> None:
    try:
        figure.savefig(path, dpi=130, facecolor="white")
    except (OSError, ValueError) as cause:
        raise TopologyError(f"the picture cannot be written to {path!r}: {cause}") from None
    finally:
        _pyplot().close(figure)


def draw_topology(topology: Topology, path: str) -> None:
    """A drawing of devices and links in a file (PNG, PDF, SVG by its ending).

    Raises:
        TopologyError: matplotlib is missing, or the file cannot be written.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7.2, 6.4))
    _machine(axes, topology)
    axes.set_title(f"{topology.name}\n{_bound_line(topology)}", fontsize=11, color=_INK)
    _kinds_legend(axes, topology)
    _save(figure, path)


def _bound_line(topology: Topology) -> str:
    if len(topology) == 1:
        return "one device: nothing to reduce"
    return f"at most {pack(topology).bound / GB:.3g} GB/s of gradients all-reduced under TensorFlow's rule"


def draw_plan(choice: Choice, topology: Topology, path: str) -> None:
    """A plan's trees on the machine's links, the bytes on each link, and the timeline, in a file.

    Raises:
        TopologyError: matplotlib is missing, or the file cannot be written.
    """
    pyplot = _pyplot()
    run = timing(choice, topology)
    found = Counter(_ways(choice.recipe.plan()).values())
    shown = list(found)[:8]
    figure = pyplot.figure(figsize=(13, 10))
    columns = max(4, math.ceil(len(shown) / 2) + 2)
    grid = figure.add_gridspec(3, columns, height_ratios=(1, 1, 1.7), hspace=0.28, wspace=0.12)
    axes = figure.add_subplot(grid[:2, :2])
    _machine(axes, topology, run.link_bytes)
    axes.set_title("bytes on each link (width)", fontsize=9, color=_INK)
    for number, way in enumerate(shown):
        _way(figure.add_subplot(grid[number // (columns - 2), 2 + number % (columns - 2)]), topology, way, number)
    _timeline(figure.add_subplot(grid[2, :]), topology, run, choice)
    more = f" (8 of {len(found)} ways shown)" if len(found) > 8 else ""
    figure.suptitle(
        f"{topology.name}, {amount(choice.size)}: {choice.recipe.algorithm}, {duration(choice.seconds)} predicted, "
        f"{choice.share_of_bound:.0%} of what this machine can do{more}",
        fontsize=13,
        color=_INK,
        y=0.955,
    )
    _save(figure, path)


def _places(topology: Topology) -> List[Tuple[float, float]]:
    """Devices on a circle in the order of the ring, so that near ones stand side by side."""
    order = {device: place for place, device in enumerate(ring(topology))} if len(topology) > 1 else {0: 0}
    angles = [math.pi / 2 - 2 * math.pi * order[d] / len(topology) for d in range(len(topology))]
    return [(math.cos(angle), math.sin(angle)) for angle in angles]


def _machine(axes: Any, topology: Topology, link_bytes: Any = None) -> None:
    places = _places(topology)
    most = max(link_bytes.values(), default=0) if link_bytes else 0
    thickest = min(6.0, 60 / max(1, len(link_bytes or ())))
    pairs = [(i, j) for i in range(len(topology)) for j in range(i)]
    for i, j in sorted(pairs, key=lambda pair: nvlinks(topology.kinds[pair[0]][pair[1]])):
        kind = topology.kinds[i][j]
        color, width = _kind_style(kind)
        if link_bytes is not None:
            carried = max(link_bytes.get((i, j), 0), link_bytes.get((j, i), 0))
            color, width = (_INK, 0.3 + thickest * carried / most) if carried else (_PALE, 0.6)
        (x0, y0), (x1, y1) = places[i], places[j]
        dashes = ":" if kind == "SYS" and link_bytes is None else "-"
        axes.plot((x0, x1), (y0, y1), dashes, color=color, linewidth=width, zorder=1, solid_capstyle="round")
        if nvlinks(kind) and link_bytes is None and len(pairs) <= 28 and len(set(topology.kinds[0])) > 2:
            axes.text(
                x0 + 0.34 * (x1 - x0),
                y0 + 0.34 * (y1 - y0),
                kind,
                fontsize=7,
                color=color,
                ha="center",
                va="center",
                bbox={"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none"},
            )
    _devices(axes, topology, places, size=620 if len(topology) <= 8 else 330)


def _devices(axes: Any, topology: Topology, places: Any, size: float, root: int = -1, color: str = _INK) -> None:
    for device, (x, y) in enumerate(places):
        face = color if device == root else "white"
        axes.scatter([x], [y], s=size, facecolor=face, edgecolor=color, linewidth=1.4, zorder=3)
        text = "white" if device == root else _INK
        axes.text(x, y, str(device), ha="center", va="center", fontsize=9 if size > 200 else 7, color=text, zorder=4)
    axes.set_xlim(-1.22, 1.22)
    axes.set_ylim(-1.22, 1.22)
    axes.set_aspect("equal")
    axes.axis("off")


def _kind_style(kind: str) -> Tuple[str, float]:
    if nvlinks(kind):
        return _CYCLE[min(nvlinks(kind), 8) - 1], 1.2 + 1.1 * min(nvlinks(kind), 4)
    return _NEAR_COLORS.get(kind, _PALE), 1.0


def _kinds_legend(axes: Any, topology: Topology) -> None:
    speeds = {link.kind: link.bandwidth for link in topology.links}
    for kind in sorted(speeds, key=lambda kind: -speeds[kind]):
        color, width = _kind_style(kind)
        axes.plot(
            [],
            [],
            ":" if kind == "SYS" else "-",
            color=color,
            linewidth=width,
            label=f"{kind}  {speeds[kind] / GB:.4g} GB/s each way",
        )
    if speeds:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, -0.08), ncol=3, frameon=False, fontsize=8)


def _way(axes: Any, topology: Topology, way: Any, number: int) -> None:
    """One chunk's reductions as arrows towards its root."""
    places = _places(topology)
    color = _CYCLE[number % len(_CYCLE)]
    head = "-|>" if len(topology) <= 8 else "->,head_length=0.15,head_width=0.1"
    for srcs, dst in way:
        for src in srcs:
            axes.annotate(
                "",
                xy=places[dst],
                xytext=places[src],
                arrowprops={"arrowstyle": head, "color": color, "shrinkA": 7, "shrinkB": 8, "linewidth": 1.2},
            )
    root = way[-1][1] if way else 0
    _devices(axes, topology, places, size=120 if len(topology) <= 8 else 70, root=root, color=color)
    if len(topology) > 1:
        axes.set_title(f"way {number + 1}: sums on {root}", fontsize=8, color=_INK, pad=1)


def _timeline(axes: Any, topology: Topology, run: Any, choice: Choice) -> None:
    """A lane for each device: outgoing copies above, reductions below, coloured by the chunk's way."""
    plan = choice.recipe.plan()
    ways_of = _ways(plan)
    color = {way: _CYCLE[number % len(_CYCLE)] for number, way in enumerate(dict.fromkeys(ways_of.values()))}
    unit, name = (1e3, "ms") if choice.seconds >= 1e-3 else (1e6, "µs")
    edge = 0.3 if len(run.spans) < 1500 else 0.0
    for step, device, dst, start, end in run.spans:
        copy = dst != device
        axes.barh(
            device + (-0.17 if copy else 0.29),
            (end - start) * unit,
            left=start * unit,
            height=0.52 if copy else 0.2,
            color=color[ways_of[plan.steps[step].chunk]],
            alpha=0.9 if copy else 0.45,
            edgecolor="white",
            linewidth=edge,
        )
        if copy and (end - start) > choice.seconds / 60:
            axes.text(
                (start + end) / 2 * unit, device - 0.17, str(dst), ha="center", va="center", fontsize=6, color="white"
            )
    axes.axvline(choice.bound * unit, color=_INK, linestyle=":", linewidth=1.2)
    axes.text(choice.bound * unit, -0.75, "lower bound ", ha="right", fontsize=8, color=_INK)
    axes.set_yticks(range(len(topology)))
    axes.set_yticklabels(topology.devices, fontsize=8)
    axes.set_ylim(len(topology) - 0.4, -0.6)
    axes.set_xlim(0, choice.seconds * unit * 1.01)
    axes.set_xlabel(f"{name}; upper bars: outgoing copies (number: receiver), lower bars: sums", fontsize=9, color=_INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
