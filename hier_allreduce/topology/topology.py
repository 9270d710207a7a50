"""Topologies: the devices of a machine, the links between them, and what the links share.

::

    preset's name │ path ──load─┬─ *.yaml, *.yml ──from_yaml─┬─► Topology
                                └─ any other ────from_text───┘

    GPU0 ══NV2══ GPU3          a link: bytes/s in each direction, latency, kind
      │            │           what its bytes occupy: the sender's copy stream, the receiver's port,
    ──┴── switch ──┴── up      the switches' uplinks and the sockets' bus on the way

The kinds of links come from a matrix (:mod:`.matrix`), their speeds from :mod:`.gpus` and :mod:`.machine_file`.
:mod:`.links` turns both into links, :mod:`.contention` into the resources that copies compete for.
``docs/cost-model.md`` lists all assumptions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from itertools import permutations
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import yaml

from .. import presets
from ..errors import HierAllreduceError
from . import machine_file
from .gpus import GB, Speeds, guess_speeds, known_gpu, likely_gpu, staged_kinds
from .links import Link, Links
from .machine_file import FIELDS, Measured, SharedWay
from .matrix import HOST, PCIE, SELF, Kinds, LinkMatrix, nvlinks
from .nvidia_smi import parse_nvidia_smi, without_escapes

_YAML_FIELDS = {
    "name": presets.Field(presets.text_or_nothing),
    "matrix": presets.Field(),
    **FIELDS,
}
# nvidia-smi's header is indented further than its rows, and may begin with a tab: plain `matrix: |` takes neither.
_HOW_TO_WRITE = (
    "what `nvidia-smi topo -m` prints goes below `matrix: |2`, with two blanks before each line; or into a file of "
    "its own, without `matrix:`, whose name does not end in .yaml"
)


@dataclass(frozen=True)
class Topology:
    """A machine: K device labels, the K×K kinds of links, the links, and the shared resources.

    Read one with :meth:`load`, or build it with :func:`from_matrix` or :func:`flat_host`.

    Attributes:
        links: one for each ordered pair of devices.
        shared: ``(resource, bytes/s)`` for each resource that several links share.
        cpus: CPU affinities as nvidia-smi writes them; empty if none are known.
        gpu: the model; empty if it is not known.
        warnings: what looks wrong in the matrix.
        overrides: ``(kind or pair of devices, bytes/s)``, as a file gives them.
        ways: what copies share, as a file gives it; None if the matrix decides.
        measured: when the speeds were measured; None for a table's, which may have overrides.
        staged: kinds of links, and pairs (``GPU0-GPU3``), without peer access: copies go through the host's memory.
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
    ways: Optional[Tuple[SharedWay, ...]] = None
    measured: Optional[Measured] = None
    staged: Tuple[str, ...] = ()

    @staticmethod
    def load(name_or_path: str) -> Topology:
        """Return a preset of ``configs/machines``, or the machine in a file: YAML or nvidia-smi's output.

        Args:
            name_or_path: ``"dgx-1v"``, ``"machine.yaml"``, ``"topo.txt"``.

        Raises:
            HierAllreduceError: neither a preset nor a file, or a file that cannot be understood.
        """
        path = presets.find("machines", name_or_path)
        try:
            text = decoded(path.read_bytes())
        except OSError as cause:
            raise HierAllreduceError(f"{path}: {cause.strerror}") from None
        read = from_yaml if path.suffix.lower() in (".yaml", ".yml") else from_text
        try:
            return read(text, path.stem)
        except HierAllreduceError as cause:
            raise HierAllreduceError(f"{path}: {cause}") from None

    def __len__(self) -> int:
        return len(self.devices)

    def __hash__(self) -> int:
        # what is equal here differs in little else; all links would be hashed at each look into a cache
        return hash((self.name, self.devices, self.kinds))

    def link(self, src: int, dst: int) -> Link:
        """Return the link from ``src`` to ``dst``."""
        return self.links[src * (len(self) - 1) + dst - (dst > src)]

    def table(self) -> str:
        """Return the matrix of kinds as nvidia-smi prints it."""
        header: List[str] = ["", *self.devices]
        rows = [[device, *kinds] for device, kinds in zip(self.devices, self.kinds)]
        width = max(len(cell) for row in [header, *rows] for cell in row) + 2
        if self.cpus:
            header.append("CPU Affinity")
            rows = [[*row, cpu] for row, cpu in zip(rows, self.cpus)]
        lines = ["".join(cell.ljust(width) for cell in row) for row in [header, *rows]]
        return "\n".join(line.rstrip() for line in lines) + "\n"

    def to_yaml(self) -> str:
        """Return the machine as a YAML file, from which :func:`from_yaml` makes an equal topology.

        Only ``warnings`` may differ: the written matrix no longer has what was wrong in the original text.
        """
        speeds = {f.name: getattr(self.speeds, f.name) for f in fields(Speeds)}
        document: Dict[str, Any] = {"name": self.name, "gpu": self.gpu, "speeds": speeds}
        if self.overrides:
            document["links"] = dict(self.overrides)
        if self.staged != staged_kinds(self.gpu):
            document["staged"] = list(self.staged)
        document.update(machine_file.to_content(self.ways, self.measured))
        text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
        return text + "matrix: |2\n" + "".join(f"  {line}\n" for line in self.table().splitlines())


