"""Speeds that override a machine's: a calibration file, or the same keys in a machine's file.

::

    gpu: V100                                        # the model whose speeds to begin with
    speeds: {nvlink: 22.8e9, copy_latency: 9.5e-6}   # keys of Speeds: bytes/s, seconds
    links: {SYS: 8.9e9, GPU0-GPU3: 44e9}             # bytes/s of a kind of link, or of one pair
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, Dict, Mapping, Optional

from .. import presets
from ..errors import TopologyError
from .gpus import Speeds

# the other fields of Speeds are in bytes/s
_SECONDS = {"copy_latency": presets.seconds, "kernel": presets.seconds, "arrival": presets.seconds_or_none}
_SPEEDS = {field.name: presets.Field(_SECONDS.get(field.name, presets.bytes_per_second)) for field in fields(Speeds)}
FIELDS = {
    "gpu": presets.Field(presets.text_or_nothing),
    "speeds": presets.Field(presets.mapping(_SPEEDS)),
    # Which links a machine has is checked where its links are built.
    "links": presets.Field(presets.mapping_of(presets.bytes_per_second)),
}


def read_calibration(path: Optional[str]) -> Optional[Mapping[str, Any]]:
    """Return the checked content of a calibration file; None without one.

    Raises:
        TopologyError: the file is missing or not YAML, a key is unknown, or a value is invalid.
    """
    if path is None:
        return None
    if not presets.readable(Path(path)):
        raise TopologyError(f"calibration {path!r}: no such file")
    return presets.check(presets.read_yaml(Path(path), TopologyError), FIELDS, path, TopologyError)


def merged(content: Mapping[str, Any], calibration: Mapping[str, Any]) -> Dict[str, Any]:
    """Return ``gpu``, ``speeds`` and ``links`` of a machine's file, overridden by those of a calibration."""
    return {
        "gpu": calibration.get("gpu") or content.get("gpu", ""),
        "speeds": {**content.get("speeds", {}), **calibration.get("speeds", {})},
        "links": {**content.get("links", {}), **calibration.get("links", {})},
    }
