"""Machines from files and texts: a preset, a YAML file, or what nvidia-smi prints.

::

    preset's name │ path ──load─┬─ *.yaml, *.yml ──from_yaml─┬─► Topology
                                └─ any other ────from_text───┘
"""

from __future__ import annotations

import re
from typing import Any, Mapping, Optional

from .. import presets
from ..errors import TopologyError
from . import machine_file
from .nvidia_smi import parse_nvidia_smi, without_escapes
from .topology import Topology, from_matrix

_FIELDS = {
    "name": presets.Field(presets.text_or_nothing),
    "description": presets.Field(),
    "matrix": presets.Field(),
    **machine_file.FIELDS,
}
# nvidia-smi's header is indented further than its rows, and may begin with a tab: plain `matrix: |` takes neither.
_HOW_TO_WRITE = (
    "what `nvidia-smi topo -m` prints goes below `matrix: |2`, with two blanks before each line; or into a file of "
    "its own, without `matrix:`, whose name does not end in .yaml"
)


def load(name_or_path: str, calibration: Optional[str] = None) -> Topology:
    """Return a preset of ``configs/machines``, or the machine in a file: YAML or nvidia-smi's output.

    Args:
        name_or_path: ``"dgx-1v"``, ``"machine.yaml"``, ``"topo.txt"``.
        calibration: a YAML file that overrides speeds: ``gpu``, ``speeds``, ``links`` as in a machine's file.

    Raises:
        TopologyError: neither a preset nor a file, or a file that cannot be understood.
    """
    path = presets.find("machines", name_or_path, TopologyError)
    overrides = machine_file.read_calibration(calibration)
    try:
        text = decoded(path.read_bytes())
    except OSError as cause:
        raise TopologyError(f"{path}: {cause.strerror}") from None
    read = from_yaml if path.suffix.lower() in (".yaml", ".yml") else from_text
    try:
        return read(text, path.stem, overrides)
    except TopologyError as cause:
        raise TopologyError(f"{path}{f' with {calibration}' if calibration else ''}: {cause}") from None


def decoded(data: bytes) -> str:
    """Return bytes as text: UTF-8 with invalid bytes replaced, or UTF-16 as PowerShell's ``>`` writes."""
    is_utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    return data.decode("utf-16" if is_utf16 else "utf-8-sig", errors="replace")


def from_text(text: str, name: str, calibration: Optional[Mapping[str, Any]] = None) -> Topology:
    """Return the machine of which ``text`` has the output of ``nvidia-smi topo -m``.

    Raises:
        TopologyError: the table cannot be read; or the text is a machine's YAML, whose other keys would be lost.
    """
    if re.search(r"^matrix\s*:\s*\|", text, re.M):
        raise TopologyError("this is a machine's YAML, which must stand in a file whose name ends in .yaml")
    return from_matrix(parse_nvidia_smi(text), name, calibration=calibration)


def from_yaml(text: str, name: str = "", calibration: Optional[Mapping[str, Any]] = None) -> Topology:
    """Return a machine from YAML.

    The keys are ``matrix`` (as nvidia-smi prints it), ``name``, ``description``, ``gpu``, ``speeds`` and ``links``.

    Raises:
        TopologyError: not YAML, an unknown key, an invalid value, or a table that cannot be read.
    """
    try:
        document = presets.parse_yaml(without_escapes(text))
    except ValueError as cause:
        raise TopologyError(f"not readable as YAML ({cause}): {_HOW_TO_WRITE}") from None
    if not isinstance(document, dict):
        raise TopologyError(f"expected `key: value` lines, not {type(document).__name__}: {_HOW_TO_WRITE}")
    content = presets.check(document, _FIELDS, "", TopologyError)
    if not isinstance(content.get("matrix"), str):
        raise TopologyError(f"expected a `matrix: |2`: {_HOW_TO_WRITE}")
    overrides = presets.check(calibration or {}, machine_file.FIELDS, "", TopologyError)
    matrix = parse_nvidia_smi(content["matrix"])
    return from_matrix(matrix, content.get("name") or name, calibration=machine_file.merged(content, overrides))
