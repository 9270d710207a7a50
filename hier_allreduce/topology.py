"""Topologies: the devices of a machine, the links between them, and what the links share.

::

    GPU0 ══NV2══ GPU3          a link: bytes/s in each direction, latency, kind
      │            │           what its bytes occupy: the sender's copy stream, the receiver's port,
    ──┴── switch ──┴── up      the switches' uplinks and the sockets' bus on the way

The kinds come from ``nvidia-smi topo -m`` (:mod:`.smi`) or from a YAML file that holds the same table. The table
says nothing about bytes per second; :data:`GPUS` and :func:`guess_speeds` do, and a calibration file overrides them.
All assumptions are listed in ``docs/cost-model.md``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import combinations, permutations
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import yaml

from . import presets
from .errors import TopologyError
from .smi import HOST, PCIE, SELF, Matrix, Table, nvlinks, parse_nvidia_smi

GB = 1e9
# What is left of a PCIe port's speed when the bytes go by a switch, two, the host bridge, across bridges, sockets.
_PCIE_SHARE = {"PIX": 1.0, "PXB": 0.95, "PHB": 0.85, "NODE": 0.8, "SYS": 0.77}
_DOMAINS = PCIE[:-1]  # devices joined by links up to this kind share their way out: a switch, a host bridge, a socket
_SOCKET_BUS = 1.6  # QPI, UPI and xGMI beside a PCIe port of their generation
_MOST_NVLINKS = 18  # of any GPU
# in a text that is no YAML: it was meant to be, where a table or the word for one is the value of this key
_MATRIX = re.compile(r"""^matrix:|^(?i:["']?matrix["']?\s*:\s*[|>"'])""", re.M)


@dataclass(frozen=True)
class Speeds:
    """How fast the parts of a machine are: bytes/s in each direction, and seconds.

    ``nvlink`` is one NVLink (NV2 has two), ``pcie`` a device's PCIe port, ``memory`` what a reduction reads and
    writes, ``host`` the memory that CPU devices share. ``copy_latency`` is the start of one device-to-device copy,
    ``kernel`` the launch of one reduction.
    """

    nvlink: float = 22.0 * GB
    pcie: float = 12.0 * GB
    memory: float = 700.0 * GB
    host: float = 8.0 * GB
    copy_latency: float = 10e-6
    kernel: float = 8e-6

    def of(self, kind: str) -> float:
        """Bytes/s of a link of this kind, in each direction."""
        if kind == HOST:
            return self.host
        return nvlinks(kind) * self.nvlink or self.pcie * _PCIE_SHARE[kind]


class _Gpu(NamedTuple):
    pattern: str
    nvlinks: int  # of one GPU, 0 for none: a table with more counts the way through an NVSwitch K-1 times
    nvlink: float  # GB/s of one link, as measured by peer-to-peer copies
    pcie: float  # GB/s of its port: 12, 24, 48 for generations 3, 4, 5 with 16 lanes
    memory: float  # GB/s


GPUS = (
    _Gpu(r"P100", 4, 18.4, 12, 500),
    _Gpu(r"V100", 6, 22.8, 12, 780),
    _Gpu(r"[AH]?A[18]00|A30\b", 12, 22.0, 24, 1400),
    _Gpu(r"H[12]0{1,2}\b|H[128]00|L20Y", 18, 21.0, 48, 2600),
    _Gpu(r"B[123]00", 18, 45.0, 48, 6000),
    _Gpu(r"RTX A\d000|30[6-9]0|A40\b", 4, 13.0, 24, 650),
    _Gpu(r"PRO [456]000|50[6-9]0", 0, 22.0, 48, 1400),
    _Gpu(r"40[6-9]0|\d000 Ada|L40S?|L20\b|L4\b|A10G?\b|A16\b|A2\b", 0, 22.0, 24, 650),
    _Gpu(r"2080|RTX [68]000|TITAN RTX|T4\b|M60|K80", 2, 22.0, 12, 500),
)


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
    :func:`from_table`, :func:`load`, :func:`from_yaml` or :func:`flat_host`.
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
        """The machine as a YAML file: :func:`from_yaml` gives an equal topology back.

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
    model = _words(given, "gpu") or gpu or table.gpu
    speeds = replace(guess_speeds(table.kinds, model), **_speeds(given))
    machine = _built(table, name, model, speeds, _overrides(given))
    return replace(machine, warnings=machine.warnings + _unknown_model(machine))


def _unknown_model(machine: Topology) -> Tuple[str, ...]:
    """The warning that a model is not known, if speeds had to be guessed for that."""
    guess = guessed(machine) if machine.gpu and not _known(machine.gpu) else ""
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


