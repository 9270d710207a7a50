"""The files of ``configs/``, found by name or path, and values as people write them.

::

    "tensorpack" or a path ──find──► Path ──read_yaml──► {key: value}
"""

from __future__ import annotations

import difflib
import operator
import os
from pathlib import Path
from typing import Any, Dict, Iterable, List, Sequence, Union

import numpy as np
import yaml

from .errors import HierAllreduceError

_PACKAGE = Path(__file__).resolve().parent
# An installed package holds configs/ inside it; a checkout holds it next to the package.
_CONFIGS = next(
    (d for d in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if d.is_dir()),
    _PACKAGE / "configs",
)


# ---- files ---------------------------------------------------------------------------------------


def names(kind: str) -> List[str]:
    """List the presets of a kind: ``"strategies"``, ``"trainers"``."""
    return sorted(path.stem for path in (_CONFIGS / kind).glob("*.yaml"))


def find(kind: str, name_or_path: Union[str, os.PathLike], also: Sequence[str] = ()) -> Path:
    """Return the file of a preset's name, or of a path.

    Args:
        kind: as in :func:`names`.
        name_or_path: the name, or the path.
        also: further names that the caller knows, to be suggested too.

    Raises:
        HierAllreduceError: it is neither; the message lists the presets and suggests the nearest
            one.
    """
    if not isinstance(name_or_path, (str, os.PathLike)) or "\n" in str(name_or_path):
        text = repr(name_or_path)
        shown = text if len(text) < 80 else f"{text[:80]}…"
        raise HierAllreduceError(
            f"{shown}: expected the name of one of the {kind}, or a file's path"
        )
    preset = _CONFIGS / kind / f"{name_or_path}.yaml"
    for path in (Path(name_or_path), preset):
        if _is_readable(path):
            return path
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
    """Return bytes as text: UTF-8 with invalid bytes replaced, or UTF-16, as PowerShell writes."""
    is_utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    return data.decode("utf-16" if is_utf16 else "utf-8-sig", errors="replace")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'? there are …`` with the nearest names: the end of an error."""
    choices, written = list(known), str(word).lower()
    close = difflib.get_close_matches(written, choices, max(1, len(choices)))
    likeness = [difflib.SequenceMatcher(None, choice, written).ratio() for choice in close]
    nearest_ones = [repr(choice) for choice, alike in zip(close, likeness) if alike == likeness[0]]
    hint = f"; did you mean {' or '.join(nearest_ones)}?" if close else ";"
    return f"{hint} there are {', '.join(choices)}"


# ---- YAML ----------------------------------------------------------------------------------------


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
    """Reads YAML without aliases, and with each key once.

    A few aliases of aliases are a text of gigabytes as soon as an error shows them. Of a repeated
    key ``yaml.SafeLoader`` keeps the last one.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            name = self.peek_event().anchor
            raise yaml.YAMLError(f"*{name} is an alias, which is not read; write its value there")
        return super().compose_node(parent, index)

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
    except yaml.MarkedYAMLError as cause:
        mark = cause.problem_mark or cause.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise HierAllreduceError(f"not readable as YAML{line}: {cause.problem}") from None
    except Exception as cause:  # PyYAML raises errors of many kinds
        raise HierAllreduceError(f"not readable as YAML: {' '.join(str(cause).split())}") from None
    if content is None:
        raise HierAllreduceError("it is empty: expected `key: value` lines")
    if not isinstance(content, dict):
        raise HierAllreduceError(f"expected `key: value` lines, not {type(content).__name__}")
    return content


def check_keys(keys: Iterable[Any], known: Iterable[str], where: str) -> None:
    """Check that all keys are known; an error names the file, the key and the nearest known one."""
    known = list(known)
    for key in keys:
        if key not in known:
            raise HierAllreduceError(f"{where}: {key!r} is unknown{nearest(str(key), known)}")


# ---- values --------------------------------------------------------------------------------------


def whole_number(value: Any, where: str) -> int:
    """Return a whole number of 0 or more. NumPy's integers are numbers, bools are not."""
    if not is_whole_number(value):
        separator = "=" if where else ""
        raise HierAllreduceError(
            f"{where}{separator}{value!r}: expected a whole number of 0 or more"
        )
    return operator.index(value)


def switch(value: Any, where: str) -> bool:
    """Return True or False; 1 and 0 mean them, too."""
    is_bool = isinstance(value, (bool, np.bool_))
    if not is_bool and not (is_whole_number(value) and value < 2):
        raise HierAllreduceError(f"{where}={value!r}: expected True or False")
    return bool(value)


def is_whole_number(value: Any) -> bool:
    """Return whether a value is a whole number of 0 or more, NumPy's included; a bool is not."""
    if isinstance(value, (bool, np.bool_)):
        return False
    try:
        return operator.index(value) >= 0
    except TypeError:
        return False
