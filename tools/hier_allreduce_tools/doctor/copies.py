"""Copies between every ordered pair of devices: equal bits, bytes/s, a limit of 30 seconds.

::

    devices ─► pairs ─► copier ─► {pair: (bytes that differ, bytes/s)} ─► report
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
from typing import Any, Dict, Iterator, List, Sequence, Tuple

from tqdm import tqdm

from ..text import rounded, table
from .machine import last_words, problem

Pair = Tuple[str, str]
Copies = Dict[Pair, Tuple[int, float]]  # bytes of 32 MiB that arrive changed, and bytes/s
LIMIT = 30.0  # seconds for one pair; TensorFlow waits for memory for 10 of them
_REMEDY = (
    "end other programs on these GPUs if memory is short; else turn off the IOMMU and ACS in the"
    " firmware, or update the driver; until then leave these GPUs out"
)


def copy_all(devices: Sequence[str]) -> Tuple[Copies, str]:
    """Copy between every ordered pair of K ≥ 2 devices of TensorFlow; show a bar.

    TensorFlow may hang or die at a broken copy. It has a process of its own, which ends then; the
    pairs that follow are not tried.

    Returns:
        the copies, and why the pair after the last one has none; empty if all have.
    """
    pairs = list(permutations(devices, 2))
    found: Copies = {}
    with tempfile.TemporaryFile() as errors, subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("copier.py")), json.dumps([pairs, LIMIT])],
        # with errors, because the line that ends TensorFlow does not name CUDA's
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
    ) as process:
        lines: Any = process.stdout
        for pair, line in zip(tqdm(pairs, "copies", disable=None), lines):
            differ, rate = json.loads(line)
            found[pair] = differ, rate
        if len(found) == len(pairs):
            process.kill()  # because the end of TensorFlow may hang, too
            return found, ""
        status = process.wait()
        errors.seek(0)
        output = errors.read().decode("utf-8", "replace")
    # faulthandler ends a process that has no answer in time, and prints such a line.
    is_late = re.search(r"^Timeout \(", output, re.MULTILINE)
    ended = "no answer in time" if is_late else f"the process ended: {last_words(status, output)}"
    return found, "{} → {}: {}".format(*pairs[len(found)], ended)


def report(devices: Sequence[str], copies: Copies, fault: str) -> Iterator[str]:
    """Yield a K×K table of GB/s, from row to column, and problems.

    CPU devices share one memory, so that their copies have no speed: the table says ``equal``.
    """
    are_gpus = all("gpu" in device for device in devices)
    title = "GB/s of copies of 32 MiB" if are_gpus else "bits after copies of 32 MiB"
    cells = {(device, device): "." for device in devices}
    changed = []
    for pair, (differ, rate) in copies.items():
        speed = rounded(rate / 1e9) if rate else "?"  # the copy was too short to be timed
        cells[pair] = speed if are_gpus else "equal"
        if differ:
            cells[pair] = "DIFFER"
            changed.append("{} → {}".format(*pair))
    lines: List[List[str]] = [["", *devices]]
    for src in devices:
        # A pair that has failed, or was not tried, has no cell.
        lines.append([src, *(cells.get((src, dst), "–") for dst in devices)])
    yield f"{title}, from row to column\n{table(lines)}"
    if changed:
        most = max(differ for differ, _ in copies.values())
        arrive = f"up to {most} bytes of 32 MiB arrive changed"
        yield problem(f"copies {', '.join(changed)}: {arrive}", _REMEDY)
    if fault:
        yield problem(f"copies {fault}", _REMEDY)
