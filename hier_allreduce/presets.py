"""The YAML and tables in ``configs/``: found by name in a checkout and in an installed wheel, or by path."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any, Iterable, List, Type

import yaml

from .errors import HierAllreduceError

_PACKAGE = Path(__file__).resolve().parent
# installed, configs/ lies inside the package; in a checkout beside it
_CONFIGS = next((d for d in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if d.is_dir()), _PACKAGE / "configs")
# by unit: the least, the most, and what to say to somebody who took GB/s for bytes/s, or µs for seconds
_NUMBERS = {
    "bytes/s": (1e6, 1e15, "bytes/s from 1e6 to 1e15 (12 GB/s are 12e9)"),
    "seconds": (1e-12, 1.0, "seconds above 0, up to 1 (10 µs are 10e-6)"),
    "cards": (1, 1e6, "a whole number of 1 or more"),
}


def names(kind: str) -> List[str]:
    """The presets of a kind: ``"clusters"``, ``"machines"``, ``"strategies"``, ``"trainers"``, ``"models"``, …"""
    return sorted(path.stem for path in (_CONFIGS / kind).glob("*.*") if path.suffix in (".yaml", ".tsv"))


def find(kind: str, name_or_path: str, error: Type[HierAllreduceError]) -> Path:
    """The file of a preset's name, or of a path.

    Raises:
        error: neither; the message has the nearest names.
    """
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise error(f"{name_or_path!r}: expected the name of one of the {kind}, or a file's path")
    if "\n" in str(name_or_path):
        first = str(name_or_path).strip().split("\n")[0]
        raise error(
            f"a text that begins with {first[:40]!r}: expected the name of one of the {kind}, or a file's path;"
            " write the text into a file"
        )
    for candidate in (Path(name_or_path), *(_CONFIGS / kind / f"{name_or_path}{end}" for end in (".yaml", ".tsv"))):
        if readable(candidate):
            return candidate
    raise error(f"{name_or_path!r} is neither a file nor one of the {kind}{nearest(name_or_path, names(kind))}")


def readable(path: Path) -> bool:
    """Whether there is something to read: a file, or a shell's pipe (``<(nvidia-smi topo -m)``)."""
    try:
        return path.exists() and not path.is_dir()
    except (OSError, ValueError):  # too long for a name, or with a zero in it
        return False


def refuse_unknown(keys: Iterable[Any], known: List[str], source: str, error: Type[HierAllreduceError]) -> None:
    """Refuse a file's keys if one of them is not among the known ones.

    Raises:
        error: the first such key, with the nearest; the message begins with ``source``, unless that is empty.
    """
    for key in keys:
        if key not in known:
            raise error(f"{source}{': ' * bool(source)}{key!r} is unknown{nearest(str(key), known)}")


def nearest(word: str, known: List[str]) -> str:
    """``; did you mean 'x'? there are …``, for the end of an error message."""
    close = difflib.get_close_matches(str(word).lower(), known, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{hint} there are {', '.join(known)}"


def number_of(unit: str, what: str, value: Any, error: Type[HierAllreduceError]) -> float:
    """A value of a file as a number of ``"bytes/s"``, ``"seconds"`` or ``"cards"``, of a size that a machine can have.

    Raises:
        error: it is none; the message begins with ``what``.
    """
    least, most, expected = _NUMBERS[unit]
    try:
        number = float(value)  # YAML reads 1e9 as text
    except (TypeError, ValueError, OverflowError):
        number = -1.0
    if isinstance(value, bool) or not least <= number <= most or (unit == "cards" and number != int(number)):
        raise error(f"{what}: expected {expected}, not {value!r}")
    return number


def read_yaml(path: Path, error: Type[HierAllreduceError]) -> Any:
    """The content of a YAML file.

    Raises:
        error: the file is no YAML, or no mapping.
    """
    try:
        content = yaml.safe_load(path.read_bytes())  # UTF-8, or UTF-16 as PowerShell's `>` writes
    except (yaml.YAMLError, ValueError) as cause:  # ValueError: a date that is none
        raise error(f"{path}: not readable as YAML: {' '.join(str(cause).split())}") from None
    if not isinstance(content, dict):
        raise error(f"{path}: expected `key: value` lines, not {type(content).__name__}")
    return content
