"""A machine: its devices, the kinds of links between them, and their speeds. Read from a preset, a file, or a paste.

::

    preset's name │ path ──load─┬─ *.yaml, *.yml, a key `matrix` ──from_yaml─┬─► Topology ──links_of──► Links
                                └─ any other ────────────────────from_text───┘

All keys of a machine's YAML file but ``matrix`` are optional::

    name: workstation
    gpu: RTX 3090                            # the model whose speeds to begin with
    speeds: {pcie: 21e9, dispatch: 3e-6}     # keys of Speeds: bytes/s, seconds
    links: {SYS: 8.9e9, GPU2-GPU3: 39e9}     # bytes/s of a kind of link, or of one pair, in each direction
    starts: {SYS: 14e-6}                     # seconds to start a copy, by the same keys
    staged: [PHB, GPU0-GPU3]                 # no peer access: kinds of links, or pairs; [] if all have it
    shared: {GPU0+GPU1: 12e9}                # bytes/s that all copies out of (or into) these GPUs together reach
    matrix: |2
            GPU0  GPU1
      GPU0   X    PHB
      GPU1  PHB    X
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import permutations
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import yaml

from .. import configs
from ..errors import HierAllreduceError
from .gpus import GB, GEFORCE, Speeds, guess_speeds, known_gpu, likely_gpu
from .matrix import PCIE, SELF, Kinds, LinkMatrix, read_matrix, without_escapes

ByKey = Tuple[Tuple[str, float], ...]  # (kind of link or pair of devices, number)

_SECONDS = (
    "copy_latency",
    "staged_latency",
    "kernel",
    "dispatch",
)  # the other fields of Speeds are in bytes/s
_FIELDS: Dict[str, configs.Reader] = {
    "name": configs.text_or_nothing,
    "gpu": configs.text_or_nothing,
    "speeds": configs.mapping(
        {
            f.name: configs.seconds if f.name in _SECONDS else configs.bytes_per_second
            for f in fields(Speeds)
        }
    ),
    "links": configs.mapping_of(configs.bytes_per_second),
    "starts": configs.mapping_of(configs.seconds),
    "staged": configs.texts,
    "shared": configs.mapping_of(configs.bytes_per_second),
    "matrix": configs.anything,
}
# nvidia-smi's header is indented further than its rows, and may begin with a tab: plain `matrix: |` takes neither.
_HOW_TO_WRITE = (
    "the output of `nvidia-smi topo -m` goes below `matrix: |2`, with two blanks before each line; or into a file "
    "without `matrix:`, whose name does not end in .yaml"
)


@dataclass(frozen=True)
class Topology:
    """A machine: K devices, the K×K kinds of links between them, and their speeds.

    ::

        Topology.load("dgx-1v").subset([0, 1, 4, 5]).kinds

    Attributes:
        name: for reports.
        devices: K labels, such as ``GPU0``.
        kinds: K×K kinds of links, as nvidia-smi names them.
        speeds: bytes/s and seconds.
        gpu: the model; empty if it is not known.
        cpus: K CPU affinities; empty if none are known.
        links: bytes/s of some kinds of links or pairs of devices, instead of those of ``speeds``.
        starts: seconds to start a copy over some kinds of links or between pairs, instead of those of ``speeds``.
        staged: kinds of links and pairs of devices without peer access: copies go through the host's memory.
        shared: bytes/s that copies out of (or into) a group such as ``GPU0+GPU1``, or the ``host``, share.
        warnings: contradictions in the text, and guesses.
    """

    name: str
    devices: Tuple[str, ...]
    kinds: Kinds
    speeds: Speeds = field(default_factory=Speeds)
    gpu: str = ""
    cpus: Tuple[str, ...] = ()
    links: ByKey = ()
    starts: ByKey = ()
    staged: Tuple[str, ...] = ()
    shared: ByKey = ()
    warnings: Tuple[str, ...] = ()

    @staticmethod
    def load(name_or_path: str) -> Topology:
        """Return a preset of ``configs/machines``, such as ``"dgx-1v"``, or the machine in a file.

        The file has YAML or the output of nvidia-smi: ``"machine.yaml"``, ``"topo.txt"``.

        Raises:
            HierAllreduceError: neither a preset nor a file, or a file that cannot be understood.
        """
        path = configs.find("machines", name_or_path)
        read = from_yaml if path.suffix.lower() in (".yaml", ".yml") else from_text
        try:
            return read(configs.read_text(path), path.stem)
        except HierAllreduceError as cause:
            raise HierAllreduceError(f"{path}: {cause}") from None

    def __len__(self) -> int:
        return len(self.devices)

    def subset(self, devices: Sequence[int]) -> Topology:
        """Return the machine with only these devices, in this order.

        Raises:
            HierAllreduceError: a device that the machine does not have, or one that is listed twice.
        """
        unknown = [str(d) for d in devices if not 0 <= d < len(self)]
        repeated = [f"{d} twice" for d in dict.fromkeys(devices) if list(devices).count(d) > 1]
        if unknown or repeated or not devices:
            faults = ", ".join(unknown + repeated) or "none"
            raise HierAllreduceError(
                f"{self.name} has devices 0 to {len(self) - 1}, each once; cannot take {faults}"
            )
        labels = tuple(self.devices[d] for d in devices)
        kinds = tuple(tuple(self.kinds[i][j] for j in devices) for i in devices)
        kept = _keys(labels, kinds)
        return replace(
            self,
            devices=labels,
            kinds=kinds,
            cpus=tuple(self.cpus[d] for d in devices) if self.cpus else (),
            links=tuple((key, value) for key, value in self.links if key in kept),
            starts=tuple((key, value) for key, value in self.starts if key in kept),
            staged=tuple(key for key in self.staged if key in kept),
            shared=tuple(
                (group, value)
                for group, value in self.shared
                if set(group.split("+")) & {*labels, "host"}
            ),
        )

    def is_staged(self, src: int, dst: int) -> bool:
        """Return whether copies between two devices go through the host's memory, for want of peer access."""
        return any(key in self.staged for key in self._keys_of(src, dst))

    def bandwidth(self, src: int, dst: int) -> float:
        """Return the bytes/s of one copy from device ``src`` to device ``dst``."""
        listed = self._listed(self.links, src, dst)
        return listed or self.speeds.of(self.kinds[src][dst], self.is_staged(src, dst))

    def latency(self, src: int, dst: int) -> float:
        """Return the seconds to start a copy from device ``src`` to device ``dst``."""
        usual = self.speeds.copy_latency + self.is_staged(src, dst) * self.speeds.staged_latency
        return self._listed(self.starts, src, dst) or usual

    def _keys_of(self, src: int, dst: int) -> Tuple[str, str, str]:
        a, b = self.devices[src], self.devices[dst]
        return f"{a}-{b}", f"{b}-{a}", self.kinds[src][dst]

    def _listed(self, numbers: ByKey, src: int, dst: int) -> float:
        """Return the number of a pair, else of the reverse pair, else of their kind of link; 0 if none is listed."""
        by_key = dict(numbers)
        return next((by_key[key] for key in self._keys_of(src, dst) if key in by_key), 0.0)

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
        """Return the text of a YAML file with this machine, warnings apart."""
        document: Dict[str, Any] = {"name": self.name, "gpu": self.gpu}
        document["speeds"] = {
            name: value for name, value in asdict(self.speeds).items() if value is not None
        }
        document.update(
            {
                key: dict(getattr(self, key))
                for key in ("links", "starts", "shared")
                if getattr(self, key)
            }
        )
        document["staged"] = list(self.staged)
        text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
        return text + "matrix: |2\n" + "".join(f"  {line}\n" for line in self.table().splitlines())


