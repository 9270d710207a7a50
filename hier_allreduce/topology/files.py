"""Machines from files and texts: a preset, a YAML file, or what nvidia-smi prints.

::

    preset's name │ path ──load──► text ──from_text─┬─ YAML with `matrix:` ──► from_yaml ─┬─► Topology
                                                    └─ nvidia-smi's output ──────────────┘

A text with a key of these files, or in a file called ``.yaml``, was meant to be YAML even if ``matrix`` is misspelt:
read as nvidia-smi's output, all its other keys would be lost.
"""

from __future__ import annotations

import difflib
import re
from typing import Any, Mapping, Optional

from .. import presets
from ..errors import TopologyError
from . import machine_file
from .nvidia_smi import parse_nvidia_smi
from .pasted_text import has_row, without_escapes
from .topology import Topology, from_matrix

_FIELDS = {
    "name": presets.Field(presets.text_or_nothing),
    "description": presets.Field(),
    "matrix": presets.Field(),
    **machine_file.FIELDS,
}
# A text that is not valid YAML was meant to be YAML if the value of this key is a table or begins a block of text.
_MATRIX_KEY = re.compile(r"""^matrix:|^(?i:["']?matrix["']?\s*:\s*[|>"'])""", re.M)
_KNOWN_KEY = re.compile(rf"""^(?:[ \t{{,]*["']|{{\s*)?(?:{"|".join(_FIELDS)})["']?\s*:(?:\s|$)""", re.M)
_BLOCK_OF_TEXT = re.compile(r"^\w+[ \t]*:[ \t]*[|>][\d+-]*[ \t\r]*$", re.M)
# nvidia-smi's header is indented further than its rows, and may begin with a tab: plain `matrix: |` takes neither.
_HOW_TO_WRITE = (
    "what `nvidia-smi topo -m` prints goes below `matrix: |2`, with two blanks before each line; or into a file of "
    "its own, without `matrix:`"
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
    try:
        return _read(text, path.stem, overrides, called_yaml=path.suffix.lower() in (".yaml", ".yml"))
    except TopologyError as cause:
        raise TopologyError(f"{path}{f' with {calibration}' if calibration else ''}: {cause}") from None


def decoded(data: bytes) -> str:
    """Return bytes as text: UTF-8 with invalid bytes replaced, or UTF-16 as PowerShell's ``>`` writes."""
    is_utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    return data.decode("utf-16" if is_utf16 else "utf-8-sig", errors="replace")


def from_text(text: str, name: str, calibration: Optional[Mapping[str, Any]] = None) -> Topology:
    """Return the machine in either kind of text: YAML with a ``matrix``, or nvidia-smi's output.

    Raises:
        TopologyError: the text cannot be read as either.
    """
    return _read(text, name, calibration, called_yaml=False)


def _read(text: str, name: str, calibration: Optional[Mapping[str, Any]], called_yaml: bool) -> Topology:
    if _is_yaml(without_escapes(text), called_yaml):
        return from_yaml(text, name, calibration)
    return from_matrix(parse_nvidia_smi(text), name, calibration=calibration)


def _is_yaml(text: str, called_yaml: bool) -> bool:
    """Return whether a text is, or was meant to be, YAML. Nvidia-smi's output is not, whatever its file is called."""
    has_key = bool(_KNOWN_KEY.search(text))
    if not (called_yaml or has_key or "matrix" in text.lower() or _BLOCK_OF_TEXT.search(text)):
        return False  # without trying: PyYAML takes seconds for a long log
    try:
        content = presets.parse_yaml(text)
    except ValueError:
        is_table = has_row(text) and not _BLOCK_OF_TEXT.search(text)
        return bool(_MATRIX_KEY.search(text)) or ((called_yaml or has_key) and not is_table)
    if not isinstance(content, dict):
        return called_yaml and not has_row(text)
    return called_yaml or any(key in _FIELDS or _is_like_matrix(key) for key in content)


def _is_like_matrix(key: Any) -> bool:
    return bool(difflib.get_close_matches(str(key).lower(), ["matrix"]))


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
