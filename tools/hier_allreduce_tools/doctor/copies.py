"""Copies between every ordered pair of devices: equal bits, bytes/s, a limit of 30 seconds.

::

    devices ─► pairs ─► copier ─► {pair: MeasuredCopy} ─► report, problems
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
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..text import rounded, table
from .machine import Finding, last_words

Pair = Tuple[str, str]
_NOT_TRIED = "not tried, because TensorFlow ended at another pair"
START = 180.0  # seconds until TensorFlow has the devices
LIMIT = 30.0  # seconds for one pair; TensorFlow waits for memory for 10 of them
_REMEDY = (
    "end other programs on these GPUs if memory is short; else turn off the IOMMU and ACS in the"
    " firmware, or update the driver; until then leave these GPUs out"
)


class MeasuredCopy(NamedTuple):
    """The copies of one ordered pair of devices."""

    differ: int = 0  # how many bytes of 32 MiB arrived changed
    rate: float = 0.0  # bytes/s; 0 if no time could be measured
    fault: str = ""  # why there are no figures; empty if there are


def copy_all(devices: Sequence[str]) -> Dict[Pair, MeasuredCopy]:
    """Copy between every ordered pair of K ≥ 2 devices of TensorFlow; show a bar.

    TensorFlow may hang or die at a broken copy. It has a process of its own, which ends then; the
    pairs that follow are not tried.
    """
    # Only this function needs it, and a command that prints its help shall not wait for it.
    from tqdm import tqdm

    pairs = list(permutations(devices, 2))
    todo = {"first": devices[0], "pairs": pairs, "start": START, "limit": LIMIT}
    found: Dict[Pair, MeasuredCopy] = {}
    with tempfile.TemporaryFile() as errors, subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("copier.py")), json.dumps(todo)],
        # with errors, because the line that ends TensorFlow does not name CUDA's
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
    ) as process:
        lines: Any = process.stdout
        has_begun = bool(lines.readline())
        for pair in tqdm(pairs, "copies", disable=None):
            line = lines.readline()
            if not line:
                break
            found[pair] = MeasuredCopy(**json.loads(line))
        # The process is killed, because the end of TensorFlow may hang, too.
        if len(found) == len(pairs):
            process.kill()
        status = process.wait()
        errors.seek(0)
        output = errors.read().decode("utf-8", "replace")
    # faulthandler ends a process that has no answer in time, and prints such a line.
    is_late = re.search(r"^Timeout \(", output, re.MULTILINE)
    fault = "no answer in time" if is_late else f"the process ended: {last_words(status, output)}"
    if not has_begun:
        fault = f"TensorFlow cannot use {devices[0]}, {fault}"
    left = pairs[len(found) :]
    found.update((pair, MeasuredCopy(fault=fault)) for pair in left[:1])
    found.update((pair, MeasuredCopy(fault=_NOT_TRIED)) for pair in left[1:])
    return found


def report(devices: Sequence[str], copy_by_pair: Dict[Pair, MeasuredCopy]) -> str:
    """Return a K×K table of GB/s, from row to column.

    CPU devices share one memory, so that their copies have no speed: the table says ``equal``.
    """
    are_gpus = all("gpu" in device for device in devices)
    title = "GB/s of copies of 32 MiB" if are_gpus else "bits after copies of 32 MiB"
    lines: List[List[str]] = [["", *devices]]
    for src in devices:
        cells = [_cell(copy_by_pair.get((src, dst)), are_gpus) for dst in devices]
        lines.append([src, *cells])
    return f"{title}, from row to column\n{table(lines, all_right=True)}"


def _cell(copy: Optional[MeasuredCopy], are_gpus: bool) -> str:
    """Return the figure of one pair; none of a device with itself."""
    if copy is None:
        return "."
    if copy.fault:
        return "–" if copy.fault == _NOT_TRIED else "FAILED"
    if copy.differ:
        return "DIFFER"
    speed = rounded(copy.rate / 1e9) if copy.rate else "?"
    return speed if are_gpus else "equal"


def problems(copy_by_pair: Dict[Pair, MeasuredCopy]) -> List[Finding]:
    """Return a problem for every kind of broken copy."""
    # The range of all pairs is named, since by its own count every pair would have its own line.
    counts = sorted(copy.differ for copy in copy_by_pair.values() if copy.differ)
    span = " to ".join(dict.fromkeys(map(str, counts[:1] + counts[-1:])))
    pairs_by_fault: Dict[str, List[str]] = {}
    for (src, dst), copy in copy_by_pair.items():
        fault = copy.fault or (f"{span} bytes of 32 MiB arrive changed" if copy.differ else "")
        if fault and fault != _NOT_TRIED:
            pairs_by_fault.setdefault(fault, []).append(f"{src} → {dst}")
    return [
        Finding(f"copies {', '.join(pairs)}: {fault}", _REMEDY)
        for fault, pairs in pairs_by_fault.items()
    ]
