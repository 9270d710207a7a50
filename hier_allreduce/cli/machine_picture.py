"""A machine as a picture: devices on a circle, links as lines, PCIe switches and sockets as boxes. Needs matplotlib."""

from __future__ import annotations

import math
import re
from typing import Any, Dict, FrozenSet, List, NamedTuple, Sequence, Tuple

from ..figures import COLORS, INK, PALE, ink_on, pyplot, save_picture
from ..planning import pack, ring
from ..topology import GB, Topology, nvlinks
from .describe import link_speeds, switch_ports

_PCIE_COLORS = {"PIX": "#3d4752", "PXB": "#5f6c7a", "PHB": "#7d8a98", "NODE": "#98a4b0", "SYS": "#a9b3bd"}
_MOST_LABELS = 28  # pairs; with more, labels would cover the picture
_BIG, _MIDDLE, _SMALL = 1150, 620, 330  # circles of devices, in square points

Point = Tuple[float, float]


class _Style(NamedTuple):
    color: str
    width: float
    dashes: str = "-"


class Box(NamedTuple):
    """A PCIe switch or a socket: its devices, what it is called, and the bytes/s out of it."""

    devices: FrozenSet[int]
    name: str
    speed: float


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
    limit, links = (pack(topology, ideal_links=ideal).bound / GB for ideal in (False, True))
    return f"gradients all-reduced: TensorFlow's limit {limit:.3g} GB/s, limit of the links {links:.3g} GB/s"


def draw_machine(axes: Any, topology: Topology) -> None:
    """Draw each link in the style of its kind.

    NVLinks that end in an NVSwitch go to a box for the switch. PCIe switches and sockets are boxes around their
    devices: what passes through them has no line of its own.
    """
    positions = device_positions(topology)
    drawn = boxes(topology)
    pairs = [(i, j) for i, j in _pairs(topology) if not _passes_box(topology, drawn, i, j)]
    _draw_boxes(axes, topology, drawn, positions)
    if switch_ports(topology):
        _draw_switches(axes, topology, positions)
        pairs = [(i, j) for i, j in pairs if not nvlinks(topology.kinds[i][j])]
    labels = _link_labels(topology, pairs) if len(pairs) <= _MOST_LABELS else {}
    for i, j in pairs:
        style = _style(topology.kinds[i][j])
        _draw_line(axes, positions[i], positions[j], style)
        if (i, j) in labels:
            _draw_label(axes, positions[i], positions[j], labels[i, j])
    draw_devices(axes, positions, _BIG, names=[spaced(label) for label in topology.devices])
    if drawn:
        axes.set_xlim(-1.75, 1.75)
        axes.set_ylim(-1.55, 1.55)


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
    """Return the devices' positions on a circle, in the order of the ring, so that near ones are neighbours.

    The devices of a socket, and of a PCIe switch in it, are next to each other.
    """
    if len(topology) == 1:
        return [(0.0, 0.0)]
    around = list(ring(topology))
    for box in sorted(boxes(topology), key=lambda box: len(box.devices)):  # the largest last: it decides
        first = next(place for place, device in enumerate(around) if device in box.devices)
        inside = [device for device in around if device in box.devices]
        before = [device for device in around[:first] if device not in box.devices]
        around = before + inside + [device for device in around[first:] if device not in box.devices]
    place = {device: place for place, device in enumerate(around)}
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


# ---- boxes -------------------------------------------------------------------------------------------


def boxes(topology: Topology) -> List[Box]:
    """Return the PCIe switches and sockets whose way out several devices share, the largest first."""
    number = {label: device for device, label in enumerate(topology.devices)}
    found = []
    for name, speed in topology.shared:
        match = re.match(r"(uplink|socket) of (.+) out$", name)
        labels = match.group(2).split("+") if match else []
        if match and all(label in number for label in labels):
            kind = "PCIe switch" if match.group(1) == "uplink" else "socket"
            found.append(Box(frozenset(number[label] for label in labels), kind, speed))
    return sorted(found, key=lambda box: (-len(box.devices), box.name != "socket"))


