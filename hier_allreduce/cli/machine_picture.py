"""A machine as a picture: its devices on a circle, its links as lines. Needs matplotlib, but no display."""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Tuple

from ..figures import pyplot, save_picture
from ..planning import pack, ring
from ..topology import GB, Topology, nvlinks
from .describe import link_speeds, switch_ports

INK, PALE = "#22262b", "#d9dde2"
COLORS = ("#1b6ca8", "#d1495b", "#2a9d5c", "#e08e0b", "#6a4c93", "#0f8b8d", "#a44a3f", "#5c677d")
_PCIE_COLORS = {"PIX": "#3d4752", "PXB": "#5f6c7a", "PHB": "#7d8a98", "NODE": "#98a4b0", "SYS": "#a9b3bd"}
_MOST_LABELS = 28  # pairs; with more, labels would cover the picture

Point = Tuple[float, float]


class _Style(NamedTuple):
    color: str
    width: float
    dashes: str = "-"


def draw_topology(topology: Topology, path: str) -> None:
    """Draw devices and links into a file (PNG, PDF, SVG by its ending).

    Raises:
        HierAllreduceError: matplotlib is missing, or the file cannot be written.
    """
    figure, axes = pyplot().subplots(figsize=(7.2, 6.4))
    draw_machine(axes, topology)
    axes.set_title(f"{topology.name}\n{_bound_text(topology)}", fontsize=11, color=INK)
    draw_legend(axes, topology)
    save_picture(figure, path)


def _bound_text(topology: Topology) -> str:
    if len(topology) == 1:
        return "one device: nothing to reduce"
    return f"at most {pack(topology).bound / GB:.3g} GB/s of gradients all-reduced under TensorFlow's rule"


def draw_machine(axes: Any, topology: Topology) -> None:
    """Draw each link in the style of its kind. NVLinks that end in an NVSwitch go to a box for the switch."""
    positions = device_positions(topology)
    pairs = _pairs(topology)
    if switch_ports(topology):
        _draw_switches(axes, topology, positions)
        pairs = [(i, j) for i, j in pairs if not nvlinks(topology.kinds[i][j])]
    labels = _link_labels(topology, pairs) if len(pairs) <= _MOST_LABELS else {}
    for i, j in pairs:
        style = _style(topology.kinds[i][j])
        _draw_line(axes, positions[i], positions[j], style)
        if (i, j) in labels:
            _draw_label(axes, positions[i], positions[j], labels[i, j], style.color)
    draw_devices(axes, positions, size=620 if len(topology) <= 8 else 330)


def draw_link_bytes(axes: Any, topology: Topology, link_bytes: Dict[Tuple[int, int], float]) -> None:
    """Draw each link as wide as the bytes that it carries in its busier direction."""
    positions = device_positions(topology)
    most = max(link_bytes.values(), default=0)
    widest = min(6.0, 60 / max(1, len(link_bytes)))
    for i, j in _pairs(topology):
        carried = max(link_bytes.get((i, j), 0), link_bytes.get((j, i), 0))
        style = _Style(INK, 0.3 + widest * carried / most) if carried else _Style(PALE, 0.6)
        _draw_line(axes, positions[i], positions[j], style)
    draw_devices(axes, positions, size=620 if len(topology) <= 8 else 330)


def device_positions(topology: Topology) -> List[Point]:
    """Return the devices' positions on a circle, in the order of the ring, so that near ones are neighbours."""
    if len(topology) == 1:
        return [(0.0, 0.0)]
    place = {device: place for place, device in enumerate(ring(topology))}
    angles = [math.pi / 2 - 2 * math.pi * place[device] / len(topology) for device in range(len(topology))]
    return [(math.cos(angle), math.sin(angle)) for angle in angles]


