"""The files of ``configs/``, found by name or path, and values as people write them.

::

    "tensorpack" or a path ──find──► Path ──read_yaml──► {key: value}
"""

from __future__ import annotations

import contextlib
import difflib
import operator
import os
from pathlib import Path
from typing import Any, Dict, Iterable, List, Sequence, Union

import numpy as np
import yaml

from .errors import HierAllreduceError

# In a checkout it is a link to the folder beside the package.
_CONFIGS = Path(__file__).resolve().parent / "configs"


# ---- files ---------------------------------------------------------------------------------------


def presets(folder: str) -> List[str]:
    """List the presets in a folder: ``"strategies"``, ``"trainers"``."""
    return sorted(path.stem for path in (_CONFIGS / folder).glob("*.yaml"))


def find(folder: str, name_or_path: Union[str, os.PathLike], also: Sequence[str] = ()) -> Path:
    """Return the file of a preset's name, or of a path.

    Args:
        folder: as in :func:`presets`.
        name_or_path: the name, or the path.
        also: further names that the caller knows, to be suggested too.

    Raises:
        HierAllreduceError: it is neither; the message lists the presets and suggests the nearest
            one.
    """
    if not isinstance(name_or_path, (str, os.PathLike)) or "\n" in str(name_or_path):
        # A text with several lines is a file's content, which may be long.
        shown = repr(name_or_path)
        shown = shown if len(shown) < 80 else f"{shown[:80]}…"
        raise HierAllreduceError(
            f"{shown}: expected the name of one of the {folder}, or a file's path"
        )
    preset = _CONFIGS / folder / f"{name_or_path}.yaml"
    for path in (Path(name_or_path), preset):
        # A shell's pipe, <(nvidia-smi topo -m), is no regular file, but can be read. A path that is
        # too long, or contains a null character, is an error of the system.
        with contextlib.suppress(OSError, ValueError):
            if path.exists() and not path.is_dir():
                return path
    hint = nearest(str(name_or_path), [*also, *presets(folder)])
    raise HierAllreduceError(
        f"{os.fspath(name_or_path)!r} is neither a file nor one of the {folder}{hint}"
    )


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
    # UTF-16 begins with a byte order mark, which no UTF-8 text can begin with.
    is_utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    return data.decode("utf-16" if is_utf16 else "utf-8-sig", errors="replace")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'? there are …`` with the nearest names: the end of an error."""
    choices = list(known)
    written = str(word).lower()
    close = difflib.get_close_matches(written, choices, max(1, len(choices)))
    # Close matches are sorted, and several may be as near as the nearest one.
    ratios = [difflib.SequenceMatcher(None, choice, written).ratio() for choice in close]
    suggested = [repr(choice) for choice, ratio in zip(close, ratios) if ratio == ratios[0]]
    hint = f"; did you mean {' or '.join(suggested)}?" if close else ";"
    return f"{hint} there are {', '.join(choices)}"


# ---- YAML ----------------------------------------------------------------------------------------


def read_yaml(path: Path) -> Dict[str, Any]:
    """Return the content of a YAML file.

    Raises:
        HierAllreduceError: the file cannot be read, is not valid YAML, or no ``key: value`` lines.
    """
    content = read_text(path)
    try:
        return parse_yaml(content)
    except HierAllreduceError as cause:
        raise HierAllreduceError(f"{path}: {cause}") from None


class _Loader(yaml.SafeLoader):
    """Reads YAML without aliases, and with each key once.

    A few aliases of aliases are a text of gigabytes as soon as an error shows them. Of a repeated
    key ``yaml.SafeLoader`` keeps the last one.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            anchor = self.peek_event().anchor
            raise yaml.YAMLError(f"*{anchor} is an alias, which is not read; write its value there")
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
    # PyYAML raises errors of many classes, such as ValueError for a date that does not exist.
    except Exception as cause:
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


def whole_number(written: Any, where: str) -> int:
    """Return a whole number of 0 or more. NumPy's integers are numbers, bools are not."""
    if not is_whole_number(written):
        raise HierAllreduceError(f"{where}={written!r}: expected a whole number of 0 or more")
    return operator.index(written)


def switch(written: Any, where: str) -> bool:
    """Return True or False; 1 and 0 mean them, too."""
    is_bool = isinstance(written, (bool, np.bool_))
    if not is_bool and not (is_whole_number(written) and written < 2):
        raise HierAllreduceError(f"{where}={written!r}: expected True or False")
    return bool(written)


def is_whole_number(written: Any) -> bool:
    """Return whether something is a whole number of 0 or more, NumPy's included; a bool is not."""
    # Python counts bools as integers, but a user who writes True for a number is mistaken.
    if isinstance(written, (bool, np.bool_)):
        return False
    try:
        return operator.index(written) >= 0
    except TypeError:
        return False
