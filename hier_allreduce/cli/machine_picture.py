"""A machine as a picture: devices on a circle, links as lines. Needs matplotlib."""

from __future__ import annotations

import math
import re
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from ..figures import COLORS, INK, PALE, ink_on, pyplot, save_picture
from ..planning import pack, ring
from ..topology import GB, Topology, nvlinks
from .describe import link_speeds, switch_ports

_PCIE_COLORS = {"PIX": "#3d4752", "PXB": "#5f6c7a", "PHB": "#7d8a98", "NODE": "#98a4b0", "SYS": "#a9b3bd"}
_BIG, _MIDDLE, _SMALL = 1150, 620, 330  # circles of devices, in square points

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
    figure, axes = pyplot().subplots(figsize=(8.2, 7.2))
    draw_machine(axes, topology)
    axes.set_title(f"{topology.name}\n{_bound_text(topology)}", fontsize=11, color=INK)
    draw_legend(axes, topology)
    save_picture(figure, path)


def _bound_text(topology: Topology) -> str:
    if len(topology) == 1:
        return "one device: nothing to reduce"
    limit, links = (pack(topology, ideal_links=ideal).limit / GB for ideal in (False, True))
    return f"gradients all-reduced: TensorFlow's limit {limit:.3g} GB/s, limit of the links {links:.3g} GB/s"


def draw_machine(axes: Any, topology: Topology) -> None:
    """Draw a line for each pair, in the style of its kind of link, the faster above the slower."""
    positions = device_positions(topology)
    for i, j in sorted(_pairs(topology), key=lambda pair: topology.link(*pair).bandwidth):
        _draw_line(axes, positions[i], positions[j], _style(topology.kinds[i][j]))
    draw_devices(axes, positions, _BIG, names=[spaced(label) for label in topology.devices])


def draw_link_bytes(axes: Any, topology: Topology, link_bytes: Dict[Tuple[int, int], float]) -> None:
    """Draw each link as wide as the bytes that it carries in its busier direction; unused links below the used ones."""
    positions = device_positions(topology)
    most = max(link_bytes.values(), default=0)
    widest = min(6.0, 60 / max(1, len(link_bytes)))
    busier = {(i, j): max(link_bytes.get((i, j), 0), link_bytes.get((j, i), 0)) for i, j in _pairs(topology)}
    for (i, j), carried in sorted(busier.items(), key=lambda item: item[1]):
        style = _Style(INK, 0.3 + widest * carried / most) if carried else _Style(PALE, 0.6)
        _draw_line(axes, positions[i], positions[j], style)
    few = len(topology) <= 8
    names = [spaced(label) for label in topology.devices] if few else []
    draw_devices(axes, positions, _BIG if few else _SMALL, names=names)


def spaced(label: str) -> str:
    """Return ``GPU 0`` for ``GPU0``."""
    return re.sub(r"(?<=[A-Za-z])(?=\d+$)", " ", label)


def device_positions(topology: Topology) -> List[Point]:
    """Return the devices' positions on a circle, in the order of the ring, so that near ones are neighbours."""
    if len(topology) == 1:
        return [(0.0, 0.0)]
    place = {device: place for place, device in enumerate(ring(topology))}
    # half a step from the top, so that two sockets are a left and a right half
    angles = [math.pi / 2 - 2 * math.pi * (place[device] + 0.5) / len(topology) for device in range(len(topology))]
    return [(math.cos(angle), math.sin(angle)) for angle in angles]


def draw_devices(
    axes: Any, positions: List[Point], size: float, root: int = -1, color: str = INK, names: Sequence[str] = ()
) -> None:
    """Draw a circle for each device with its name, or its number; the one of ``root`` is filled."""
    font = {_BIG: 8.5, _MIDDLE: 9, _SMALL: 7}.get(int(size), 7 if size > 60 else 5.5)
    for device, (x, y) in enumerate(positions):
        face, ink = (color, ink_on(color)) if device == root else ("white", INK)
        axes.scatter([x], [y], s=size, facecolor=face, edgecolor=color, linewidth=1.4, zorder=3)
        name = names[device] if names else str(device)
        axes.text(x, y, name, ha="center", va="center", fontsize=font, color=ink, zorder=4)
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
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0.02), ncol=3, frameon=False, fontsize=8)


def _pairs(topology: Topology) -> List[Tuple[int, int]]:
    """Return each pair of devices once."""
    return [(i, j) for i in range(len(topology)) for j in range(i)]


def _style(kind: str) -> _Style:
    links = nvlinks(kind)
    if links:
        return _Style(COLORS[min(links, len(COLORS)) - 1], 1.0 + min(links, 2))
    return _Style(_PCIE_COLORS.get(kind, PALE), 1.4, ":" if kind == "SYS" else "-")


def _draw_line(axes: Any, start: Point, end: Point, style: _Style) -> None:
    (x0, y0), (x1, y1) = start, end
    axes.plot((x0, x1), (y0, y1), style.dashes, color=style.color, linewidth=style.width, solid_capstyle="round")