def draw_devices(axes: Any, positions: List[Point], size: float, root: int = -1, color: str = INK) -> None:
    """Draw a numbered circle for each device; the one of ``root`` is filled."""
    for device, (x, y) in enumerate(positions):
        face, ink = (color, "white") if device == root else ("white", INK)
        axes.scatter([x], [y], s=size, facecolor=face, edgecolor=color, linewidth=1.4, zorder=3)
        axes.text(x, y, str(device), ha="center", va="center", fontsize=9 if size > 200 else 7, color=ink, zorder=4)
    axes.set_xlim(-1.22, 1.22)
    axes.set_ylim(-1.22, 1.22)
    axes.set_aspect("equal")
    axes.axis("off")


def draw_legend(axes: Any, topology: Topology) -> None:
    """Draw a line of the legend for each kind of link, with its speed."""
    switched = bool(switch_ports(topology))
    speeds = link_speeds(topology)
    for kind, speed in speeds.items():
        shared = ", shared by all pairs of a GPU" if switched and nvlinks(kind) else ""
        style = _style(kind)
        label = f"{kind}  {speed} GB/s each way{shared}"
        axes.plot([], [], style.dashes, color=style.color, linewidth=style.width, label=label)
    if speeds:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, -0.08), ncol=3, frameon=False, fontsize=8)


def _pairs(topology: Topology) -> List[Tuple[int, int]]:
    """Return each pair of devices once, those with the most NVLinks last, because later lines cover earlier ones."""
    pairs = [(i, j) for i in range(len(topology)) for j in range(i)]
    return sorted(pairs, key=lambda pair: nvlinks(topology.kinds[pair[0]][pair[1]]))


def _style(kind: str) -> _Style:
    links = nvlinks(kind)
    if links:
        return _Style(COLORS[min(links, 8) - 1], 1.2 + 1.1 * min(links, 4))
    return _Style(_PCIE_COLORS.get(kind, PALE), 1.0, ":" if kind == "SYS" else "-")


def _link_labels(topology: Topology, pairs: List[Tuple[int, int]]) -> Dict[Tuple[int, int], str]:
    """Return the kinds of NVLinks where there are several, and the speed of each pair that differs from its kind's."""
    speeds = link_speeds(topology)
    several_kinds = len(set(topology.kinds[0])) > 2
    labels = {}
    for i, j in pairs:
        kind, speed = topology.kinds[i][j], f"{topology.link(i, j).bandwidth / GB:.4g}"
        if speeds[kind] != speed:
            labels[i, j] = f"{kind} {speed}"
        elif nvlinks(kind) and several_kinds:
            labels[i, j] = kind
    return labels


def _draw_line(axes: Any, start: Point, end: Point, style: _Style) -> None:
    axes.plot(
        (start[0], end[0]),
        (start[1], end[1]),
        style.dashes,
        color=style.color,
        linewidth=style.width,
        zorder=1,
        solid_capstyle="round",
    )


def _draw_label(axes: Any, start: Point, end: Point, label: str, color: str) -> None:
    x, y = (a + 0.34 * (b - a) for a, b in zip(start, end))
    box = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none"}
    axes.text(x, y, label, fontsize=7, color=color, ha="center", va="center", bbox=box)


def _draw_switches(axes: Any, topology: Topology, positions: List[Point]) -> None:
    """Draw a box in the middle of each set of devices that NVLinks join, with a line to each of them."""
    joined = {
        frozenset([i, *(j for j, kind in enumerate(row) if nvlinks(kind))]) for i, row in enumerate(topology.kinds)
    }
    for devices in joined:
        x, y = (sum(positions[device][side] for device in devices) / len(devices) for side in (0, 1))
        for device in devices:
            _draw_line(axes, (x, y), positions[device], _style(max(topology.kinds[device], key=nvlinks)))
        box = {"boxstyle": "round,pad=0.6", "facecolor": "white", "edgecolor": INK, "linewidth": 1.4}
        axes.text(x, y, "NVSwitch", ha="center", va="center", fontsize=9, color=INK, bbox=box)
