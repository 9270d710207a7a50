"""The files of ``configs/``: found by name or path, and their YAML checked key by key.

::

    "dgx-1v" or a path ──find──► Path ──read_yaml──► {key: value} ──check──► {key: checked value}
                                                                    │
                                               {key: reader}  ──────┘

A reader is a function ``(value, where) -> value`` that raises a :class:`.HierAllreduceError` beginning with ``where``.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Sequence, Union

import yaml

from .errors import HierAllreduceError

_PACKAGE = Path(__file__).resolve().parent
# An installed package holds configs/ inside it; a checkout holds it next to the package.
_CONFIGS = next(
    (d for d in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if d.is_dir()),
    _PACKAGE / "configs",
)

Reader = Callable[[Any, str], Any]


# ---- files ------------------------------------------------------------------------------------------


def names(kind: str) -> List[str]:
    """List the presets of a kind: ``"strategies"``, ``"trainers"``."""
    return sorted(
        path.stem for path in (_CONFIGS / kind).glob("*.*") if path.suffix in (".yaml", ".tsv")
    )


def find(kind: str, name_or_path: Union[str, os.PathLike], also: Sequence[str] = ()) -> Path:
    """Return the file of a preset's name, or of a path.

    Args:
        kind: as in :func:`names`.
        name_or_path: the name, or the path.
        also: further names that the caller knows, to be suggested too.

    Raises:
        HierAllreduceError: it is neither; the message lists the presets and suggests the nearest one.
    """
    if not isinstance(name_or_path, (str, os.PathLike)) or "\n" in str(name_or_path):
        text = repr(name_or_path)
        shown = text if len(text) < 80 else f"{text[:80]}…"
        raise HierAllreduceError(
            f"{shown}: expected the name of one of the {kind}, or a file's path"
        )
    for candidate in (
        Path(name_or_path),
        *(_CONFIGS / kind / f"{name_or_path}{end}" for end in (".yaml", ".tsv")),
    ):
        if _is_readable(candidate):
            return candidate
    hint = nearest(str(name_or_path), [*also, *names(kind)])
    raise HierAllreduceError(
        f"{os.fspath(name_or_path)!r} is neither a file nor one of the {kind}{hint}"
    )


def _is_readable(path: Path) -> bool:
    """Return whether a path can be read: a file, or a shell's pipe (``<(nvidia-smi topo -m)``)."""
    try:
        return path.exists() and not path.is_dir()
    except (OSError, ValueError):  # too long for a file name, or it contains a null character
        return False


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        HierAllreduceError: the file cannot be read.
    """
    try:
        return decoded(path.read_bytes())
    except OSError as cause:
        raise HierAllreduceError(f"{path}: {cause.strerror}") from None


def decoded(data: bytes) -> str:
    """Return bytes as text: UTF-8 with invalid bytes replaced, or UTF-16 as PowerShell's ``>`` writes."""
    is_utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    return data.decode("utf-16" if is_utf16 else "utf-8-sig", errors="replace")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'? there are …``, with all names that are as near; for the end of an error message."""
    choices, written = list(known), str(word).lower()
    close = difflib.get_close_matches(written, choices, max(1, len(choices)))
    likeness = [difflib.SequenceMatcher(None, choice, written).ratio() for choice in close]
    nearest_ones = [repr(choice) for choice, alike in zip(close, likeness) if alike == likeness[0]]
    hint = f"; did you mean {' or '.join(nearest_ones)}?" if close else ";"
    return f"{hint} there are {', '.join(choices)}"


# ---- YAML -------------------------------------------------------------------------------------------


def read_yaml(path: Path) -> Dict[str, Any]:
    """Return the content of a YAML file.

    Raises:
        HierAllreduceError: the file cannot be read, is not valid YAML, or no ``key: value`` lines.
    """
    text = read_text(path)
    try:
        return parse_yaml(text)
    except HierAllreduceError as cause:
        raise HierAllreduceError(f"{path}: {cause}") from None


class _Loader(yaml.SafeLoader):
    """Reads YAML without repeated keys, of which ``yaml.SafeLoader`` silently keeps the last one."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key {key!r} is there twice; keep one of them")
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Dict[str, Any]:
    """Return the ``key: value`` lines of a YAML text. No tag runs any code.

    Raises:
        HierAllreduceError: not valid YAML, or anything but such lines. The message is one line.
    """
    try:
        content = _Loader(text).get_single_data()
    except Exception as cause:  # PyYAML raises errors of many kinds
        raise HierAllreduceError(f"not readable as YAML: {' '.join(str(cause).split())}") from None
    if not isinstance(content, dict):
        raise HierAllreduceError(f"expected `key: value` lines, not {type(content).__name__}")
    return content


def check(values: Mapping[str, Any], readers: Mapping[str, Reader], where: str) -> Dict[str, Any]:
    """Return the values of a file, each as its reader returns it.

    Raises:
        HierAllreduceError: a key is unknown (the message suggests the nearest one), or a value is invalid. The message
            begins with ``where``, unless that is empty.
    """
    prefix = f"{where}: " if where else ""
    for key in values:
        if key not in readers:
            raise HierAllreduceError(f"{prefix}{key!r} is unknown{nearest(str(key), readers)}")
    return {key: readers[key](value, f"{prefix}{key}") for key, value in values.items()}


# ---- readers ----------------------------------------------------------------------------------------


def anything(value: Any, where: str) -> Any:
    """Return the value as it is: the caller checks it."""
    return value


def bytes_per_second(value: Any, where: str) -> float:
    """Return a bandwidth. The limits exclude GB/s written as bytes/s."""
    return _number(
        value, 1e6, 1e15, f"{where}: expected bytes/s from 1e6 to 1e15 (12 GB/s are 12e9)"
    )


def seconds(value: Any, where: str) -> float:
    """Return a duration. The limits exclude µs written as seconds."""
    return _number(value, 0.0, 1.0, f"{where}: expected seconds from 0 to 1 (10 µs are 10e-6)")


def _number(value: Any, least: float, most: float, message: str) -> float:
    try:
        number = float(value)  # YAML reads 1e9 as text
    except (TypeError, ValueError, OverflowError):
        number = -1.0
    if isinstance(value, bool) or not least <= number <= most:
        raise HierAllreduceError(f"{message}, not {value!r}")
    return number


def text_or_nothing(value: Any, where: str) -> str:
    """Return a text; without a value it is empty."""
    if not isinstance(value, (str, type(None))):
        raise HierAllreduceError(
            f"{where}: expected a name, in quotes if it is a number, not {value!r}"
        )
    return value or ""


def texts(value: Any, where: str) -> List[str]:
    """Return a list of texts."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise HierAllreduceError(f"{where}: expected a list of names, not {value!r}")
    return value


def mapping(readers: Mapping[str, Reader]) -> Reader:
    """Return the reader of a nested mapping with these keys; without a value it is empty."""
    return lambda value, where: check(_lines(value, where), readers, where)


def mapping_of(reader: Reader) -> Reader:
    """Return the reader of a nested mapping from any key to a value of one kind."""
    return lambda value, where: {
        str(k): reader(v, f"{where}: {k}") for k, v in _lines(value, where).items()
    }


def _lines(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise HierAllreduceError(f"{where}: expected `key: value` lines, not {value!r}")
    return value
