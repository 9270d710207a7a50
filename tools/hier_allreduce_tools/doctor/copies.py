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

from hier_allreduce._lazy import require
from hier_allreduce.errors import HierAllreduceError
from hier_allreduce.formatting import rounded, table

from .causes import cause_of_end

Pair = Tuple[str, str]
START = 180.0  # seconds until TensorFlow has the devices, and then their memory
LIMIT = 10.0  # seconds for one pair
_REMEDY = (
    "turn off the IOMMU and ACS in the firmware, or update the driver; until then leave these GPUs"
    " out"
)
_NO_MEMORY = "out of memory"
_MORE_MEMORY = "end other programs on it (`nvidia-smi` lists them), and try again"
_HANG_LINE = re.compile(r"^Timeout \((\d+):(\d+):([\d.]+)\)!", re.MULTILINE)  # faulthandler's line


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

    @property
    def trouble(self) -> str:
        """What is wrong, as a cell of the table says it; empty if all is well."""
        if self.fault.startswith("no answer"):
            return "NO END"
        if self.fault.startswith(_NO_MEMORY):
            return "NO MEMORY"
        if self.fault:
            return "FAILED"
        return "DIFFER" if self.differ else ""


def copy_all(devices: Sequence[str]) -> Dict[Pair, MeasuredCopy]:
    """Copy between every ordered pair of K ≥ 2 devices of TensorFlow; show a bar.

    Raises:
        HierAllreduceError: TensorFlow cannot use the devices.
        ModuleNotFoundError: tqdm is missing; the message says what installs it.
    """
    require("tqdm", "doctor --copies")
    # tqdm is of an extra, so that it is imported only where it is used.
    from tqdm import tqdm

    pairs = list(permutations(devices, 2))
    bar = tqdm(_copied(devices[0], pairs), "copies", len(pairs), disable=None)
    return dict(zip(pairs, bar))


def _copied(device: str, pairs: List[Pair]) -> Iterator[MeasuredCopy]:
    """Yield the copies of each pair; a process that hangs or dies is replaced by a new one.

    ``device`` is the first one, with which a process shows that TensorFlow has started.

    Raises:
        HierAllreduceError: the first process cannot use the device.
    """
    count = len(pairs)
    while pairs:
        # TensorFlow may hang or die at a broken copy, so that it has a process of its own.
        todo = {"first": device, "pairs": pairs, "start": START, "limit": LIMIT}
        with tempfile.TemporaryFile() as errors, subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.copier", json.dumps(todo)],
            # with errors, because the line that ends TensorFlow does not name CUDA's
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        ) as process:
            lines: Any = process.stdout
            fault = ""
            if not lines.readline():
                fault = f"TensorFlow cannot use {device}: {_fault(process, errors)}"
            if fault and len(pairs) == count:
                raise HierAllreduceError(fault)
            if fault:
                # The others keep what was measured, because it may name the broken pair.
                yield from [MeasuredCopy(fault=f"not tried: {fault}")] * len(pairs)
                return
            line = b"{}"
            while pairs and line:
                line = lines.readline()
                pairs = pairs[1:]
                answer = json.loads(line) if line else {"fault": _fault(process, errors)}
                yield MeasuredCopy(**answer)
            # The process is killed, because the end of TensorFlow may hang, too.
            process.kill()


def _fault(process: Any, errors: Any) -> str:
    """Return why a process has ended."""
    status = process.wait()
    errors.seek(0)
    output = errors.read().decode("utf-8", "replace")
    timeout = _HANG_LINE.search(output)
    if timeout:
        hours, minutes, seconds = map(float, timeout.groups())
        return f"no answer for {3600 * hours + 60 * minutes + seconds:g} s"
    return f"the process ended: {cause_of_end(status, output)}"


def report(devices: Sequence[str], copy_by_pair: Dict[Pair, MeasuredCopy]) -> str:
    """Return a K×K table of GB/s, from row to column.

    CPU devices share one memory, so that their copies have no speed: the table says ``equal``.
    """
    are_gpus = all("gpu" in device for device in devices)
    title = "GB/s of copies of 32 MiB" if are_gpus else "bits after copies of 32 MiB"
    lines: List[List[str]] = [["", *devices]]
    for src in devices:
        cells = [src]
        for dst in devices:
            if src == dst:
                cells.append(".")
                continue
            copy = copy_by_pair[src, dst]
            speed = rounded(copy.rate / 1e9) if copy.rate else "?"
            cells.append(copy.trouble or (speed if are_gpus else "equal"))
        lines.append(cells)
    return f"{title}, from row to column\n{table(lines, all_right=True)}"


def faults(copy_by_pair: Dict[Pair, MeasuredCopy]) -> List[str]:
    """Return a line for every kind of broken copy, with its remedy."""
    # The range of all pairs is named, since by its own count every pair would have its own line.
    counts = sorted(copy.differ for copy in copy_by_pair.values() if copy.differ)
    span = " to ".join(dict.fromkeys(map(str, counts[:1] + counts[-1:])))
    pairs_by_fault: Dict[str, List[str]] = {}
    for (src, dst), copy in copy_by_pair.items():
        fault = copy.fault or (f"{span} bytes of 32 MiB arrive changed" if copy.differ else "")
        if fault:
            pairs_by_fault.setdefault(fault, []).append(f"{src} → {dst}")
    lines = []
    for fault, pairs in pairs_by_fault.items():
        # Memory that other programs hold is no fault of the machine, so its remedy differs.
        remedy = _MORE_MEMORY if fault.startswith(_NO_MEMORY) else _REMEDY
        lines.append(f"copies {', '.join(pairs)}: {fault}; {remedy}")
    return lines
