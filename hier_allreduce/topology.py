"""Topologies: the devices of a machine, the links between them, and what the links share.

::

    GPU0 ══NV2══ GPU3          a link: bytes/s in each direction, latency, kind
      │            │           what its bytes occupy: the sender's copy stream, the receiver's port,
    ──┴── switch ──┴── up      the switches' uplinks and the sockets' bus on the way

The kinds come from a table (:mod:`.table`), what they are worth from :mod:`.speeds` and :mod:`.calibration`. How text
becomes a table is in :mod:`.smi` and :mod:`.machinefile`, what copies compete for in :mod:`.occupancy`. All assumptions
are listed in ``docs/cost-model.md``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from itertools import combinations, permutations
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import yaml

from .calibration import overrides_of, speeds_of, words_of
from .errors import TopologyError
from .speeds import GB, Speeds, guess_speeds, known_gpu, likely_gpu
from .table import HOST, PCIE, SELF, Matrix, Table, nvlinks

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


@dataclass(frozen=True)
class Topology:
    """A machine: K device labels, the K×K table of link kinds, the links, and the shared resources.

    ``links`` has one entry for each ordered pair. ``shared`` maps a resource's name to its bytes/s. ``cpus`` are CPU
    affinities as nvidia-smi writes them. ``warnings`` are what looked odd in the table. Build one with
    :func:`from_table`, :func:`flat_host`, or from a file with :func:`.machinefile.load`.
    """

    name: str
    devices: Tuple[str, ...]
    kinds: Matrix
    speeds: Speeds
    links: Tuple[Link, ...]
    shared: Tuple[Tuple[str, float], ...]
    cpus: Tuple[str, ...] = ()
    gpu: str = ""
    warnings: Tuple[str, ...] = ()
    overrides: Tuple[Tuple[str, float], ...] = field(default=())

    def __len__(self) -> int:
        return len(self.devices)

    def link(self, src: int, dst: int) -> Link:
        """The link from ``src`` to ``dst``."""
        return self.links[src * (len(self) - 1) + dst - (dst > src)]

    def table(self) -> str:
        """The table of kinds as nvidia-smi prints it."""
        columns = [*self.devices, "CPU Affinity"] if any(self.cpus) else list(self.devices)
        rows = [[d, *kinds, *([cpu] if any(self.cpus) else [])] for d, kinds, cpu in self._rows()]
        width = max(len(cell) for row in [self.devices, *rows] for cell in row[: len(self) + 1]) + 2
        lines = [" " * width + "".join(c.ljust(width) for c in columns)]
        lines += ["".join(cell.ljust(width) for cell in row) for row in rows]
        return "\n".join(line.rstrip() for line in lines) + "\n"

    def _rows(self) -> List[Tuple[str, Tuple[str, ...], str]]:
        return list(zip(self.devices, self.kinds, self.cpus or ("",) * len(self)))

    def to_yaml(self) -> str:
        """The machine as a YAML file: :func:`.machinefile.from_yaml` gives an equal topology back.

        Its warnings are then those about this table: what was odd in the text that it came from is mended in it.
        """
        speeds = {f.name: getattr(self.speeds, f.name) for f in fields(Speeds)}
        document: Dict[str, Any] = {"name": self.name, "gpu": self.gpu, "speeds": speeds}
        if self.overrides:
            document["links"] = dict(self.overrides)
        text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
        return text + "matrix: |2\n" + "".join(f"  {line}\n" for line in self.table().splitlines())


# ---- building ---------------------------------------------------------------------------------------


def from_table(table: Table, name: str, gpu: str = "", calibration: Optional[Mapping[str, Any]] = None) -> Topology:
    """The topology of a table of kinds.

    Args:
        table: from :func:`.smi.parse_nvidia_smi`.
        name: what reports call the machine.
        gpu: the GPU's model ("V100"), which decides its speeds; without it they are guessed from the table.
        calibration: overrides, as in a calibration file: ``speeds`` (keys of :class:`Speeds`) and ``links`` (bytes/s of
            ``NV1``, ``SYS`` … or of one pair, ``GPU0-GPU3``).

    Raises:
        TopologyError: a key of ``calibration`` names nothing, or a value is not a positive number.
    """
    given = calibration or {}
    model = words_of(given, "gpu") or gpu or table.gpu
    speeds = replace(guess_speeds(table.kinds, model), **speeds_of(given))
    machine = _built(table, name, model, speeds, overrides_of(given))
    return replace(machine, warnings=machine.warnings + _unknown_model(machine))


def _unknown_model(machine: Topology) -> Tuple[str, ...]:
    """The warning that a model is not known, if speeds had to be guessed for that."""
    guess = guessed(machine) if machine.gpu and not known_gpu(machine.gpu) else ""
    return (f"the model {machine.gpu!r} is not known; speeds as of {guess} (guessed from the links)",) * bool(guess)


def _built(table: Table, name: str, gpu: str, speeds: Speeds, overrides: Tuple[Tuple[str, float], ...]) -> Topology:
    machine = _Machine(table, gpu, speeds, dict(overrides))
    return Topology(
        name,
        table.labels,
        table.kinds,
        speeds,
        tuple(machine.link(i, j) for i, j in permutations(range(len(table.labels)), 2)),
        tuple(machine.shared.items()),
        table.cpus if any(table.cpus) else (),
        gpu,
        table.warnings,
        overrides,
    )


def guessed(topology: Topology) -> str:
    """Whose speeds the links have, in words, where they are :func:`guess_speeds`' without a known model.

    Empty where all speeds that count were given.
    """
    kinds = {kind for row in topology.kinds for kind in row} - {key for key, _ in topology.overrides}
    guess, likely = guess_speeds(topology.kinds), likely_gpu(topology.kinds)
    by_nvlink = any(map(nvlinks, kinds)) and topology.speeds.nvlink == guess.nvlink
    by_pcie = bool(kinds & set(PCIE)) and topology.speeds.pcie == guess.pcie
    if not (by_nvlink or by_pcie):
        return ""
    return f"{likely} GPUs" if likely else f"GPUs with PCIe ports of {guess.pcie / GB:.0f} GB/s"


def calibrated(topology: Topology, calibration: Optional[Mapping[str, Any]]) -> Topology:
    """The machine with a calibration file's content, instead of what its speeds were before; itself without one.

    Raises:
        TopologyError: as in :func:`from_table`.
    """
    if calibration is None:
        return topology
    table = _table(topology, range(len(topology)))
    before = _unknown_model(topology)  # by now it may be
    warnings = tuple(warning for warning in table.warnings if warning not in before)
    return from_table(replace(table, warnings=warnings), topology.name, calibration=calibration)


def flat_host(devices: int, name: str = "host") -> Topology:
    """``devices`` CPU devices in one host's memory: all links alike."""
    labels = tuple(f"CPU{d}" for d in range(devices))
    kinds = tuple(tuple(SELF if i == j else HOST for j in range(devices)) for i in range(devices))
    return from_table(Table(labels, kinds, ("",) * devices, "", ()), name)


