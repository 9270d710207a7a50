"""The answers of nvidia-smi on this machine, and which of its GPUs CUDA shows to a program."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import List, NamedTuple, Optional, Tuple

from hier_allreduce.errors import HierAllreduceError

from .nvlinks import Groups, linked_groups, read_table

_PATIENCE = 60  # seconds for one call; without the persistence daemon it starts the driver first
_HIDE_THE_REST = ("", "-1", "NoDevFiles")  # entries of CUDA_VISIBLE_DEVICES


class NvidiaGpu(NamedTuple):
    """One GPU, as nvidia-smi names it."""

    model: str
    driver: str
    uuid: str


class NvidiaSmi(NamedTuple):
    """The answers of nvidia-smi.

    Attributes:
        gpus: the GPUs in the order of their numbers; none if there is a fault.
        table: the output of ``nvidia-smi topo -m``; empty on a driver that prints none.
        fault: nvidia-smi's own line, or why there is none; empty if all is well.
    """

    gpus: Tuple[NvidiaGpu, ...] = ()
    table: str = ""
    fault: str = ""


def ask_nvidia_smi() -> NvidiaSmi:
    """Return the answers of nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return NvidiaSmi(fault="not found on PATH")
    listing, fault = _run(program, "--query-gpu=name,driver_version,uuid", "--format=csv,noheader")
    if fault:
        return NvidiaSmi(fault=fault)
    fields = [line.split(", ") for line in listing.splitlines() if line.count(", ") == 2]
    # A fault of the table is none of the machine, because some drivers print none.
    table, _ = _run(program, "topo", "-m")
    return NvidiaSmi(tuple(NvidiaGpu(*gpu) for gpu in fields), table)


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


def visible_gpus(nvidia: NvidiaSmi, setting: Optional[str]) -> Tuple[List[int], str]:
    """Return the numbers of the GPUs that CUDA shows, and the first entry that names none.

    Args:
        nvidia: all GPUs.
        setting: CUDA_VISIBLE_DEVICES: numbers, or UUIDs or their beginnings. CUDA stops at the
            first other entry, and so does this. None: not set, all are shown.
    """
    gpus = range(len(nvidia.gpus))
    if setting is None:
        return list(gpus), ""
    shown: List[int] = []
    for device in map(str.strip, setting.split(",")):
        if device in _HIDE_THE_REST:
            break
        # A UUID begins with a word such as GPU-, so that digits alone are a number.
        if device.isdigit():
            meant = [gpu for gpu in gpus if str(gpu) == device]
        else:
            meant = [gpu for gpu in gpus if nvidia.gpus[gpu].uuid.startswith(device)]
        if len(meant) != 1:
            return shown, device
        shown += meant
    return shown, ""


def groups_of(nvidia: NvidiaSmi) -> Optional[Groups]:
    """Return the two groups along the NVLinks of the GPUs that CUDA shows to this process.

    Returns:
        None where these are the halves, and where nvidia-smi does not tell.
    """
    gpus, _ = visible_gpus(nvidia, os.environ.get("CUDA_VISIBLE_DEVICES"))
    try:
        links = read_table(nvidia.table).links
    except HierAllreduceError:
        return None
    # A table of other GPUs than those in the list would give groups of wrong numbers.
    if not gpus or len(links) != len(nvidia.gpus):
        return None
    links_of_shown = [links[gpu] for gpu in gpus]
    columns = list(zip(*links_of_shown))  # the matrix is symmetric
    return linked_groups(tuple(columns[gpu] for gpu in gpus))
