"""Emulated machines: the links between GPUs, from ``benchmarks/machines/NAME.links``.

::

    # src dst bytes/s seconds n (resource bytes/s)*n
    0 1 24e9 1e-5 2  0 24e9  1 24e9

A copy takes ``seconds`` and then its bytes at ``bytes/s``. It also books each of the n resources
for its bytes at their speed, so copies that share a bus or a switch wait for each other. A line
``#: op_us=12.5 kernel_us=5`` has what is measured on this machine: see :class:`Machine`.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, Dict, Iterable, List, NamedTuple, Tuple

MACHINES = Path(__file__).parent / "machines"
# Measured with TensorFlow 2.21 on one of an H100's logical GPUs: 5.4 to 8.4. No machine with
# several GPUs was measured.
OP_US = 8.0


class Link(NamedTuple):
    """The way from one GPU to another: its speed, its latency, and what it shares with others."""

    bytes_per_second: float
    seconds: float
    shared: Tuple[Tuple[int, float], ...]  # (resource, its bytes/s)


class Copies(NamedTuple):
    """Copies of one size from GPU ``src`` to GPU ``dst``."""

    src: int
    dst: int
    bytes: int


class Machine(NamedTuple):
    """Links by ordered pair of GPUs, and the file that they come from.

    Attributes:
        op_us: microseconds that an op costs the host while all GPUs run.
        options: of the emulated GPUs, such as ``{"kernel_us": 5}``.
    """

    name: str
    path: Path
    links: Dict[Tuple[int, int], Link]
    op_us: float
    options: Dict[str, float]

    @property
    def gpus(self) -> int:
        """K."""
        return 1 + max(src for src, _ in self.links)


def load_machine(name: str) -> Machine:
    """Return a machine of ``benchmarks/machines``.

    Raises:
        SystemExit: there is no such machine.
    """
    path = MACHINES / f"{name}.links"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in MACHINES.glob("*.links")))
        raise SystemExit(f"{name}: no such machine; there are {known}")
    links: Dict[Tuple[int, int], Link] = {}
    options: Dict[str, float] = {}
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("#:"):
            pairs = (pair.split("=") for pair in line[2:].split())
            options.update((key, float(value)) for key, value in pairs)
        elif not line.startswith("#"):
            src, dst, speed, seconds, _, *rest = line.split()
            shared = tuple(zip(map(int, rest[::2]), map(float, rest[1::2])))
            links[int(src), int(dst)] = Link(float(speed), float(seconds), shared)
    return Machine(name, path, links, options.pop("op_us", OP_US), options)


def limit(machine: Machine, copies: Iterable[Copies]) -> float:
    """Return the seconds for which the copies keep the busiest link, bus or sender busy.

    A sender counts, since TensorFlow makes its copies to other GPUs one after another.
    """
    busy: Dict[Any, float] = defaultdict(float)
    for copy in copies:
        link = machine.links[copy.src, copy.dst]
        busy[f"sender {copy.src}"] += copy.bytes / link.bytes_per_second
        for resource, bytes_per_second in link.shared:
            busy[resource] += copy.bytes / bytes_per_second
    return max(busy.values(), default=0)


def copies_in(graph: Any, devices: List[str]) -> List[Copies]:
    """Return the copies between devices that a graph asks for: one for each tensor and reader."""
    numbers = {device.lower(): number for number, device in enumerate(devices)}
    homes = {op: numbers.get(_short(op.device)) for op in graph.get_operations()}
    copies = set()
    for op, dst in homes.items():
        for tensor in op.inputs:
            src = homes[tensor.op]
            if src is not None and dst is not None and src != dst:
                copies.add((tensor.name, src, dst, _bytes(tensor)))
    return [Copies(src, dst, size) for _, src, dst, size in copies]


def _short(device: str) -> str:
    return device.lower().replace("device:", "")


def _bytes(tensor: Any) -> int:
    elements = tensor.shape.num_elements()
    return (elements or 0) * tensor.dtype.size