def guess_speeds(kinds: Matrix, gpu: str = "") -> Speeds:
    """Speeds of a GPU model; without one, or with one that is not known, of the model that usually has such links.

    NV1 alone between more than two GPUs is a P100, NV4 between pairs an RTX A6000 or 3090; the widest of a V100's links
    is NV1, NV2, NV3 or NV6, an H100's is wider than NV12; all others are an A100's.
    """
    known = _known(gpu) or _known(_likely_gpu(kinds))
    return Speeds(known.nvlink * GB, known.pcie * GB, known.memory * GB) if known else Speeds()


def guessed(topology: Topology) -> str:
    """Whose speeds the links have, in words, where they are :func:`guess_speeds`' without a known model.

    Empty where all speeds that count were given.
    """
    kinds = {kind for row in topology.kinds for kind in row} - {key for key, _ in topology.overrides}
    guess, likely = guess_speeds(topology.kinds), _likely_gpu(topology.kinds)
    by_nvlink = any(map(nvlinks, kinds)) and topology.speeds.nvlink == guess.nvlink
    by_pcie = bool(kinds & set(PCIE)) and topology.speeds.pcie == guess.pcie
    if not (by_nvlink or by_pcie):
        return ""
    return f"{likely} GPUs" if likely else f"GPUs with PCIe ports of {guess.pcie / GB:.0f} GB/s"


def _known(gpu: str) -> Optional[_Gpu]:
    return next((known for known in GPUS if re.search(known.pattern, gpu, re.I)), None)


def _likely_gpu(kinds: Matrix) -> str:
    counts = [sorted(nvlinks(kind) for kind in row if nvlinks(kind)) for row in kinds]
    most = max((max(row) for row in counts if row), default=0)
    if most == 1 and len(kinds) > 2:
        return "P100"
    if most == 4 and all(len(row) <= 1 for row in counts):
        return "RTX A6000"
    if most in (1, 2, 3, 6):
        return "V100"
    return "H100" if most > 12 else "A100" if most else ""


def _speeds(content: Mapping[str, Any]) -> Dict[str, float]:
    given = _part(content, "speeds")
    known = [f.name for f in fields(Speeds)]
    for key in given:
        if key not in known:
            raise TopologyError(f"speeds: {key!r} is unknown{presets.nearest(key, known)}")
    units = {"copy_latency": "seconds", "kernel": "seconds"}
    return {
        key: presets.number_of(units.get(key, "bytes/s"), f"speeds: {key}", value, TopologyError)
        for key, value in given.items()
    }


def _overrides(content: Mapping[str, Any]) -> Tuple[Tuple[str, float], ...]:
    links = _part(content, "links").items()
    return tuple(
        (str(key), presets.number_of("bytes/s", f"links: {key}", value, TopologyError)) for key, value in links
    )


