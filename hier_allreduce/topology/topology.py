"""Topologies: the devices of a machine, the links between them, and what the links share.

::

    GPU0 ══NV2══ GPU3          a link: bytes/s in each direction, latency, kind
      │            │           what its bytes occupy: the sender's copy stream, the receiver's port,
    ──┴── switch ──┴── up      the switches' uplinks and the sockets' bus on the way

The kinds come from a table (:mod:`.table`), what they are worth from :mod:`.speeds` and :mod:`.calibration`. How text
becomes a table is in :mod:`.smi`, how a table becomes links in :mod:`.links`, what copies compete for in
:mod:`.occupancy`. All assumptions are listed in ``docs/cost-model.md``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from itertools import permutations
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import yaml

from .. import presets
from ..errors import TopologyError
from .calibration import overrides_of, part_of, read_calibration, speeds_of, words_of
from .gpus import GB, Speeds, guess_speeds, known_gpu, likely_gpu
from .links import Link, Links
from .matrix import HOST, PCIE, SELF, Kinds, LinkMatrix, nvlinks
from .nvidia_smi import parse_nvidia_smi, without_escapes

# in a text that is no YAML: it was meant to be, where a table or the word for one is the value of this key
_MATRIX = re.compile(r"""^matrix:|^(?i:["']?matrix["']?\s*:\s*[|>"'])""", re.M)


@dataclass(frozen=True)
class Topology:
    """A machine: K device labels, the K×K table of link kinds, the links, and the shared resources.

    ``links`` has one entry for each ordered pair. ``shared`` maps a resource's name to its bytes/s. ``cpus`` are CPU
    affinities as nvidia-smi writes them. ``warnings`` are what looked odd in the table. Build one with
    :func:`from_table`, :func:`flat_host`, or from a file with :func:`load`.
    """

    name: str
    devices: Tuple[str, ...]
    kinds: Kinds
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


def from_matrix(
    table: LinkMatrix, name: str, gpu: str = "", calibration: Optional[Mapping[str, Any]] = None
) -> Topology:
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


def _built(
    table: LinkMatrix, name: str, gpu: str, speeds: Speeds, overrides: Tuple[Tuple[str, float], ...]
) -> Topology:
    links = Links(table, gpu, speeds, dict(overrides))
    return Topology(
        name,
        table.labels,
        table.kinds,
        speeds,
        tuple(links.link(i, j) for i, j in permutations(range(len(table.labels)), 2)),
        tuple(links.shared.items()),
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
    return from_matrix(replace(table, warnings=warnings), topology.name, calibration=calibration)


def flat_host(devices: int, name: str = "host") -> Topology:
    """``devices`` CPU devices in one host's memory: all links alike."""
    labels = tuple(f"CPU{d}" for d in range(devices))
    kinds = tuple(tuple(SELF if i == j else HOST for j in range(devices)) for i in range(devices))
    return from_matrix(LinkMatrix(labels, kinds, ("",) * devices, "", ()), name)


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


def _table(topology: Topology, devices: Sequence[int]) -> LinkMatrix:
    kinds = tuple(tuple(topology.kinds[i][j] for j in devices) for i in devices)
    cpus = tuple(topology.cpus[d] if topology.cpus else "" for d in devices)
    return LinkMatrix(tuple(topology.devices[d] for d in devices), kinds, cpus, topology.gpu, topology.warnings)


# ---- files and texts -----------------------------------------------------------------------------------


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


def from_text(text: str, name: str, calibration: Optional[Mapping[str, Any]] = None) -> Topology:
    """A machine from either kind of text: YAML with a ``matrix``, or nvidia-smi's output.

    Raises:
        TopologyError: neither can be read out of it.
    """
    if _is_yaml(text):
        return from_yaml(text, name, calibration)
    return from_matrix(parse_nvidia_smi(text), name, calibration=calibration)


def _is_yaml(text: str) -> bool:
    """Whether a text is a mapping with a matrix, however that is spelled; or was meant to be one."""
    if "matrix" not in text.lower():
        return False
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return bool(_MATRIX.search(text))
    return isinstance(content, dict) and any(str(key).lower() == "matrix" for key in content)


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
        content = yaml.safe_load(without_escapes(text))
    except (yaml.YAMLError, ValueError) as cause:  # ValueError: a date that is none
        raise TopologyError(f"not readable as YAML ({' '.join(str(cause).split())}): {how}") from None
    if not isinstance(content, dict):
        raise TopologyError(f"expected `key: value` lines, not {type(content).__name__}: {how}")
    presets.refuse_unknown(content, ["name", "description", "gpu", "matrix", "speeds", "links"], "", TopologyError)
    if not isinstance(content.get("matrix"), str):
        raise TopologyError(f"expected a `matrix: |2`: {how}")
    given = calibration or {}
    merged: Dict[str, Any] = {part: {**part_of(content, part), **part_of(given, part)} for part in ("speeds", "links")}
    merged["gpu"] = words_of(given, "gpu") or words_of(content, "gpu")
    return from_matrix(parse_nvidia_smi(content["matrix"]), words_of(content, "name") or name, calibration=merged)


def decoded(data: bytes) -> str:
    """Bytes of a pasted table as text: UTF-8 with anything odd replaced, or what PowerShell's ``>`` writes."""
    wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    return data.decode("utf-16" if wide else "utf-8-sig", errors="replace")
