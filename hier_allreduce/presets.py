"""The files of ``configs/``: found by name or path, and their YAML checked key by key.

::

    "dgx-1v" or a path ──find──► Path ──read_yaml──► {key: value} ──check──► {key: checked value}
                                                                    │
                                           {key: Field(reader)}  ───┘

A reader is a function ``(value, where) -> value`` that raises a :class:`.HierAllreduceError` beginning with ``where``.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Sequence, Tuple, Union

import yaml

from .errors import HierAllreduceError

_PACKAGE = Path(__file__).resolve().parent
# An installed package holds configs/ inside it; a checkout holds it next to the package.
_CONFIGS = next((d for d in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if d.is_dir()), _PACKAGE / "configs")

CACHE_VARIABLE = "HIER_ALLREDUCE_CACHE"  # names the folder of all that is kept for a user

Reader = Callable[[Any, str], Any]

# ---- files ------------------------------------------------------------------------------------------


def names(kind: str) -> List[str]:
    """List the presets of a kind: ``"clusters"``, ``"machines"``, ``"strategies"``, …"""
    return sorted(path.stem for path in (_CONFIGS / kind).glob("*.*") if path.suffix in (".yaml", ".tsv"))


def find(kind: str, name_or_path: str, also: Sequence[str] = ()) -> Path:
    """Return the file of a preset's name, or of a path.

    Args:
        kind: as in :func:`names`.
        name_or_path: the name, or the path.
        also: names that the caller knows besides, to be suggested too.

    Raises:
        HierAllreduceError: it is neither; the message lists the presets and suggests the nearest one.
    """
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise HierAllreduceError(f"{name_or_path!r}: expected the name of one of the {kind}, or a file's path")
    if "\n" in str(name_or_path):
        first_line = str(name_or_path).strip().split("\n")[0]
        raise HierAllreduceError(
            f"a text that begins with {first_line[:40]!r}: expected the name of one of the {kind}, or a file's path;"
            " write the text into a file"
        )
    for candidate in (Path(name_or_path), *(_CONFIGS / kind / f"{name_or_path}{end}" for end in (".yaml", ".tsv"))):
        if readable(candidate):
            return candidate
    hint = nearest(name_or_path, [*also, *names(kind)])
    raise HierAllreduceError(f"{name_or_path!r} is neither a file nor one of the {kind}{hint}")


def readable(path: Path) -> bool:
    """Return whether a path can be read: a file, or a shell's pipe (``<(nvidia-smi topo -m)``)."""
    try:
        return path.exists() and not path.is_dir()
    except (OSError, ValueError):  # too long for a file name, or it contains a null character
        return False


def why_unwritable(path: str) -> str:
    """Return why a file cannot be written; empty if the file or its folder exists, with permission."""
    file = Path(path)
    if file.is_dir() or not path:
        return f"{path!r}: expected a file, not a folder"
    if not file.parent.is_dir():
        return f"{path!r} cannot be written: there is no folder {str(file.parent)!r}"
    if not os.access(str(file if file.exists() else file.parent), os.W_OK):
        return f"{path!r} cannot be written: no permission"
    return ""


def write_text(path: str, text: str) -> None:
    """Write a file.

    Raises:
        HierAllreduceError: it cannot be written.
    """
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as cause:
        raise HierAllreduceError(f"{path!r} cannot be written: {cause.strerror}") from None


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'? there are …``, with all names that are as near; for the end of an error message."""
    choices, written = list(known), str(word).lower()
    close = difflib.get_close_matches(written, choices, max(1, len(choices)))
    likeness = [difflib.SequenceMatcher(None, choice, written).ratio() for choice in close]
    nearest_ones = [repr(choice) for choice, alike in zip(close, likeness) if alike == likeness[0]]
    hint = f"; did you mean {' or '.join(nearest_ones)}?" if close else ";"
    return f"{hint} there are {', '.join(choices)}"


def user_folder() -> Path:
    """Return where this package keeps files of its own for a user.

    ``$HIER_ALLREDUCE_CACHE``; without it the system's place for caches, ``~/.cache/hier_allreduce`` on Linux.
    """
    from platformdirs import user_cache_dir  # here, because most programs never ask

    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(os.path.expanduser(chosen) if chosen else user_cache_dir("hier_allreduce", appauthor=False))


def read_yaml(path: Path) -> Dict[str, Any]:
    """Return the content of a YAML file.

    Raises:
        HierAllreduceError: the file is not valid YAML, or not a mapping.
    """
    try:
        content = parse_yaml(path.read_bytes())  # UTF-8, or UTF-16 as PowerShell's `>` writes
    except ValueError as cause:
        raise HierAllreduceError(f"{path}: not readable as YAML: {cause}") from None
    if not isinstance(content, dict):
        raise HierAllreduceError(f"{path}: expected `key: value` lines, not {type(content).__name__}")
    return content


_MOST_VALUES = 100_000  # of a YAML text, with every alias written out
_DEEPEST = 500  # brackets: PyYAML's time grows with the square of their number, and its recursion ends before that
_MOST_DIGITS = 1000  # of a whole number


