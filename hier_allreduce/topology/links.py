"""From a matrix of kinds to links: their speeds, and the resources that they share with others."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import permutations
from typing import Dict, Iterable, List, Optional, Sequence, Tuple

import numpy as np

from ..errors import HierAllreduceError
from .gpus import Speeds, known_gpu
from .machine_file import SharedWay
from .matrix import HOST, PCIE, SELF, LinkMatrix, nvlinks

_DOMAINS = PCIE[:-1]  # devices joined by links up to this kind share their way out: a switch, a host bridge, a socket
_SOCKET_BUS = 1.6  # speed of QPI, UPI or xGMI, compared with a PCIe port of the same generation
_MOST_NVLINKS = 18  # of any GPU


@dataclass(frozen=True)
class Link:
    """One direction between two devices: ``bandwidth`` in bytes/s, ``latency`` in seconds.

    ``through`` names the shared resources that its bytes occupy in addition to the sender's copy stream. Without peer
    access it is ``staged``: the driver copies its bytes into the host's memory, and from there to the receiver.
    """

    src: int
    dst: int
    kind: str
    bandwidth: float
    latency: float
    through: Tuple[str, ...] = ()
    staged: bool = False


class Links:
    """Builds the links of a matrix; ``shared`` collects the resources that they share, with bytes/s.

    Given ``ways``, what copies share is what these say, and the matrix says nothing about it.
    """

    def __init__(
        self,
        matrix: LinkMatrix,
        gpu: str,
        speeds: Speeds,
        overrides: Dict[str, float],
        ways: Optional[Sequence[SharedWay]] = None,
        staged: Sequence[str] = (),
    ):
        self.labels, self.kinds, self.speeds = matrix.labels, matrix.kinds, speeds
        self.overrides, self.staged = overrides, staged
        self._check_keys("links", overrides)
        self._check_keys("staged", staged)
        self._check_overrides()
        self._check_ways(ways or ())
        self.ways = None if ways is None else _ways_by_pair(ways)
        self.domains = self._domains(matrix.cpus)
        model = known_gpu(gpu)
        most_nvlinks = model.nvlinks if model and model.nvlinks else _MOST_NVLINKS
        self.switched = any(sum(map(nvlinks, row)) > most_nvlinks for row in self.kinds)
        self.shared: Dict[str, float] = {}

    def _check_keys(self, where: str, keys: Iterable[str]) -> None:
        pairs = {f"{a}-{b}" for a, b in permutations(self.labels, 2)}
        kinds = {kind for row in self.kinds for kind in row if kind != SELF}
        for key in keys:
            if key not in pairs | kinds | set(PCIE) and not re.match(r"NV[1-9]\d*$", key):
                raise HierAllreduceError(
                    f"{where}: {key!r} is neither a kind of link ({', '.join(sorted(kinds))}) "
                    f"nor a pair of devices such as '{'-'.join(self.labels[:2])}'"
                )

    def _check_overrides(self) -> None:
        for key in self.overrides:
            reverse = "-".join(key.split("-")[::-1])
            if self.overrides.get(reverse, self.overrides[key]) != self.overrides[key]:
                raise HierAllreduceError(
                    f"links: {key!r} and {reverse!r} are the same pair and must have the same speed; give one of them"
                )

    def _check_ways(self, ways: Sequence[SharedWay]) -> None:
        pairs = set(permutations(self.labels, 2))
        for way in ways:
            for pair in way.copies:
                if pair not in pairs:
                    raise HierAllreduceError(
                        f"shared: {way.name}: copies: {pair[0]} to {pair[1]}: no such pair of devices of this machine, "
                        f"which has {', '.join(self.labels)}"
                    )

    def _domains(self, cpus: Sequence[str]) -> Dict[str, List[int]]:
        """Return K numbers for each kind in ``_DOMAINS``: devices with the same number share their way out.

        ::

            GPU0 ─PIX─ GPU1 ─NODE─ GPU2     ──►     PIX: 0 0 1     NODE: 0 0 0
        """
        domains = {kind: _components(np.isin(self.kinds, PCIE[: PCIE.index(kind) + 1])) for kind in _DOMAINS}
        cpu_lists = np.array([affinity.replace("N/A", "") for affinity in cpus])
        if len(set(cpu_lists)) > 1:
            # Devices next to the same CPUs share a socket, even where only far links join them.
            same_cpus = (cpu_lists[:, None] == cpu_lists) & (cpu_lists != "")
            same_node = np.equal.outer(domains["NODE"], domains["NODE"])
            domains["NODE"] = _components(same_cpus | same_node)
        return domains

    def link(self, src: int, dst: int) -> Link:
        """Return the link from ``src`` to ``dst``, and enter what its bytes share in ``shared``."""
        kind, a, b = self.kinds[src][dst], self.labels[src], self.labels[dst]
        of_pair = self.overrides.get(f"{a}-{b}") or self.overrides.get(f"{b}-{a}")
        staged = any(key in self.staged for key in (kind, f"{a}-{b}", f"{b}-{a}"))
        bandwidth = of_pair or self.overrides.get(kind) or self.speeds.of(kind, staged)
        through = self._resources(src, dst, kind, bandwidth, staged) if self.ways is None else self.ways.get((a, b), {})
        for name, speed in through.items():
            self.shared[name] = max(speed, self.shared.get(name, 0.0))
        latency = self.speeds.copy_latency + staged * self.speeds.staged_latency
        return Link(src, dst, kind, bandwidth, latency, tuple(through), staged)

    def _resources(self, src: int, dst: int, kind: str, bandwidth: float, staged: bool) -> Dict[str, float]:
        """Return the shared resources that the bytes pass, in their order, with their bytes/s."""
        if kind == HOST:
            return {}
        if nvlinks(kind) and not staged:
            return self._ports(src, dst, "NVSwitch", bandwidth) if self.switched else {}
        resources = self._ports(src, dst, "PCIe", max(self.speeds.pcie, bandwidth))
        if staged:
            resources["memory of the host"] = max(self.speeds.staged, bandwidth)
        # the host's memory lies behind all switches, even behind one that joins both GPUs
        switches = PCIE.index("PHB") if staged else 0
        for number, level in enumerate(PCIE[: max(switches, PCIE.index(kind) if kind in PCIE else 0)]):
            domain = self.domains[level]
            if domain[src] == domain[dst] and number >= switches:
                continue
            place, factor = ("socket", _SOCKET_BUS) if level == "NODE" else ("uplink", 1.0)
            for device, direction in ((src, "out"), (dst, "in")):
                members = [label for label, number in zip(self.labels, domain) if number == domain[device]]
                if len(members) > 1:
                    # Two levels with the same members are one uplink.
                    name = f"{place} of {'+'.join(members)} {direction}"
                    resources.setdefault(name, max(self.speeds.pcie * factor, bandwidth))
        return resources

    def _ports(self, src: int, dst: int, kind: str, speed: float) -> Dict[str, float]:
        return {f"{self.labels[src]} {kind} out": speed, f"{self.labels[dst]} {kind} in": speed}


def _ways_by_pair(ways: Sequence[SharedWay]) -> Dict[Tuple[str, str], Dict[str, float]]:
    """Return for each pair (sender, receiver) what its copies share, with bytes/s."""
    by_pair: Dict[Tuple[str, str], Dict[str, float]] = {}
    for way in ways:
        for pair in way.copies:
            by_pair.setdefault(pair, {})[way.name] = way.speed
    return by_pair


def _components(joined: np.ndarray) -> List[int]:
    """Return the number of each device's connected component; ``joined`` is a K×K matrix of booleans."""
    reached = joined | joined.T | np.eye(len(joined), dtype=bool)
    for _ in range(len(joined).bit_length()):  # each product doubles the number of steps that may lie in between
        reached = reached @ reached
    return [int(first) for first in reached.argmax(axis=1)]  # of each component its first device is the number
