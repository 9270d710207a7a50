"""The machine this runs on, from nvidia-smi, which is asked once in a process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from functools import lru_cache
from typing import List, Optional, Sequence

from ..errors import HierAllreduceError
from .machine import Topology, from_matrix
from .matrix import read_matrix

PATIENCE = (
    5.0  # seconds for all calls of nvidia-smi together; it is slow without the persistence daemon
)


def this_machine(gpus: Optional[Sequence[int]] = None) -> Optional[Topology]:
    """Return the machine's GPUs that CUDA_VISIBLE_DEVICES shows, or some of them, in their order.

    Args:
        gpus: TensorFlow's numbers, as in ``/gpu:0``.

    Returns:
        None where nvidia-smi is missing, does not answer in 5 seconds, or shows no GPU.

    Raises:
        HierAllreduceError: a GPU that does not exist, or a table that cannot be understood.
    """
    printed = _printed()
    if not printed:
        return None
    machine = from_matrix(read_matrix(printed), "this machine")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        numbers = _visible(visible, printed)
        if not numbers:
            return None
        machine = machine.subset(numbers)
    return machine if gpus is None else machine.subset(gpus)


@lru_cache(maxsize=None)
def _printed() -> str:
    """Return the output of ``nvidia-smi -L``, ``topo -m`` and ``topo -p2p r``; empty if a call fails or is too slow."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    deadline = time.monotonic() + PATIENCE
    try:
        listing, table, access = (
            _run(deadline, command, *call.split()) for call in ("-L", "topo -m", "topo -p2p r")
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f"{listing}\n{table}\n{access if 'GPU1' in table else ''}" if table else ""


def _run(deadline: float, *command: str) -> str:
    """Return the output of a command; empty if it fails, as on drivers that lack a table."""
    left = max(0.0, deadline - time.monotonic())
    finished = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=left
    )
    return "" if finished.returncode else finished.stdout.decode("utf-8", errors="replace")


def _visible(visible: str, listing: str) -> List[int]:
    """Return the GPU numbers of CUDA_VISIBLE_DEVICES, whose entries are numbers, or UUIDs or beginnings of them."""
    uuids = dict(re.findall(r"^GPU (\d+):.*\(UUID: (\S+)\)", listing, re.M))
    numbers = []
    for entry in map(str.strip, visible.split(",")):
        if entry in ("", "-1", "NoDevFiles"):  # these hide the rest
            break
        found = (
            [entry]
            if entry.isdigit()
            else [number for number, uuid in uuids.items() if uuid.startswith(entry)]
        )
        if len(found) != 1:
            raise HierAllreduceError(
                f"CUDA_VISIBLE_DEVICES={visible!r}: {entry!r} is neither a GPU's number nor UUID"
            )
        numbers.append(int(found[0]))
    return numbers
