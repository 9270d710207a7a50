"""The machine this runs on: from nvidia-smi, from TensorFlow where that is missing, or a host with CPU devices only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import lru_cache
from typing import Any, List, Optional, Sequence, Tuple

from ..errors import TopologyError
from .matrix import SELF, LinkMatrix
from .nvidia_smi import parse_nvidia_smi
from .topology import Topology, flat_host, from_matrix, subset

_NONE = ("", "-1", "NoDevFiles")  # in CUDA_VISIBLE_DEVICES: neither this nor what follows
_SECONDS = 60  # nvidia-smi on a machine with many GPUs and no persistence daemon takes its time


def this_machine(devices: Optional[Sequence[str]] = None) -> Topology:
    """The topology of this machine, or of these of its devices in this order.

    nvidia-smi is asked once in a process, as links do not change under a running program; CUDA_VISIBLE_DEVICES is read
    at every call.

    Args:
        devices: device strings, ``/gpu:0`` or longer; all of one kind.

    Raises:
        TopologyError: devices of several kinds, a GPU that is not there, or a table that cannot be understood.
    """
    if devices is None:
        return _whole_machine()
    looked_up = [_kind_and_number(device) for device in devices]
    for device, (kind, _) in zip(devices, looked_up):
        if kind != looked_up[0][0]:
            raise TopologyError(
                f"{devices[0]!r} and {device!r} are of two kinds: expected GPUs alone, or CPUs alone, to look up in "
                "this machine's topology"
            )
    if {kind for kind, _ in looked_up} == {"cpu"}:
        return flat_host(len(devices))
    return subset(_whole_machine(), [number for _, number in looked_up])


def _kind_and_number(device: str) -> Tuple[str, int]:
    found = re.search(r"(gpu|cpu):(\d+)$", device, re.I)
    if not found:
        raise TopologyError(f"{device!r}: expected a device such as '/gpu:0' to look up in this machine's topology")
    return found.group(1).lower(), int(found.group(2))


def _whole_machine() -> Topology:
    return _by_nvidia_smi() or _by_tensorflow() or flat_host(1, "this machine, without GPUs")


def _by_nvidia_smi() -> Optional[Topology]:
    """What ``nvidia-smi`` says, cut to the GPUs that CUDA_VISIBLE_DEVICES leaves; None where the command is missing."""
    table = _run("topo", "-m")
    if not table:
        return None
    names = _run("-L")
    machine = from_matrix(parse_nvidia_smi(names + "\n" + table), "this machine")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return machine
    numbers = visible_devices(visible, names)
    return subset(machine, numbers) if numbers else None


@lru_cache(maxsize=None)
def _run(*arguments: str) -> str:
    """What nvidia-smi prints, or printed before in this process; empty where it is missing or does not answer."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        done = subprocess.run(
            [command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""  # a driver that does not answer: TensorFlow may know more
    return done.stdout.decode("utf-8", errors="replace")


def visible_devices(visible: str, names: str) -> List[int]:
    """CUDA_VISIBLE_DEVICES as GPU numbers: numbers, or UUIDs as ``nvidia-smi -L`` lists them; ``-1`` hides the rest.

    Raises:
        TopologyError: an entry that is neither.
    """
    uuids = dict(re.findall(r"^GPU (\d+):.*\(UUID: (\S+)\)", names, re.M))
    found = []
    for entry in (part.strip() for part in visible.split(",")):
        matches = [int(number) for number, uuid in uuids.items() if entry and uuid.startswith(entry)]
        if entry in _NONE:
            break
        if entry.isdigit():
            found.append(int(entry))
        elif len(matches) == 1:
            found += matches
        else:
            raise TopologyError(f"CUDA_VISIBLE_DEVICES={visible!r}: {entry!r} is neither a GPU's number nor its UUID")
    return found


def _by_tensorflow() -> Optional[Topology]:
    """TensorFlow's device locality: it knows which GPUs reach each other's memory, and their socket."""
    from tensorflow.python.client import device_lib

    return from_locality([d for d in device_lib.list_local_devices() if d.device_type == "GPU"])


def from_locality(gpus: Sequence[Any]) -> Optional[Topology]:
    """A topology of TensorFlow's ``DeviceAttributes``: peers count as PHB, others as SYS; None for no GPUs."""
    if not gpus:
        return None
    peers = [{link.device_id for link in gpu.locality.links.link} for gpu in gpus]
    kinds = tuple(
        tuple(SELF if i == j else "PHB" if j in peers[i] and i in peers[j] else "SYS" for j in range(len(gpus)))
        for i in range(len(gpus))
    )
    labels = tuple(f"GPU{i}" for i in range(len(gpus)))
    cpus = tuple(f"NUMA {gpu.locality.numa_node}" for gpu in gpus)
    name = re.search(r"name: ([^,]+)", gpus[0].physical_device_desc)
    warning = "read from TensorFlow, which does not tell NVLink from PCIe; install nvidia-smi for a better plan"
    return from_matrix(LinkMatrix(labels, kinds, cpus, name.group(1) if name else "", (warning,)), "this machine")
