"""Topologies, plans and timelines as pictures, drawn by matplotlib without a display."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Sequence, Tuple

from ..figures import pyplot, save_picture
from ..formatting import amount, count, duration
from ..planning import Choice, HostsChoice, nic_of, nics_used, pack, ring, timeline
from ..topology import GB, Network, Topology, nvlinks
from .describe import hosts_line, link_speeds, reached, sums_by_chunk, switch_ports

_INK, _PALE = "#22262b", "#d9dde2"
_NEAR_COLORS = {"PIX": "#3d4752", "PXB": "#5f6c7a", "PHB": "#7d8a98", "NODE": "#98a4b0", "SYS": "#a9b3bd"}
_CYCLE = ("#1b6ca8", "#d1495b", "#2a9d5c", "#e08e0b", "#6a4c93", "#0f8b8d", "#a44a3f", "#5c677d")
_OTHERS = "#bcc4cd"  # of the ways that have no drawing


def draw_topology(topology: Topology, path: str) -> None:
    """A drawing of devices and links in a file (PNG, PDF, SVG by its ending).

    Raises:
        HierAllreduceError: matplotlib is missing, or the file cannot be written.
    """
    figure, axes = pyplot().subplots(figsize=(7.2, 6.4))
    _links(axes, topology)
    save_picture(figure, path)


def draw_hosts(topology: Topology, hosts: int, network: Network, path: str) -> None:
    """The same, and below it the hosts with their devices, network cards and the network.

    Raises:
        HierAllreduceError: matplotlib is missing, or the file cannot be written.
    """
    figure, (above, below) = pyplot().subplots(2, 1, figsize=(9.5, 10.5), gridspec_kw={"height_ratios": (1.75, 1)})
    _links(above, topology)
    _hosts(below, topology, hosts, network)
    save_picture(figure, path)


def _links(axes: Any, topology: Topology) -> None:
    _machine(axes, topology)
    axes.set_title(f"{topology.name}\n{_bound_line(topology)}", fontsize=11, color=_INK)
    _kinds_legend(axes, topology)


def _bound_line(topology: Topology) -> str:
    if len(topology) == 1:
        return "one device: nothing to reduce"
    return f"at most {pack(topology).bound / GB:.3g} GB/s of gradients all-reduced under TensorFlow's rule"


def draw_plan(choice: Choice, topology: Topology, path: str) -> None:
    """A plan's trees on the machine's links, the bytes on each link, and the timeline, in a file.

    Raises:
        HierAllreduceError: matplotlib is missing, or the file cannot be written.
    """
    figure = pyplot().figure(figsize=(13, 10))
    grid = figure.add_gridspec(2, 1, height_ratios=(2, 1.7), hspace=0.2)
    _plan(figure, grid, choice, topology, timeline(choice, topology), 0.955)
    save_picture(figure, path)


def draw_hosts_plan(choice: HostsChoice, topology: Topology, scaled: Sequence[HostsChoice], path: str) -> None:
    """The same for several hosts, with a lane for each network card, the hosts, and what more of them cost.

    Raises:
        HierAllreduceError: matplotlib is missing, or the file cannot be written.
    """
    figure = pyplot().figure(figsize=(13, 15))
    grid = figure.add_gridspec(3, 1, height_ratios=(2, 1.9, 1.5), hspace=0.22)
    _plan(figure, grid, choice, topology, choice.run, 0.925)
    last = grid[2].subgridspec(1, 2, width_ratios=(1.25, 1), wspace=0.12)
    _hosts(figure.add_subplot(last[0]), topology, choice.hosts, choice.network)
    _scaling_curves(figure.add_subplot(last[1]), scaled)
    save_picture(figure, path)


def _plan(figure: Any, grid: Any, choice: Choice, topology: Topology, run: Any, top: float) -> None:
    """The first two rows of a plan's picture, and its title."""
    colors = _colors(choice)
    shown = [way for way, color in colors.items() if way and color != _OTHERS]
    columns = max(4, math.ceil(len(shown) / 2) + 2)
    upper = grid[0].subgridspec(2, columns, hspace=0.28, wspace=0.12)
    axes = figure.add_subplot(upper[:, :2])
    _machine(axes, topology, run.link_bytes)
    axes.set_title("bytes on each link (width)" if len(topology) > 1 else "", fontsize=9, color=_INK)
    for number, way in enumerate(shown):
        axes = figure.add_subplot(upper[number // (columns - 2), 2 + number % (columns - 2)])
        axes.set_title(f"way {number + 1}: sums on {way[-1][1]}", fontsize=8, color=_INK, pad=1)
        _way(axes, topology, way, colors[way])
    _timeline(figure.add_subplot(grid[1]), topology, run, choice)
    more = f" ({len(shown)} of {len(colors)} ways shown)" if _OTHERS in colors.values() else ""
    figure.suptitle(
        f"{topology.name}, {amount(choice.size)}: {choice.recipe.algorithm}, {duration(choice.seconds)} predicted, "
        f"{reached(choice)}{more}",
        fontsize=13,
        color=_INK,
        y=top,
    )


def _colors(choice: Choice) -> Dict[Any, str]:
    """A color for each way: its own for as many as there are colors, and one for all others."""
    ways = dict.fromkeys(sums_by_chunk(choice.recipe.plan()).values())
    return {way: _CYCLE[number] if number < len(_CYCLE) else _OTHERS for number, way in enumerate(ways)}


def _places(topology: Topology) -> List[Tuple[float, float]]:
    """Devices on a circle in the order of the ring, so that near ones stand side by side."""
    if len(topology) == 1:
        return [(0.0, 0.0)]
    order = {device: place for place, device in enumerate(ring(topology))}
    angles = [math.pi / 2 - 2 * math.pi * order[d] / len(topology) for d in range(len(topology))]
    return [(math.cos(angle), math.sin(angle)) for angle in angles]


def _machine(axes: Any, topology: Topology, link_bytes: Any = None) -> None:
    places = _places(topology)
    most = max(link_bytes.values(), default=0) if link_bytes else 0
    thickest = min(6.0, 60 / max(1, len(link_bytes or ())))
    pairs = [(i, j) for i in range(len(topology)) for j in range(i)]
    if link_bytes is None and switch_ports(topology):
        _switches(axes, topology, places)
        pairs = [(i, j) for i, j in pairs if not nvlinks(topology.kinds[i][j])]
    speeds = link_speeds(topology)
    for i, j in sorted(pairs, key=lambda pair: nvlinks(topology.kinds[pair[0]][pair[1]])):
        kind = topology.kinds[i][j]
        color, width = _kind_style(kind)
        if link_bytes is not None:
            carried = max(link_bytes.get((i, j), 0), link_bytes.get((j, i), 0))
            color, width = (_INK, 0.3 + thickest * carried / most) if carried else (_PALE, 0.6)
        (x0, y0), (x1, y1) = places[i], places[j]
        dashes = ":" if kind == "SYS" and link_bytes is None else "-"
        axes.plot((x0, x1), (y0, y1), dashes, color=color, linewidth=width, zorder=1, solid_capstyle="round")
        differs = speeds[kind] != f"{topology.link(i, j).bandwidth / GB:.4g}"
        named = differs or (nvlinks(kind) and len(set(topology.kinds[0])) > 2)
        if named and link_bytes is None and len(pairs) <= 28:
            axes.text(
                x0 + 0.34 * (x1 - x0),
                y0 + 0.34 * (y1 - y0),
                f"{kind} {topology.link(i, j).bandwidth / GB:.4g}" if differs else kind,
                fontsize=7,
                color=color,
                ha="center",
                va="center",
                bbox={"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none"},
            )
    _devices(axes, topology, places, size=620 if len(topology) <= 8 else 330)


def _switches(axes: Any, topology: Topology, places: Any) -> None:
    """A box for each set of devices that NVLinks join, between them, with a line to each."""
    joined = {
        frozenset([i, *(j for j, kind in enumerate(row) if nvlinks(kind))]) for i, row in enumerate(topology.kinds)
    }
    for devices in joined:
        x, y = (sum(places[device][side] for device in devices) / len(devices) for side in (0, 1))
        for device in devices:
            color, width = _kind_style(max(topology.kinds[device], key=nvlinks))
            axes.plot((x, places[device][0]), (y, places[device][1]), "-", color=color, linewidth=width, zorder=1)
        box = {"boxstyle": "round,pad=0.6", "facecolor": "white", "edgecolor": _INK, "linewidth": 1.4}
        axes.text(x, y, "NVSwitch", ha="center", va="center", fontsize=9, color=_INK, bbox=box)


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
    speeds, switched = link_speeds(topology), switch_ports(topology)
    for kind, speed in speeds.items():
        color, width = _kind_style(kind)
        axes.plot(
            [],
            [],
            ":" if kind == "SYS" else "-",
            color=color,
            linewidth=width,
            label=f"{kind}  {speed} GB/s each way{', shared by all pairs of a GPU' * bool(switched and nvlinks(kind))}",
        )
    if speeds:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, -0.08), ncol=3, frameon=False, fontsize=8)