load = Topology.load


def decoded(data: bytes) -> str:
    """Return bytes as text: UTF-8 with invalid bytes replaced, or UTF-16 as PowerShell's ``>`` writes."""
    is_utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    return data.decode("utf-16" if is_utf16 else "utf-8-sig", errors="replace")


def from_text(text: str, name: str) -> Topology:
    """Return the machine of which ``text`` has the output of ``nvidia-smi topo -m``.

    Raises:
        HierAllreduceError: the table cannot be read; or the text is a machine's YAML, whose other keys would be lost.
    """
    if re.search(r"^matrix\s*:\s*\|", text, re.M):
        raise HierAllreduceError("this is a machine's YAML, which must stand in a file whose name ends in .yaml")
    return from_matrix(parse_nvidia_smi(text), name)


def from_yaml(text: str, name: str = "") -> Topology:
    """Return a machine from YAML.

    The keys are ``matrix`` (as nvidia-smi prints it), ``name``, and those of :mod:`.machine_file`.

    Raises:
        HierAllreduceError: not YAML, an unknown key, an invalid value, or a table that cannot be read.
    """
    try:
        document = presets.parse_yaml(without_escapes(text))
    except ValueError as cause:
        raise HierAllreduceError(f"not readable as YAML ({cause}): {_HOW_TO_WRITE}") from None
    if not isinstance(document, dict):
        raise HierAllreduceError(f"expected `key: value` lines, not {type(document).__name__}: {_HOW_TO_WRITE}")
    content = presets.check(document, _YAML_FIELDS, "")
    if not isinstance(content.get("matrix"), str):
        raise HierAllreduceError(f"expected a `matrix: |2`: {_HOW_TO_WRITE}")
    matrix = parse_nvidia_smi(content["matrix"])
    given = {key: value for key, value in content.items() if key in FIELDS}
    return from_matrix(matrix, content.get("name") or name, given)


def from_matrix(matrix: LinkMatrix, name: str, given: Optional[Mapping[str, Any]] = None) -> Topology:
    """Return the topology of a matrix of link kinds.

    Args:
        matrix: from :func:`.nvidia_smi.parse_nvidia_smi`.
        name: what reports call the machine.
        given: checked values of :data:`.machine_file.FIELDS`. Without ``gpu`` it is the matrix's; without a model in
            either, speeds are guessed from the links.

    Raises:
        HierAllreduceError: ``given`` has a link that the machine cannot have.
    """
    given = given or {}
    model = given.get("gpu") or matrix.gpu
    speeds = replace(guess_speeds(matrix.kinds, model), **given.get("speeds", {}))
    ways = machine_file.shared_ways(given)
    staged = given.get("staged", staged_kinds(model) if matrix.staged is None else matrix.staged)
    matrix = replace(matrix, staged=tuple(staged))
    machine = _build(matrix, name, model, speeds, tuple(given.get("links", {}).items()), ways)
    machine = replace(machine, measured=machine_file.measured(given))
    return replace(machine, warnings=machine.warnings + _unknown_model(machine))


def _unknown_model(machine: Topology) -> Tuple[str, ...]:
    """Return the warning that the model is unknown, if speeds had to be guessed because of that."""
    guess = guessed(machine) if machine.gpu else ""
    if not guess:
        return ()
    return (f"the model {machine.gpu!r} is not known; speeds as of {guess} (guessed from the links)",)


def _build(
    matrix: LinkMatrix,
    name: str,
    gpu: str,
    speeds: Speeds,
    overrides: Tuple[Tuple[str, float], ...],
    ways: Optional[Tuple[SharedWay, ...]],
) -> Topology:
    links = Links(matrix, gpu, speeds, dict(overrides), ways, matrix.staged or ())
    return Topology(
        name,
        matrix.labels,
        matrix.kinds,
        speeds,
        tuple(links.link(src, dst) for src, dst in permutations(range(len(matrix.labels)), 2)),
        tuple(links.shared.items()),
        matrix.cpus if any(matrix.cpus) else (),
        gpu,
        matrix.warnings,
        overrides,
        ways,
        staged=matrix.staged or (),
    )


