"""What people say about a machine's speeds, in a calibration file or in the machine's own: checked in one place.

::

    gpu: V100                                        # whose speeds to begin with
    speeds: {nvlink: 22.8e9, copy_latency: 9.5e-6}   # keys of Speeds: bytes/s, seconds
    links: {SYS: 8.9e9, GPU0-GPU3: 44e9}             # bytes/s of a kind of link, or of one pair
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Tuple

from .. import presets
from ..errors import TopologyError
from .gpus import Speeds


def read_calibration(path: Optional[str]) -> Optional[Mapping[str, Any]]:
    """A calibration file's content, or None.

    Raises:
        TopologyError: not YAML, a key other than ``gpu``, ``speeds``, ``links``, or a value that is none.
    """
    if path is None:
        return None
    if not presets.readable(Path(path)):
        raise TopologyError(f"calibration {path!r}: no such file")
    content = presets.read_yaml(Path(path), TopologyError)
    presets.refuse_unknown(content, ["gpu", "speeds", "links"], path, TopologyError)
    try:
        return {"gpu": words_of(content, "gpu"), "speeds": speeds_of(content), "links": dict(overrides_of(content))}
    except TopologyError as cause:
        raise TopologyError(f"{path}: {cause}") from None


def speeds_of(content: Mapping[str, Any]) -> Dict[str, float]:
    """``speeds`` of a file's content: some of the fields of :class:`.Speeds`, in bytes/s and seconds.

    Raises:
        TopologyError: a key that is no field (with the nearest), or a value that is none.
    """
    given = part_of(content, "speeds")
    presets.refuse_unknown(given, [f.name for f in fields(Speeds)], "speeds", TopologyError)
    units = {"copy_latency": "seconds", "kernel": "seconds"}
    return {
        key: presets.number_of(units.get(key, "bytes/s"), f"speeds: {key}", value, TopologyError)
        for key, value in given.items()
    }


def overrides_of(content: Mapping[str, Any]) -> Tuple[Tuple[str, float], ...]:
    """``links`` of a file's content: bytes/s by a kind of link or a pair of devices, both as they are written.

    Raises:
        TopologyError: a value that is none. What a machine has is checked where its links are worked out.
    """
    links = part_of(content, "links").items()
    return tuple(
        (str(key), presets.number_of("bytes/s", f"links: {key}", value, TopologyError)) for key, value in links
    )


def part_of(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """``speeds`` or ``links`` of a file's content; empty where it is missing.

    Raises:
        TopologyError: it is no mapping.
    """
    part = {} if content.get(name) is None else content[name]
    if not isinstance(part, Mapping):
        raise TopologyError(f"{name}: expected `key: value` lines, not {part!r}")
    return part


def words_of(content: Mapping[str, Any], name: str) -> str:
    """``name`` or ``gpu`` of a file's content; empty where it is missing.

    Raises:
        TopologyError: it is no text.
    """
    words = "" if content.get(name) is None else content[name]
    if not isinstance(words, str):
        raise TopologyError(f"{name}: expected a name, in quotes if it is a number, not {words!r}")
    return words