def from_text(text: str, name: str) -> Topology:
    """Return the machine in the output of ``nvidia-smi topo -m``; or in YAML, known by its key ``matrix``.

    Raises:
        HierAllreduceError: the table cannot be read; or as :func:`from_yaml`.
    """
    is_yaml = re.search(r"^matrix\s*:", text, re.M)
    return from_yaml(text, name) if is_yaml else from_matrix(read_matrix(text), name)


def from_yaml(text: str, name: str = "") -> Topology:
    """Return a machine from YAML, with the keys at the top of this file.

    Raises:
        HierAllreduceError: not YAML, an unknown key, an invalid value, or a table that cannot be read.
    """
    try:
        values = configs.parse_yaml(without_escapes(text))
    except HierAllreduceError as cause:
        raise HierAllreduceError(f"{cause}: {_HOW_TO_WRITE}") from None
    content = configs.check(values, _FIELDS, "")
    if not isinstance(content.get("matrix"), str):
        raise HierAllreduceError(f"expected a `matrix: |2`: {_HOW_TO_WRITE}")
    return from_matrix(read_matrix(content["matrix"]), content.get("name") or name, content)


def from_matrix(
    matrix: LinkMatrix, name: str, content: Optional[Mapping[str, Any]] = None
) -> Topology:
    """Return the machine of a matrix of link kinds, and of the checked values of a file.

    Without ``gpu`` in the file the matrix's model counts; without either, speeds are guessed from the links.

    Raises:
        HierAllreduceError: ``content`` names a link that the machine cannot have.
    """
    content = content or {}
    _check_names(content, matrix.labels, _keys(matrix.labels, matrix.kinds))
    one_model = (
        len({known_gpu(model) or model for model in matrix.models}) == 1
    )  # L40 and L40S are one model here
    gpu = content.get("gpu") or (matrix.models[0] if one_model else "")
    speeds = replace(guess_speeds(matrix.kinds, gpu), **content.get("speeds", {}))
    machine = Topology(
        name, matrix.labels, matrix.kinds, speeds, gpu, matrix.cpus if any(matrix.cpus) else ()
    )
    by_model = PCIE if GEFORCE.search(gpu or " ".join(matrix.models)) else ()
    staged = content.get("staged", by_model if matrix.staged is None else matrix.staged)
    warnings = list(matrix.warnings)
    any_pcie = any(kind in PCIE for row in matrix.kinds for kind in row)
    if (
        any_pcie
        and not (gpu or matrix.models)
        and matrix.staged is None
        and "staged" not in content
    ):
        warnings.insert(0, "peer access assumed; GeForce cards have none: add `nvidia-smi -L`")
    if not known_gpu(gpu) and not {"nvlink", "pcie"} & set(content.get("speeds", ())):
        reason = f"the model {gpu!r} is not known" if gpu else "no model of GPU is named"
        if len(matrix.models) > 1:
            reason = f"the GPUs are of several models ({', '.join(matrix.models)})"
        likely = likely_gpu(matrix.kinds) or f"GPUs with PCIe ports of {speeds.pcie / GB:.0f} GB/s"
        warnings.append(f"{reason}; speeds as of {likely} (guessed from the links)")
    links, starts, shared = (
        tuple(content.get(key, {}).items()) for key in ("links", "starts", "shared")
    )
    return replace(
        machine,
        staged=tuple(staged),
        warnings=tuple(warnings),
        links=links,
        starts=starts,
        shared=shared,
    )


def _keys(labels: Sequence[str], kinds: Kinds) -> Set[str]:
    """Return the names of a machine's links: kinds, also those of PCIe that it lacks, and pairs."""
    return {
        *PCIE,
        *(kind for row in kinds for kind in row),
        *("-".join(pair) for pair in permutations(labels, 2)),
    }


def _check_names(content: Mapping[str, Any], labels: Sequence[str], keys: Set[str]) -> None:
    for where in ("links", "starts", "staged"):
        for name in content.get(where, ()):
            if name == SELF or (name not in keys and not re.match(r"NV[1-9]\d*$", name)):
                kinds = ", ".join(sorted(key for key in keys if "-" not in key and key != SELF))
                raise HierAllreduceError(
                    f"{where}: {name!r} is neither a kind of link ({kinds}) nor a pair of devices such as "
                    f"'{'-'.join(labels[:2])}'"
                )
    for group in content.get("shared", ()):
        if group != "host" and not set(group.split("+")) <= set(labels):
            raise HierAllreduceError(
                f"shared: {group!r} is neither `host` nor devices of this machine such as '{'+'.join(labels[:2])}'"
            )
