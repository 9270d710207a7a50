"""Copies between every ordered pair of devices: equal bits, bytes/s, a limit of 10 seconds.

::

    devices ─► pairs ─► copier ─► {pair: MeasuredCopy} ─► report, faults
                        a process, which ends when a copy hangs
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from itertools import permutations
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Tuple

from ..._lazy import require
from ...errors import HierAllreduceError
from ...formatting import rounded, table

Pair = Tuple[str, str]
START = 180.0  # seconds until TensorFlow has the devices, and then their memory
LIMIT = 10.0  # seconds for one pair
_REMEDY = (
    "turn off the IOMMU and ACS in the firmware, or update the driver; until then leave these GPUs"
    " out"
)
_NO_MEMORY = "out of memory"
_MORE_MEMORY = "end other programs on it (`nvidia-smi` lists them), and try again"
_TIMEOUT = re.compile(r"^Timeout \((\d+):(\d+):([\d.]+)\)!", re.MULTILINE)  # of faulthandler


class MeasuredCopy(NamedTuple):
    """The copies of one ordered pair of devices.

    Attributes:
        differ: how many of 32 MiB arrived changed.
        rate: bytes/s; 0 if no time could be measured.
        fault: why there are no figures; empty if there are.
    """

    differ: int = 0
    rate: float = 0.0
    fault: str = ""


def copy_all(devices: Sequence[str]) -> Dict[Pair, MeasuredCopy]:
    """Copy between every ordered pair of K ≥ 2 devices of TensorFlow; show a bar.

    Raises:
        HierAllreduceError: TensorFlow cannot use the devices.
        ModuleNotFoundError: tqdm is missing; the message says what installs it.
    """
    require("tqdm", "doctor --copies")
    from tqdm import tqdm  # an extra

    pairs = list(permutations(devices, 2))
    bar = tqdm(_ask(devices[0], pairs), "copies", len(pairs), disable=None)
    return dict(zip(pairs, bar))


def _ask(first: str, pairs: List[Pair]) -> Iterator[MeasuredCopy]:
    """Yield the copies of each pair; a process that hangs or dies is replaced by a new one."""
    while pairs:
        with tempfile.TemporaryFile() as errors, _copier(first, pairs, errors) as process:
            lines: Any = process.stdout
            if not lines.readline():
                fault = _fault(process, errors)
                raise HierAllreduceError(f"TensorFlow cannot use {first}: {fault}")
            line = b"{}"
            while pairs and line:
                line = lines.readline()
                pairs = pairs[1:]
                answer = json.loads(line) if line else {"fault": _fault(process, errors)}
                yield MeasuredCopy(**answer)
            process.kill()  # the end of TensorFlow may hang, too


def _copier(first: str, pairs: List[Pair], errors: Any) -> subprocess.Popen:
    """Start a process that copies between pairs."""
    todo = {"first": first, "pairs": pairs, "start": START, "limit": LIMIT}
    return subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.copier", json.dumps(todo)],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
    )


def _fault(process: Any, errors: Any) -> str:
    """Return why a process has ended."""
    process.wait()
    errors.seek(0)
    text = errors.read().decode("utf-8", "replace")
    timeout = _TIMEOUT.search(text)
    if timeout:
        hours, minutes, seconds = map(float, timeout.groups())
        return f"no answer for {3600 * hours + 60 * minutes + seconds:g} s"
    told = [line.strip() for line in text.split("\n") if "Error" in line] or ["no message"]
    return f"the process ended: {told[-1][:150]}"


def report(devices: Sequence[str], found: Dict[Pair, MeasuredCopy]) -> str:
    """Return a K×K table of GB/s, from row to column.

    CPU devices share one memory, so that their copies have no speed: the table says ``equal``.
    """
    are_gpus = all("gpu" in device for device in devices)
    title = "GB/s of copies of 32 MiB" if are_gpus else "bits after copies of 32 MiB"
    rows: List[List[str]] = [["", *devices]]
    for src in devices:
        cells = ["." if src == dst else _cell(found[src, dst], are_gpus) for dst in devices]
        rows.append([src, *cells])
    return f"{title}, from row to column\n{table(rows, all_right=True)}"


def _cell(copy: MeasuredCopy, are_gpus: bool) -> str:
    if copy.fault.startswith("no answer"):
        return "NO END"
    if copy.fault.startswith(_NO_MEMORY):
        return "NO MEMORY"
    if copy.fault:
        return "FAILED"
    if copy.differ:
        return "DIFFER"
    if not are_gpus:
        return "equal"
    return rounded(copy.rate / 1e9) if copy.rate else "?"


def faults(found: Dict[Pair, MeasuredCopy]) -> List[str]:
    """Return a line for every kind of broken copy, with its remedy."""
    by_kind: Dict[str, List[str]] = {}
    for (src, dst), copy in found.items():
        changed = f"{copy.differ} bytes of 32 MiB arrive changed" if copy.differ else ""
        kind = copy.fault or changed
        if kind:
            by_kind.setdefault(kind, []).append(f"{src} → {dst}")
    return [
        f"copies {', '.join(pairs)}: {kind}; {_remedy_of(kind)}" for kind, pairs in by_kind.items()
    ]


def _remedy_of(kind: str) -> str:
    return _MORE_MEMORY if kind.startswith(_NO_MEMORY) else _REMEDY