def parse_yaml(text: Union[str, bytes]) -> Any:
    """Return the content of a YAML text: mappings, lists, texts, numbers, dates. No tag runs any code.

    Raises:
        ValueError: not valid YAML; or aliases that stand for very many values: a few hundred bytes of aliases of
            aliases can stand for billions, which a message that shows them would write out. The text is one line.
    """
    if _depth(text) > _DEEPEST:
        raise ValueError("brackets or lists are nested too deeply")
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            if _values_of(node, {}) > _MOST_VALUES:
                raise ValueError(f"more than {_MOST_VALUES} values, or a value that contains itself")
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError:
        raise ValueError("brackets or lists are nested too deeply") from None
    except Exception as cause:  # PyYAML raises nearly anything for `!!timestamp x`, `!!int ''` and the like
        raise ValueError(" ".join(str(cause).split()) or type(cause).__name__) from None


def _depth(text: Union[str, bytes]) -> int:
    """Return how deep brackets are nested, those in texts too, but not those of a terminal's escape sequences."""
    depth = deepest = 0
    for bracket in re.findall(r"(?<!\x1b)[][{}]", text if isinstance(text, str) else text.decode("latin-1")):
        depth = depth + 1 if bracket in "[{" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


def _values_of(node: Any, known: Dict[Any, float]) -> float:
    """Return the number of values in a node with every alias written out; infinite for one that contains itself."""
    if isinstance(node, yaml.ScalarNode):
        if node.tag.endswith(":int") and len(node.value) > _MOST_DIGITS:
            raise ValueError(f"a number of more than {_MOST_DIGITS} digits")  # printing it would be an error in Python
        return 1
    if node not in known:
        known[node] = math.inf
        children = (
            [child for pair in node.value for child in pair] if isinstance(node, yaml.MappingNode) else node.value
        )
        known[node] = 1 + sum(_values_of(child, known) for child in children)
    return known[node]


# ---- readers: one for each kind of value ------------------------------------------------------------


def anything(value: Any, where: str) -> Any:
    """Return the value as it is: the caller checks it."""
    return value


def bytes_per_second(value: Any, where: str) -> float:
    """Return a bandwidth. The limits refuse GB/s given as bytes/s."""
    return _number(value, 1e6, 1e15, f"{where}: expected bytes/s from 1e6 to 1e15 (12 GB/s are 12e9)")


def seconds(value: Any, where: str) -> float:
    """Return a latency. The limits refuse µs given as seconds."""
    return _number(value, 1e-12, 1.0, f"{where}: expected seconds above 0, up to 1 (10 µs are 10e-6)")


def seconds_or_none(value: Any, where: str) -> float:
    """Return a delay, which may be 0. The limits refuse µs given as seconds."""
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
    if value is None:
        return ""
    if not isinstance(value, str):
        raise HierAllreduceError(f"{where}: expected a name, in quotes if it is a number, not {value!r}")
    return value


def mapping(fields: Mapping[str, Field]) -> Reader:
    """Return the reader of a nested mapping with these keys; without a value it is empty."""
    return lambda value, where: check(_lines(value, where), fields, where)


def mapping_of(reader: Reader) -> Reader:
    """Return the reader of a nested mapping from any key to a value of one kind."""

    def read(value: Any, where: str) -> Dict[str, Any]:
        items = _lines(value, where).items()
        return {str(key): reader(item, f"{where}: {key}") for key, item in items}

    return read


def _lines(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise HierAllreduceError(f"{where}: expected `key: value` lines, not {value!r}")
    return value


# ---- the schema of a file ---------------------------------------------------------------------------


class Field(NamedTuple):
    """One key of a file: how to read its value, and what to say if a required key is missing."""

    read: Reader = anything
    required: str = ""


def check(values: Mapping[str, Any], fields: Mapping[str, Field], where: str) -> Dict[str, Any]:
    """Return the values of a file, each as its field reads it.

    Raises:
        HierAllreduceError: a key is unknown (the message suggests the nearest one) or missing, or a value is invalid.
            The message begins with ``where``, unless that is empty.
    """
    prefix = f"{where}: " if where else ""
    for key in values:
        if key not in fields:
            raise HierAllreduceError(f"{prefix}{key!r} is unknown{nearest(str(key), fields)}")
    for key, field in fields.items():
        if field.required and key not in values:
            raise HierAllreduceError(f"{prefix}{key} is missing: {field.required}")
    return {key: fields[key].read(value, f"{prefix}{key}") for key, value in values.items()}


def load(kind: str, name_or_path: str, fields: Mapping[str, Field]) -> Tuple[Path, Dict[str, Any]]:
    """Return the path and the checked values of a preset, or of a YAML file.

    Raises:
        HierAllreduceError: neither a preset nor a file, not valid YAML, or as in :func:`check`; the message names the
            file.
    """
    path = find(kind, name_or_path)
    return path, check(read_yaml(path), fields, str(path))
