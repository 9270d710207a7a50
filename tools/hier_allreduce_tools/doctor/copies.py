"""Copies between every ordered pair of devices: equal bits, GB/s, a limit of 30 seconds.

::

    devices ─► pairs ─► copier ─► {pair: GB/s} ─► a table, problems
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
from typing import Any, Iterator, Sequence

from tqdm import tqdm

from ..text import table
from .machine import last_words, problem

LIMIT = 30.0  # seconds for one pair; TensorFlow waits for memory for 10 of them
_REMEDY = (
    "end other programs on these GPUs if memory is short; else turn off the IOMMU and ACS in the"
    " firmware, or update the driver; until then leave these GPUs out"
)


def copies_between(devices: Sequence[str]) -> Iterator[str]:
    """Copy between every ordered pair of K devices of TensorFlow; yield a table, and problems.

    TensorFlow may hang or die at a broken copy. It has a process of its own, which ends then; the
    pairs that follow are not tried. A bar shows how many were.
    """
    pairs = list(permutations(devices, 2))
    cells = {(device, device): "." for device in devices}
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
            cells[pair] = line.decode().strip()
        missing = [" → ".join(pair) for pair in pairs if pair not in cells]
        if not missing:
            process.kill()  # because the end of TensorFlow may hang, too
        status = process.wait()
        errors.seek(0)
        output = errors.read().decode("utf-8", "replace")

    rows = [["", *devices]]
    for src in devices:
        rows.append([src, *(cells.get((src, dst), "–") for dst in devices)])
    yield f"GB/s of copies of 32 MiB, from row to column\n{table(rows)}"
    changed = [" → ".join(pair) for pair, cell in cells.items() if cell == "DIFFER"]
    if changed:
        yield problem(f"copies {', '.join(changed)}: other bits arrive", _REMEDY)
    if missing:
        # faulthandler ends a process that has no answer in time, and prints such a line.
        is_late = re.search(r"^Timeout \(", output, re.MULTILINE)
        ended = f"the process ended: {last_words(status, output)}"
        yield problem(f"copies {missing[0]}: {'no answer in time' if is_late else ended}", _REMEDY)
