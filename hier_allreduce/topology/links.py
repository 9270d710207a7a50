"""From a machine to the link of each ordered pair: speed, seconds to start, and the resources that its copies share.

::

    GPU0 ─PIX─ GPU1 ─NODE─ GPU2 ─SYS─ GPU3      a copy from GPU0 to GPU3 passes GPU0's port, the uplink of
        switch ─ host bridge ─ bus              GPU0+GPU1's switch, the bus between sockets, and GPU3's port
"""

from __future__ import annotations

from itertools import combinations, permutations
from typing import Dict, Iterator, List, NamedTuple, Sequence, Tuple

from .gpus import Speeds, known_gpu
from .machine import Topology
from .matrix import PCIE, nvlinks

_BUS = 1.6  # speed of QPI, UPI or xGMI between sockets, compared with a PCIe port of the same generation
_MOST_NVLINKS = 18  # of any GPU


class Link(NamedTuple):
    """One direction between two devices: bytes/s, seconds to start, and (resource, bytes/s) that its copies share."""

    bandwidth: float
    latency: float
    shared: Tuple[Tuple[int, float], ...]


class Links(NamedTuple):
    """A machine as the simulator sees it.

    Attributes:
        ways: the link of each ordered pair (src, dst).
        resources: (name, bytes/s) of each resource, such as ``GPU0+GPU1 out``, by its number.
        speeds: of the GPUs and the host.
    """

    ways: Dict[Tuple[int, int], Link]
    resources: Tuple[Tuple[str, float], ...]
    speeds: Speeds


def links_of(machine: Topology) -> Links:
    """Return the links of a machine. ``docs/cost-model.md`` lists the assumptions."""
    domains, switched, listed = _domains(machine), _is_switched(machine), dict(machine.shared)
    ways: Dict[Tuple[int, int], Link] = {}
    numbers: Dict[str, int] = {}
    speeds: Dict[str, float] = {}
    for src, dst in permutations(range(len(machine)), 2):
        bandwidth = machine.bandwidth(src, dst)
        shared: Dict[int, float] = {}
        for group, direction, usual in _passed(machine, src, dst, domains, switched):
            name = f"{group} {direction}".strip()
            speed = listed.get(group) or max(usual, bandwidth)  # a copy alone is not slowed down
            number = numbers.setdefault(name, len(numbers))
            shared.setdefault(number, speed)  # two levels with the same members are one uplink
            speeds[name] = max(shared[number], speeds.get(name, 0.0))
        ways[src, dst] = Link(bandwidth, machine.latency(src, dst), tuple(shared.items()))
    return Links(ways, tuple(speeds.items()), machine.speeds)


def _is_switched(machine: Topology) -> bool:
    """Return whether NVLinks end in an NVSwitch: the matrix then counts a GPU's links once for each peer."""
    model = known_gpu(machine.gpu)
    most = model.nvlinks if model and model.nvlinks else _MOST_NVLINKS
    return any(sum(map(nvlinks, row)) > most for row in machine.kinds)


def _passed(
    machine: Topology, src: int, dst: int, domains: List[List[int]], switched: bool
) -> Iterator[Tuple[str, str, float]]:
    """Yield the ports, uplinks and buses between two devices: (group, direction, bytes/s)."""
    kind, staged, port = machine.kinds[src][dst], machine.is_staged(src, dst), machine.speeds.pcie
    ends = ((src, "out"), (dst, "in"))
    if nvlinks(kind) and not staged:
        # each GPU's NVLinks to the switch are one port, as fast as one of its links
        yield from (
            (f"{machine.devices[device]} NVSwitch", direction, 0.0)
            for device, direction in ends
            if switched
        )
        return
    yield from ((machine.devices[device], direction, port) for device, direction in ends)
    if staged:
        yield "host", "", machine.speeds.staged
    behind_bridges = (
        PCIE.index("PHB") if staged else 0
    )  # the host's memory lies behind all switches
    for level in range(max(behind_bridges, PCIE.index(kind) if kind in PCIE else 0)):
        domain, speed = domains[level], port * (_BUS if PCIE[level] == "NODE" else 1.0)
        if domain[src] == domain[dst] and level >= behind_bridges:
            continue
        for device, direction in ends:
            members = [
                label for label, number in zip(machine.devices, domain) if number == domain[device]
            ]
            if len(members) > 1:
                yield "+".join(members), direction, speed


def _domains(machine: Topology) -> List[List[int]]:
    """Return for PIX, PXB, PHB and NODE K numbers: devices with the same number share a switch, bridge or socket."""
    pairs = list(combinations(range(len(machine)), 2))
    near = [
        [(a, b) for a, b in pairs if machine.kinds[a][b] in PCIE[:end]]
        for end in range(1, len(PCIE))
    ]
    cpus = [affinity.replace("N/A", "").strip() for affinity in machine.cpus]
    if (
        len(set(cpus)) > 1
    ):  # devices next to the same CPUs share a socket, even where only far links join them
        near[-1] += [(a, b) for a, b in pairs if cpus[a] == cpus[b] != ""]
    return [_joined(len(machine), pairs) for pairs in near]


def _joined(devices: int, pairs: Sequence[Tuple[int, int]]) -> List[int]:
    """Return for each device the first one that it is joined with, directly or by others."""
    first = list(range(devices))
    for a, b in pairs:
        low, high = sorted((first[a], first[b]))
        first = [low if number == high else number for number in first]
    return first