def guessed(topology: Topology) -> str:
    """Return whose speeds were guessed, such as ``V100 GPUs``; empty if all speeds that matter were given."""
    if topology.measured or known_gpu(topology.gpu):
        return ""
    kinds = {kind for row in topology.kinds for kind in row} - {key for key, _ in topology.overrides}
    guess, model = guess_speeds(topology.kinds), likely_gpu(topology.kinds)
    nvlink_guessed = any(map(nvlinks, kinds)) and topology.speeds.nvlink == guess.nvlink
    pcie_guessed = bool(kinds & set(PCIE)) and topology.speeds.pcie == guess.pcie
    if not (nvlink_guessed or pcie_guessed):
        return ""
    return f"{model} GPUs" if model else f"GPUs with PCIe ports of {guess.pcie / GB:.0f} GB/s"


def calibrated(topology: Topology, measured: Mapping[str, Any]) -> Topology:
    """Return the machine with the speeds of a calibration instead of its own.

    Args:
        topology: the machine.
        measured: keys of a machine's file, as in :mod:`.machine_file`.

    Raises:
        HierAllreduceError: an unknown key, an invalid value, or as in :func:`from_matrix`.
    """
    matrix = _matrix(topology, range(len(topology)))
    if topology.staged == staged_kinds(topology.gpu):
        matrix = replace(matrix, staged=None)
    # The calibration may name the model that was unknown so far.
    warnings = tuple(warning for warning in matrix.warnings if warning not in _unknown_model(topology))
    return from_matrix(replace(matrix, warnings=warnings), topology.name, presets.check(measured, FIELDS, ""))


def flat_host(devices: int, name: str = "host") -> Topology:
    """Return ``devices`` CPU devices in one host's memory: all links alike."""
    labels = tuple(f"CPU{d}" for d in range(devices))
    kinds = tuple(tuple(SELF if i == j else HOST for j in range(devices)) for i in range(devices))
    return from_matrix(LinkMatrix(labels, kinds, ("",) * devices, "", ()), name)


def subset(topology: Topology, devices: Sequence[int]) -> Topology:
    """Return the part of a machine that a job with only these devices sees, in this order.

    Its links and shared resources are built anew from the part of the matrix, with the overrides of its own links.

    Raises:
        HierAllreduceError: a device that the machine does not have, or a device given twice.
    """
    unknown = [str(d) for d in devices if not 0 <= d < len(topology)]
    repeated = [f"{d} twice" for d in dict.fromkeys(devices) if list(devices).count(d) > 1]
    if unknown or repeated or not devices:
        faults = ", ".join(unknown + repeated) or "none"
        raise HierAllreduceError(
            f"{topology.name} has devices 0 to {len(topology) - 1}, each once; cannot take {faults}"
        )
    matrix = _matrix(topology, devices)
    kinds = {kind for row in matrix.kinds for kind in row}
    pairs = {f"{a}-{b}" for a, b in permutations(matrix.labels, 2)}
    overrides = tuple((key, value) for key, value in topology.overrides if key in kinds | pairs)
    part = _build(matrix, topology.name, topology.gpu, topology.speeds, overrides, _ways_between(topology, pairs))
    return replace(part, measured=topology.measured)


def _ways_between(topology: Topology, pairs: Set[str]) -> Optional[Tuple[SharedWay, ...]]:
    """Return what the copies of these pairs (``GPU0-GPU3``) share; None if the matrix decides."""
    if topology.ways is None:
        return None
    kept = [way._replace(copies=tuple(pair for pair in way.copies if "-".join(pair) in pairs)) for way in topology.ways]
    return tuple(way for way in kept if way.copies)


def _matrix(topology: Topology, devices: Sequence[int]) -> LinkMatrix:
    kinds = tuple(tuple(topology.kinds[i][j] for j in devices) for i in devices)
    cpus = tuple(topology.cpus[d] if topology.cpus else "" for d in devices)
    labels = tuple(topology.devices[d] for d in devices)
    keys = {*PCIE, *(kind for row in kinds for kind in row), *("-".join(pair) for pair in permutations(labels, 2))}
    staged = tuple(key for key in topology.staged if key in keys)
    return LinkMatrix(labels, kinds, cpus, topology.gpu, topology.warnings, staged)
