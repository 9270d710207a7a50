"""How a table of kinds becomes links: how fast each is, and what its bytes share with those of others on the way."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any, Dict, List, Sequence, Tuple

from ..errors import TopologyError
from .gpus import Speeds, known_gpu
from .matrix import HOST, PCIE, SELF, LinkMatrix, nvlinks

_DOMAINS = PCIE[:-1]  # devices joined by links up to this kind share their way out: a switch, a host bridge, a socket
_SOCKET_BUS = 1.6  # QPI, UPI and xGMI beside a PCIe port of their generation
_MOST_NVLINKS = 18  # of any GPU


@dataclass(frozen=True)
class Link:
    """One direction between two devices: ``bandwidth`` in bytes/s, ``latency`` in seconds.

    ``through`` names the shared resources its bytes occupy besides the sender's copy stream.
    """

    src: int
    dst: int
    kind: str
    bandwidth: float
    latency: float
    through: Tuple[str, ...] = ()


def _cpu_list(affinity: str) -> str:
    """The CPUs in an affinity, without the NUMA nodes of CPU and GPU after them; empty where none are known."""
    cpus = re.match(r"[\d,-]+|N/A", affinity)
    return cpus.group().replace("N/A", "") if cpus else affinity


class Links:
    """A table with its speeds: works out links, and enters in ``shared`` what they share, with its bytes/s."""

    def __init__(self, table: LinkMatrix, gpu: str, speeds: Speeds, overrides: Dict[str, float]):
        self.labels, self.kinds, self.speeds = table.labels, table.kinds, speeds
        self.overrides = self._checked(overrides)
        self.domains = {kind: self._near(PCIE[: PCIE.index(kind) + 1]) for kind in _DOMAINS}
        cpus = [_cpu_list(cpu) for cpu in table.cpus]
        if len(set(cpus)) > 1:
            self.domains["NODE"] = self._merged(self.domains["NODE"], cpus)
        known = known_gpu(gpu)
        most = known.nvlinks if known and known.nvlinks else _MOST_NVLINKS
        self.switched = any(sum(map(nvlinks, row)) > most for row in self.kinds)
        self.shared: Dict[str, float] = {}

    def _checked(self, overrides: Dict[str, float]) -> Dict[str, float]:
        pairs = {f"{a}-{b}" for a, b in permutations(self.labels, 2)}
        kinds = {kind for row in self.kinds for kind in row if kind != SELF}
        for key in overrides:
            if key not in pairs | kinds | set(PCIE) and not re.match(r"NV[1-9]\d*$", key):
                raise TopologyError(
                    f"links: {key!r} is neither a kind of link ({', '.join(sorted(kinds))}) "
                    f"nor a pair of devices such as '{'-'.join(self.labels[:2])}'"
                )
            turned = "-".join(key.split("-")[::-1])
            if overrides.get(turned, overrides[key]) != overrides[key]:
                raise TopologyError(
                    f"links: {key!r} and {turned!r} are the same pair, and a pair is as fast each way; give one of them"
                )
        return overrides

    def _near(self, kinds: Sequence[str]) -> List[int]:
        """For each device the first device it is joined to by links of these kinds."""
        return self._joined((i, j) for i, j in combinations(range(len(self.kinds)), 2) if self.kinds[i][j] in kinds)

    def _merged(self, domain: List[int], cpus: Sequence[str]) -> List[int]:
        """Devices beside the same CPUs share a socket, also where only far links join them."""
        pairs = combinations(range(len(cpus)), 2)
        return self._joined((i, j) for i, j in pairs if cpus[i] == cpus[j] != "" or domain[i] == domain[j])

    def _joined(self, pairs: Any) -> List[int]:
        root = list(range(len(self.kinds)))
        for i, j in pairs:
            old, new = sorted((root[i], root[j]))[::-1]
            root = [new if r == old else r for r in root]
        return root

    def link(self, i: int, j: int) -> Link:
        kind = self.kinds[i][j]
        pair = self.overrides.get(f"{self.labels[i]}-{self.labels[j]}") or self.overrides.get(
            f"{self.labels[j]}-{self.labels[i]}"
        )
        bandwidth = pair or self.overrides.get(kind) or self.speeds.of(kind)
        return Link(i, j, kind, bandwidth, self.speeds.copy_latency, tuple(self._through(i, j, kind, bandwidth)))

    def _through(self, i: int, j: int, kind: str, bandwidth: float) -> List[str]:
        """What the bytes pass, by name; each is entered in ``shared`` with its speed."""
        if kind == HOST:
            return []
        if nvlinks(kind):
            return self._ports(i, j, "NVSwitch", bandwidth) if self.switched else []
        used = self._ports(i, j, "PCIe", max(self.speeds.pcie, bandwidth))
        for level in PCIE[: PCIE.index(kind)]:
            domain = self.domains[level]
            speed = max(self.speeds.pcie * (_SOCKET_BUS if level == "NODE" else 1.0), bandwidth)
            for device, way in ((i, "out"), (j, "in")):
                members = [self.labels[d] for d, root in enumerate(domain) if root == domain[device]]
                name = f"{'socket' if level == 'NODE' else 'uplink'} of {'+'.join(members)} {way}"
                if len(members) > 1 and domain[i] != domain[j] and name not in used:
                    used += self._share(name, speed)
        return used

    def _ports(self, i: int, j: int, kind: str, speed: float) -> List[str]:
        return self._share(f"{self.labels[i]} {kind} out", speed) + self._share(f"{self.labels[j]} {kind} in", speed)

    def _share(self, name: str, speed: float) -> List[str]:
        self.shared[name] = max(speed, self.shared.get(name, 0.0))
        return [name]