def _passes_box(topology: Topology, drawn: Sequence[Box], i: int, j: int) -> bool:
    """Return whether a pair has no line of its own: it is joined by PCIe, inside a box or out of one."""
    return not nvlinks(topology.kinds[i][j]) and any({i, j} & box.devices for box in drawn)


def _draw_boxes(axes: Any, topology: Topology, drawn: Sequence[Box], positions: List[Point]) -> None:
    """Draw a box around the devices of each, a line between those that are in no other, and their speeds outside."""
    outer = [box for box in drawn if not any(box.devices < other.devices for other in drawn)]
    outer = list({box.devices: box for box in reversed(outer)}.values())
    for first, second in ((a, b) for place, a in enumerate(outer) for b in outer[:place]):
        kinds = {topology.kinds[i][j] for i in first.devices for j in second.devices}
        between = [kind for kind in kinds if not nvlinks(kind)]
        if between:
            _draw_line(axes, _middle(first, positions), _middle(second, positions), _style(max(between)), behind=True)
    texts: Dict[FrozenSet[int], List[str]] = {}
    for box in drawn:
        _draw_hull(axes, box, positions)
        texts.setdefault(box.devices, []).append(f"{box.name}, {box.speed / GB:.3g} GB/s")
    for devices, lines in texts.items():
        x, y = _middle(Box(devices, "", 0.0), positions)
        far = 1.42 / max(math.hypot(x, y), 0.1)
        side = "center" if abs(x * far) < 0.3 else "left" if x > 0 else "right"
        axes.text(x * far, y * far, "\n".join(lines), fontsize=7.5, color=INK, ha=side, va="center", zorder=4)


def _draw_hull(axes: Any, box: Box, positions: List[Point]) -> None:
    """Draw a rounded shape around the devices of a box: a polygon with a wide outline."""
    width, color = (84, "#e9edf2") if box.name == "socket" else (58, "#cfd9e4")
    corners = sorted((positions[device] for device in box.devices), key=lambda point: math.atan2(point[1], point[0]))
    if len(corners) > 2:
        shape = pyplot().Polygon(corners, facecolor=color, edgecolor=color, linewidth=width, joinstyle="round")
        axes.add_patch(shape).set_zorder(0.5)
    else:
        axes.plot(*zip(*corners), color=color, linewidth=width, solid_capstyle="round", zorder=0.5)


def _middle(box: Box, positions: List[Point]) -> Point:
    count = len(box.devices)
    return (sum(positions[i][0] for i in box.devices) / count, sum(positions[i][1] for i in box.devices) / count)


# ---- links -------------------------------------------------------------------------------------------


def _pairs(topology: Topology) -> List[Tuple[int, int]]:
    """Return each pair of devices once, those with the most NVLinks last, because later lines cover earlier ones."""
    pairs = [(i, j) for i in range(len(topology)) for j in range(i)]
    return sorted(pairs, key=lambda pair: nvlinks(topology.kinds[pair[0]][pair[1]]))


def _style(kind: str) -> _Style:
    links = nvlinks(kind)
    if links:
        return _Style(COLORS[min(links, len(COLORS)) - 1], 1.2 + 1.1 * min(links, 4))
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


def _draw_line(axes: Any, start: Point, end: Point, style: _Style, behind: bool = False) -> None:
    axes.plot(
        (start[0], end[0]),
        (start[1], end[1]),
        "-" if behind else style.dashes,
        color=style.color,
        linewidth=9 if behind else style.width,
        zorder=0.2 if behind else 1,
        solid_capstyle="round",
    )


def _draw_label(axes: Any, start: Point, end: Point, label: str) -> None:
    x, y = (a + 0.34 * (b - a) for a, b in zip(start, end))
    box = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none"}
    axes.text(x, y, label, fontsize=7, color=INK, ha="center", va="center", bbox=box)


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
