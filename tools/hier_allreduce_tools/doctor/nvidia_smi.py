"""The answers of nvidia-smi on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import NamedTuple, Optional, Tuple

from hier_allreduce import HierAllreduceError

from .topology import Groups, linked_groups, read_table

_PATIENCE = 60  # seconds for one call; without the persistence daemon it starts the driver first


class NvidiaSmi(NamedTuple):
    """The answers of nvidia-smi."""

    gpus: Tuple[str, ...] = ()  # name and driver of each; none if there is a fault
    table: str = ""  # of ``topo -m``; empty on a driver that prints none
    reads: str = ""  # of ``topo -p2p r``: which GPUs read each other's memory
    fault: str = ""  # its own line, or why there is none; empty if all is well


def ask_nvidia_smi() -> NvidiaSmi:
    """Return the answers of nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return NvidiaSmi(fault="not found on PATH")
    listing, fault = _run(program, "--query-gpu=name,driver_version", "--format=csv,noheader")
    if fault:
        return NvidiaSmi(fault=fault)
    # A fault of a table is none of the machine, because some drivers print none.
    table, _ = _run(program, "topo", "-m")
    reads, _ = _run(program, "topo", "-p2p", "r")
    return NvidiaSmi(tuple(listing.splitlines()), table, reads)


def _run(*command: str) -> Tuple[str, str]:
    """Return the output of a call, and its fault: its own words if it fails."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PATIENCE,
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer for {_PATIENCE} s"
    except OSError as error:
        return "", str(error)
    # Only line ends are removed, because a table begins with a tab, above its column of labels.
    output = done.stdout.decode("utf-8", errors="replace").strip("\r\n")
    if done.returncode:
        return "", " ".join(output.split())[:300] or f"it ended with status {done.returncode}"
    return output, ""


def groups_of(nvidia: NvidiaSmi) -> Optional[Groups]:
    """Return the two groups along the links of all GPUs.

    None where these are the halves, where nvidia-smi does not tell, and where CUDA_VISIBLE_DEVICES
    numbers the GPUs in another way.
    """
    try:
        kinds = read_table(nvidia.table)
    except HierAllreduceError:
        return None
    numbers = ",".join(map(str, range(len(kinds))))
    is_usual = os.environ.get("CUDA_VISIBLE_DEVICES", numbers) == numbers
    return linked_groups(kinds) if is_usual else None