def _way(axes: Any, topology: Topology, way: Any, color: str) -> None:
    """One chunk's reductions as arrows towards its root."""
    places = _places(topology)
    head = "-|>" if len(topology) <= 8 else "->,head_length=0.15,head_width=0.1"
    for srcs, dst in way:
        for src in srcs:
            axes.annotate(
                "",
                xy=places[dst],
                xytext=places[src],
                arrowprops={"arrowstyle": head, "color": color, "shrinkA": 7, "shrinkB": 8, "linewidth": 1.2},
            )
    _devices(axes, topology, places, size=120 if len(topology) <= 8 else 70, root=way[-1][1], color=color)


def _timeline(axes: Any, topology: Topology, run: Any, choice: Choice) -> None:
    """A lane for each device: outgoing copies above, reductions below, coloured by the chunk's way."""
    if not choice.seconds:
        axes.text(0.5, 0.5, "nothing to reduce", ha="center", fontsize=11, color=_INK)
        axes.axis("off")
        return
    plan = choice.recipe.plan()
    ways_of, color = sums_by_chunk(plan), _colors(choice)
    unit, name = (1e3, "ms") if choice.seconds >= 1e-3 else (1e6, "µs")
    edge = 0.3 if len(run.spans) < 1500 else 0.0
    for step, device, dst, start, end in run.spans:
        copy, face = dst != device, color[ways_of[plan.steps[step].chunk]]
        axes.barh(
            device + (-0.17 if copy else 0.29),
            (end - start) * unit,
            left=start * unit,
            height=0.52 if copy else 0.2,
            color=face,
            alpha=0.9 if copy else 0.45,
            edgecolor="white",
            linewidth=edge,
        )
        if copy and (end - start) > choice.seconds / 60:
            ink = _INK if face == _OTHERS else "white"
            middle = (start + end) / 2 * unit
            axes.text(middle, device - 0.17, str(dst), ha="center", va="center", fontsize=6, color=ink)
    lanes = [*topology.devices, *(f"NIC{nic}" for nic in range(_cross(axes, run, choice, len(topology), color, unit)))]
    axes.axvline(choice.bound * unit, color=_INK, linestyle=":", linewidth=1.2)
    side = "right" if choice.bound > choice.seconds / 2 else "left"
    beside = axes.get_xaxis_transform()  # above the lanes, however many there are
    axes.text(choice.bound * unit, 1.01, " lower bound ", ha=side, fontsize=8, color=_INK, transform=beside)
    axes.set_yticks(range(len(lanes)))
    axes.set_yticklabels(lanes, fontsize=8)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(0, choice.seconds * unit * 1.01)
    crossing = "; NIC: chunks between hosts (number: their main)" if len(lanes) > len(topology) else ""
    others = "; pale grey: the ways not shown" if _OTHERS in color.values() else ""
    key = f"{name}; upper bars: outgoing copies (number: receiver), lower bars: sums{crossing}{others}"
    axes.set_xlabel(key, fontsize=9, color=_INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _cross(axes: Any, run: Any, choice: Choice, devices: int, color: Any, unit: float) -> int:
    """Below the devices a lane for each network card, with the chunks on their way between hosts; how many lanes."""
    if not isinstance(choice, HostsChoice):
        return 0
    ways_of = sums_by_chunk(choice.recipe.plan())
    for chunk, device, nic, start, end in run.crossings:
        axes.barh(
            devices + nic,
            (end - start) * unit,
            left=start * unit,
            height=0.62,
            color=color[ways_of[chunk]],
            hatch="///",
            edgecolor="white",
            linewidth=0.3,
        )
        if end - start > choice.seconds / 40:
            axes.text(
                (start + end) / 2 * unit,
                devices + nic,
                str(device),
                ha="center",
                va="center",
                fontsize=7,
                color=_INK,
                bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"},
            )
    return nics_used(devices, choice.network)


def _hosts(axes: Any, topology: Topology, hosts: int, network: Network) -> None:
    """Up to four hosts as boxes of devices above their network cards, all on one network."""
    shown = list(range(hosts)) if hosts <= 4 else [0, 1, 2, hosts - 1]
    lefts = [1.12 * place + 0.2 * (hosts > 4 and place == 3) for place in range(len(shown))]
    for host, left in zip(shown, lefts):
        axes.text(left + 0.5, 1.05, f"host {host}", ha="center", fontsize=9, color=_INK)
        _host(axes, topology, network, left)
    if hosts > 4:
        axes.text(lefts[-1] - 0.16, 0.5, "…", ha="center", fontsize=16, color=_INK)
    right = lefts[-1] + 1
    axes.plot((0, right), (-0.22, -0.22), "-", color=_CYCLE[0], linewidth=5, solid_capstyle="round")
    lines = (
        f"{network.name}: {count(network.nics, 'card')} a host, {network.nic / GB:.4g} GB/s each way",
        f"TensorFlow moves at most {network.engine / GB:.4g} GB/s a host",
    )
    axes.text(right / 2, -0.33, "\n".join(lines), ha="center", va="top", fontsize=9, color=_INK)
    axes.set_title(hosts_line(topology, hosts, network), fontsize=10, color=_INK)
    spare = max(0.0, 3.4 - right) / 2
    axes.set_xlim(-0.1 - spare, right + 0.1 + spare)
    axes.set_ylim(-0.68, 1.2)
    axes.axis("off")


def _host(axes: Any, topology: Topology, network: Network, left: float) -> None:
    """A box with devices, at most four in a row, and lines to the cards that they use."""
    axes.add_patch(pyplot().Rectangle((left, 0), 1, 1, facecolor="white", edgecolor=_INK, linewidth=1.2))
    devices = len(topology)
    used = nics_used(devices, network)
    cards = [left + (nic + 0.5) / used for nic in range(used)]
    for x in cards:
        axes.plot((x, x), (0.12, -0.22), "-", color=_CYCLE[0], linewidth=1.6, zorder=1)
        axes.scatter([x], [0.12], s=min(80, 420 / used), marker="s", color=_CYCLE[0], zorder=3)
    rows = math.ceil(devices / 4)
    columns = math.ceil(devices / rows)
    for device in range(devices):
        column, row = divmod(device, rows)  # those that share a card stand one above the other
        x = left + (column + 0.5 + 0.3 * (row - (rows - 1) / 2) / rows) / columns
        y = 0.9 - 0.6 * (row + 0.5) / rows
        axes.plot((x, cards[nic_of(device, devices, network)]), (y, 0.12), "-", color=_PALE, linewidth=1.0, zorder=1)
        axes.scatter([x], [y], s=110 if rows < 3 else 75, facecolor="white", edgecolor=_INK, linewidth=1.1, zorder=3)
        axes.text(
            x, y - 0.005, str(device), ha="center", va="center", fontsize=6.5 if rows < 3 else 5.5, color=_INK, zorder=4
        )


def _scaling_curves(axes: Any, scaled: Sequence[HostsChoice]) -> None:
    """Seconds over the number of hosts, both logarithmic."""
    from matplotlib.ticker import FuncFormatter, LogFormatter

    hosts = [choice.hosts for choice in scaled]
    curves = (
        ("TensorFlow alone: one ring", [choice.flat_ring for choice in scaled], "-", _CYCLE[1]),
        ("as one host alone would", [choice.alone_seconds for choice in scaled], "-", _CYCLE[3]),
        ("this plan", [choice.seconds for choice in scaled], "-o", _CYCLE[2]),
        ("lower bound", [choice.bound for choice in scaled], ":", _INK),
    )
    for label, seconds, style, color in curves:
        shown = [1e3 * value or math.nan for value in seconds]  # nothing to do has no place on the axis
        axes.plot(hosts, shown, style, color=color, label=label, markersize=4, linewidth=1.6)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.2, 0.4)))
    axes.set_xticks(hosts)
    axes.set_xticklabels(hosts, fontsize=8)
    axes.set_xlabel("hosts", fontsize=9, color=_INK)
    axes.set_title(f"ms for {amount(scaled[0].size)}", fontsize=10, color=_INK)
    axes.grid(color=_PALE, linewidth=0.6)
    axes.legend(frameon=False, fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