def _part(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """``speeds`` or ``links`` of a file's content; empty where it is missing."""
    part = {} if content.get(name) is None else content[name]
    if not isinstance(part, Mapping):
        raise TopologyError(f"{name}: expected `key: value` lines, not {part!r}")
    return part


def _words(content: Mapping[str, Any], name: str) -> str:
    """``name`` or ``gpu`` of a file's content; empty where it is missing."""
    words = "" if content.get(name) is None else content[name]
    if not isinstance(words, str):
        raise TopologyError(f"{name}: expected a name, in quotes if it is a number, not {words!r}")
    return words


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
        known = _known(gpu)
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


# ---- reading ----------------------------------------------------------------------------------------


def from_yaml(text: str, name: str = "", calibration: Optional[Mapping[str, Any]] = None) -> Topology:
    """A machine from YAML: ``matrix`` (a table as nvidia-smi prints it), ``name``, ``gpu``, ``speeds``, ``links``.

    Raises:
        TopologyError: no YAML, an unknown key, or a table that cannot be read.
    """
    how = (  # a header begins further right than its rows, and may begin with a tab: YAML takes neither by itself
        "what `nvidia-smi topo -m` prints goes below `matrix: |2`, with two blanks before each line; or into a file of "
        "its own, without `matrix:`"
    )
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as cause:  # ValueError: a date that is none
        raise TopologyError(f"not readable as YAML ({' '.join(str(cause).split())}): {how}") from None
    if not isinstance(content, dict):
        raise TopologyError(f"expected `key: value` lines, not {type(content).__name__}: {how}")
    known = ["name", "description", "gpu", "matrix", "speeds", "links"]
    for key in content:
        if key not in known:
            raise TopologyError(f"{key!r} is unknown{presets.nearest(str(key), known)}")
    if not isinstance(content.get("matrix"), str):
        raise TopologyError(f"expected a `matrix: |2`: {how}")
    given = calibration or {}
    merged: Dict[str, Any] = {part: {**_part(content, part), **_part(given, part)} for part in ("speeds", "links")}
    merged["gpu"] = _words(given, "gpu") or _words(content, "gpu")
    return from_table(parse_nvidia_smi(content["matrix"]), _words(content, "name") or name, calibration=merged)


def from_text(text: str, name: str, calibration: Optional[Mapping[str, Any]] = None) -> Topology:
    """A machine from either kind of text: YAML with a ``matrix``, or nvidia-smi's output."""
    if _is_yaml(text):
        return from_yaml(text, name, calibration)
    return from_table(parse_nvidia_smi(text), name, calibration=calibration)


def _is_yaml(text: str) -> bool:
    """Whether a text is a mapping with a matrix, however that is spelled; or was meant to be one."""
    if "matrix" not in text.lower():
        return False
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return bool(_MATRIX.search(text))
    return isinstance(content, dict) and any(str(key).lower() == "matrix" for key in content)


def load(name_or_path: str, calibration: Optional[str] = None) -> Topology:
    """A preset of ``configs/machines`` by name, a YAML file, or a file with nvidia-smi's output.

    Args:
        name_or_path: ``"dgx-1v"``, ``"machine.yaml"``, ``"topo.txt"``.
        calibration: a YAML file that overrides speeds: ``gpu``, ``speeds``, ``links`` as in a machine's file.

    Raises:
        TopologyError: neither preset nor file, or a file that cannot be understood.
    """
    path = presets.find("machines", name_or_path, TopologyError)
    overrides = read_calibration(calibration)
    try:
        text = decoded(path.read_bytes())
    except OSError as cause:
        raise TopologyError(f"{path}: {cause.strerror}") from None
    try:
        return from_text(text, path.stem, overrides)
    except TopologyError as cause:
        raise TopologyError(f"{path}{f' with {calibration}' if calibration else ''}: {cause}") from None


def decoded(data: bytes) -> str:
    """Bytes of a pasted table as text: UTF-8 with anything odd replaced, or what PowerShell's ``>`` writes."""
    wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    return data.decode("utf-16" if wide else "utf-8-sig", errors="replace")


def read_calibration(path: Optional[str]) -> Optional[Mapping[str, Any]]:
    """A calibration file's content, or None.

    Raises:
        TopologyError: not YAML, a key other than ``gpu``, ``speeds``, ``links``, or a value that is none.
    """
    if path is None:
        return None
    if not presets.readable(Path(path)):
        raise TopologyError(f"calibration {path!r}: no such file")
    content = presets.read_yaml(Path(path), TopologyError)
    known = ["gpu", "speeds", "links"]
    for key in content:
        if key not in known:
            raise TopologyError(f"{path}: {key!r} is unknown{presets.nearest(str(key), known)}")
    try:
        return {"gpu": _words(content, "gpu"), "speeds": _speeds(content), "links": dict(_overrides(content))}
    except TopologyError as cause:
        raise TopologyError(f"{path}: {cause}") from None


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


# ---- what a byte occupies ---------------------------------------------------------------------------


Way = Tuple[Tuple[int, float], ...]  # (server, seconds a byte occupies it)


class Occupancy(NamedTuple):
    """``servers``: names; ``use[src, dst]``: what is on the way.

    The first server of each link is held by one copy from its start to its end; the others pass on one copy's bytes
    after another's.
    """

    servers: Tuple[str, ...]
    use: Dict[Tuple[int, int], Way]


@lru_cache(maxsize=256)
def occupancy(topology: Topology, ideal_links: bool = False, one_receive: bool = True) -> Occupancy:
    """What copies compete for.

    TensorFlow runs the outgoing copies of a device one after the other on its single device-to-device stream. With
    ``one_receive`` a device also takes in one copy at a time, as a copy waits for the receiver's stream. With
    ``ideal_links`` a link is busy only with its own copies, as under NCCL.
    """
    speed = dict(topology.shared)
    names: Dict[str, int] = {}
    use = {}
    for link in topology.links:
        sender, receiver = topology.devices[link.src], topology.devices[link.dst]
        passed = [(f"{sender} → {receiver}" if ideal_links else f"{sender} copy stream", 1 / link.bandwidth)]
        if one_receive and not ideal_links:
            passed.append((f"{receiver} receives", 1 / link.bandwidth))
        passed += [(name, 1 / speed[name]) for name in link.through]
        use[link.src, link.dst] = tuple((names.setdefault(name, len(names)), cost) for name, cost in passed)
    return Occupancy(tuple(names), use)
