"""The keys of a machine's YAML file that say how fast it is.

::

    gpu: V100                                        # the model whose speeds to begin with
    speeds: {nvlink: 22.8e9, copy_latency: 9.5e-6}   # keys of Speeds: bytes/s, seconds
    links: {SYS: 8.9e9, GPU0-GPU3: 44e9}             # bytes/s of a kind of link, or of one pair
    staged: [PHB, GPU0-GPU3]                         # no peer access: kinds of links, or pairs; [] if all have it
    shared:                                          # instead of what the matrix says about sharing
      way out of GPU0+GPU1: {speed: 12e9, copies: {GPU0: [GPU2, GPU3], GPU1: [GPU2, GPU3]}}
    measured: {date: 2026-11-22, tensorflow: 2.21.0, hier_allreduce: 0.1.0, devices: [Tesla V100 (UUID: …), …]}

``hier-allreduce calibrate`` writes all of them.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from .. import presets
from ..errors import HierAllreduceError
from .gpus import Speeds

# the other fields of Speeds are in bytes/s
_SECONDS = {
    "copy_latency": presets.seconds,
    "kernel": presets.seconds,
    "arrival": presets.seconds_or_none,
    "dispatch": presets.seconds_or_none,
    "staged_latency": presets.seconds_or_none,
}
_SPEEDS = {field.name: presets.Field(_SECONDS.get(field.name, presets.bytes_per_second)) for field in fields(Speeds)}


class SharedWay(NamedTuple):
    """Something that copies share evenly: its ``speed`` in bytes/s, and the labels (sender, receiver) of the copies."""

    name: str
    speed: float
    copies: Tuple[Tuple[str, str], ...]


class Measured(NamedTuple):
    """When speeds were measured, with which versions, and the names of the devices."""

    date: str
    tensorflow: str
    hier_allreduce: str
    devices: Tuple[str, ...]


def _copies(value: Any, where: str) -> Dict[str, List[str]]:
    if not isinstance(value, Mapping) or not all(isinstance(receivers, list) for receivers in value.values()):
        raise HierAllreduceError(
            f"{where}: expected for each sender a list of receivers, such as `GPU0: [GPU2]`, not {value!r}"
        )
    return {str(sender): [str(receiver) for receiver in receivers] for sender, receivers in value.items()}


def _names(value: Any, where: str) -> List[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise HierAllreduceError(f"{where}: expected a list of names, in quotes, not {value!r}")
    return value


def _text(value: Any, where: str) -> str:
    return str(value)  # YAML reads a date without quotes as a date, and 2.21 as a number


_SHARED = {
    "speed": presets.Field(presets.bytes_per_second, required="the bytes/s that its copies share"),
    "copies": presets.Field(_copies, required="for each sender a list of receivers, such as `GPU0: [GPU2]`"),
}
_MEASURED = {
    "date": presets.Field(_text, required="the day of the measurement"),
    "tensorflow": presets.Field(_text, required="TensorFlow's version"),
    "hier_allreduce": presets.Field(_text, required="this package's version"),
    "devices": presets.Field(_names, required="a list of the devices' names"),
}
FIELDS = {
    "gpu": presets.Field(presets.text_or_nothing),
    "speeds": presets.Field(presets.mapping(_SPEEDS)),
    # Which links a machine has is checked where its links are built.
    "links": presets.Field(presets.mapping_of(presets.bytes_per_second)),
    "staged": presets.Field(_names),
    "shared": presets.Field(presets.mapping_of(presets.mapping(_SHARED))),
    "measured": presets.Field(presets.mapping(_MEASURED)),
}


def shared_ways(content: Mapping[str, Any]) -> Optional[Tuple[SharedWay, ...]]:
    """Return what a file's key ``shared`` says; None without the key: then the matrix decides."""
    if "shared" not in content:
        return None
    return tuple(
        SharedWay(name, way["speed"], tuple((src, dst) for src, dsts in way["copies"].items() for dst in dsts))
        for name, way in content["shared"].items()
    )


def measured(content: Mapping[str, Any]) -> Optional[Measured]:
    """Return what a file's key ``measured`` says; None without the key."""
    values = content.get("measured")
    return Measured(**{**values, "devices": tuple(values["devices"])}) if values else None


def to_content(shared: Optional[Tuple[SharedWay, ...]], when: Optional[Measured]) -> Dict[str, Any]:
    """Return the keys ``shared`` and ``measured`` as a file has them; the reverse of the two functions above."""
    content: Dict[str, Any] = {}
    if when:
        content["measured"] = {**when._asdict(), "devices": list(when.devices)}
    if shared is not None:
        content["shared"] = {}
        for way in shared:
            copies: Dict[str, List[str]] = {}
            for sender, receiver in way.copies:
                copies.setdefault(sender, []).append(receiver)
            content["shared"][way.name] = {"speed": way.speed, "copies": copies}
    return content