def subset(topology: Topology, devices: Sequence[int]) -> Topology:
    """The machine as a job sees it that was given only ``devices``, in this order.

    It is worked out anew from the part of the table, with the overrides that are about its links: what only the other
    devices shared or were joined by is not in it.

    Raises:
        TopologyError: a device that the machine does not have, or one given twice.
    """
    unknown = [d for d in devices if not 0 <= d < len(topology)]
    twice = [f"{d} twice" for d in dict.fromkeys(devices) if list(devices).count(d) > 1]
    if unknown or twice or not devices:
        wrong = ", ".join([*map(str, unknown), *twice]) or "none"
        raise TopologyError(f"{topology.name} has devices 0 to {len(topology) - 1}, each once; cannot take {wrong}")
    table = _table(topology, devices)
    named = {kind for row in table.kinds for kind in row} | {f"{a}-{b}" for a, b in permutations(table.labels, 2)}
    overrides = tuple((key, value) for key, value in topology.overrides if key in named)
    return _built(table, topology.name, topology.gpu, topology.speeds, overrides)


def _table(topology: Topology, devices: Sequence[int]) -> Table:
    kinds = tuple(tuple(topology.kinds[i][j] for j in devices) for i in devices)
    cpus = tuple(topology.cpus[d] if topology.cpus else "" for d in devices)
    return Table(tuple(topology.devices[d] for d in devices), kinds, cpus, topology.gpu, topology.warnings)


# ---- how a table becomes links ----------------------------------------------------------------------


def _cpu_list(affinity: str) -> str:
    """The CPUs in an affinity, without the NUMA nodes of CPU and GPU after them; empty where none are known."""
    cpus = re.match(r"[\d,-]+|N/A", affinity)
    return cpus.group().replace("N/A", "") if cpus else affinity


class _Machine:
    """A table with its speeds: works out links and what they share."""

    def __init__(self, table: Table, gpu: str, speeds: Speeds, overrides: Dict[str, float]):
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
