"""Machines as people write them: a preset's name, YAML with a table in it, or what ``nvidia-smi topo -m`` prints."""

from __future__ import annotations

import re
from typing import Any, Dict, Mapping, Optional

import yaml

from . import presets
from .calibration import part_of, read_calibration, words_of
from .errors import TopologyError
from .smi import parse_nvidia_smi
from .topology import Topology, from_table

# in a text that is no YAML: it was meant to be, where a table or the word for one is the value of this key
_MATRIX = re.compile(r"""^matrix:|^(?i:["']?matrix["']?\s*:\s*[|>"'])""", re.M)


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
    presets.refuse_unknown(content, ["name", "description", "gpu", "matrix", "speeds", "links"], "", TopologyError)
    if not isinstance(content.get("matrix"), str):
        raise TopologyError(f"expected a `matrix: |2`: {how}")
    given = calibration or {}
    merged: Dict[str, Any] = {part: {**part_of(content, part), **part_of(given, part)} for part in ("speeds", "links")}
    merged["gpu"] = words_of(given, "gpu") or words_of(content, "gpu")
    return from_table(parse_nvidia_smi(content["matrix"]), words_of(content, "name") or name, calibration=merged)


def decoded(data: bytes) -> str:
    """Bytes of a pasted table as text: UTF-8 with anything odd replaced, or what PowerShell's ``>`` writes."""
    wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    return data.decode("utf-16" if wide else "utf-8-sig", errors="replace")
