"""The machine this runs on: from nvidia-smi, else from TensorFlow, else a host with CPU devices only.

::

    nvidia-smi │ TensorFlow ──detected──► the table's speeds ──this_machine──► those of a calibration, if there is one
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, List, Optional, Sequence, Tuple

from ..errors import HierAllreduceError
from ..presets import user_folder
from .matrix import SELF, LinkMatrix
from .nvidia_smi import parse_nvidia_smi
from .topology import Topology, flat_host, from_matrix, load, subset

_HIDE_THE_REST = ("", "-1", "NoDevFiles")  # entries of CUDA_VISIBLE_DEVICES
_TIMEOUT = 60  # seconds; nvidia-smi is slow on machines with many GPUs and no persistence daemon


def this_machine(devices: Optional[Sequence[str]] = None) -> Topology:
    """Return the topology of this machine, or of some of its devices in this order.

    Its speeds are those of :func:`calibration_file`, if that was written for the same GPUs and the same TensorFlow. If
    it was written for others, ``warnings`` say so. Without it they are the table's, as :func:`detected` returns them.

    Args:
        devices: device strings, ``/gpu:0`` or longer; all of one kind.

    Raises:
        HierAllreduceError: devices of several kinds, a GPU that does not exist, or a table or calibration that cannot
            be understood.
    """
    return _of_devices(devices, calibrated=True)


def detected(devices: Optional[Sequence[str]] = None) -> Topology:
    """Return the topology of this machine, or of some of its devices, without a calibration.

    nvidia-smi runs once in a process, because links do not change while a program runs. CUDA_VISIBLE_DEVICES is read at
    every call.

    Args:
        devices: device strings, ``/gpu:0`` or longer; all of one kind.

    Raises:
        HierAllreduceError: devices of several kinds, a GPU that does not exist, or a table that cannot be understood.
    """
    return _of_devices(devices, calibrated=False)


def _of_devices(devices: Optional[Sequence[str]], calibrated: bool) -> Topology:
    if devices is None:
        return _with_calibration(_whole_machine()) if calibrated else _whole_machine()
    kinds_and_numbers = [_kind_and_number(device) for device in devices]
    for device, (kind, _) in zip(devices, kinds_and_numbers):
        if kind != kinds_and_numbers[0][0]:
            raise HierAllreduceError(
                f"{devices[0]!r} and {device!r} are of two kinds: expected GPUs alone, or CPUs alone, to look up in "
                "this machine's topology"
            )
    if {kind for kind, _ in kinds_and_numbers} == {"cpu"}:
        return flat_host(len(devices))
    machine = _with_calibration(_whole_machine()) if calibrated else _whole_machine()
    return subset(machine, [number for _, number in kinds_and_numbers])


def calibration_file() -> Path:
    """Return where ``hier-allreduce calibrate`` keeps this machine's speeds: in the user's cache folder."""
    return user_folder() / "this-machine.yaml"


def device_names(count: int) -> List[str]:
    """Return names that tell this machine's ``count`` GPUs from others: nvidia-smi's, with UUIDs; else the host's."""
    listing = _run("-L")
    names = dict(re.findall(r"^GPU (\d+): (.*\S)\s*$", listing, re.M))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = list(map(int, names)) if visible is None else visible_devices(visible, listing)
    if len(numbers) == count and all(str(number) in names for number in numbers):
        return [names[str(number)] for number in numbers]
    return [f"{platform.node()} GPU{number}" for number in range(count)]


def _with_calibration(machine: Topology) -> Topology:
    """Return the machine with the speeds of the calibration file, if that is of the same devices and TensorFlow."""
    path = calibration_file()
    if not path.is_file() or len(machine) < 2:
        return machine
    kept = load(str(path))
    names, version = tuple(device_names(len(machine))), _tensorflow_version()
    if kept.measured and (kept.measured.devices, kept.measured.tensorflow) == (names, version):
        return kept
    warning = (
        f"the calibration in {path} is of other GPUs, or of another TensorFlow than {version}, and is not used: run "
        "`hier-allreduce calibrate` again, or delete the file"
    )
    return replace(machine, warnings=(*machine.warnings, warning))


def _tensorflow_version() -> str:
    """Return the installed version; importing is the only way to know that works for all of its distributions."""
    if "tensorflow" not in sys.modules:
        import tensorflow  # noqa: F401
    return str(sys.modules["tensorflow"].__version__)


def free_gpu_memory() -> Tuple[int, ...]:
    """Return the free bytes of each GPU that CUDA_VISIBLE_DEVICES shows; empty if nvidia-smi does not tell."""
    lines = _run("--query-gpu=memory.free", "--format=csv,noheader,nounits").split()
    if not lines or not all(line.isdigit() for line in lines):
        return ()
    free = [int(line) << 20 for line in lines]  # nvidia-smi counts in MiB
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(free)
    return tuple(free[number] for number in visible_devices(visible, _run("-L")) if number < len(free))


def _kind_and_number(device: str) -> Tuple[str, int]:
    match = re.search(r"(gpu|cpu):(\d+)$", device, re.I)
    if not match:
        raise HierAllreduceError(
            f"{device!r}: expected a device such as '/gpu:0' to look up in this machine's topology"
        )
    return match.group(1).lower(), int(match.group(2))


def _whole_machine() -> Topology:
    by_nvidia_smi = _by_nvidia_smi()
    if by_nvidia_smi is None and importlib.util.find_spec("tensorflow") is None:
        raise HierAllreduceError(
            "this machine's GPUs cannot be found: there is neither nvidia-smi nor TensorFlow here; name a machine"
            " instead, one of `hier-allreduce topo --list`, or a file with the output of `nvidia-smi topo -m`"
        )
    return by_nvidia_smi or _by_tensorflow() or flat_host(1, "this machine, without GPUs")


def _by_nvidia_smi() -> Optional[Topology]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES shows, by ``nvidia-smi``; None if the command is missing."""
    table = _run("topo", "-m")
    if not table:
        return None
    listing = _run("-L")
    access = _run("topo", "-p2p", "r") if "GPU1" in table else ""
    machine = from_matrix(parse_nvidia_smi(f"{listing}\n{table}\n{access}"), "this machine")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return machine
    numbers = visible_devices(visible, listing)
    return subset(machine, numbers) if numbers else None


@lru_cache(maxsize=None)
def _run(*arguments: str) -> str:
    """Return what nvidia-smi prints, cached for this process; empty if it is missing or does not answer."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        finished = subprocess.run(
            [command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""  # the driver does not answer; TensorFlow may know more
    return finished.stdout.decode("utf-8", errors="replace")


def visible_devices(visible: str, listing: str) -> List[int]:
    """Return the GPU numbers of CUDA_VISIBLE_DEVICES.

    Its entries are numbers, or UUIDs or beginnings of them. An entry ``-1`` hides the ones after it.

    Args:
        visible: the variable's value.
        listing: what ``nvidia-smi -L`` prints, with the UUIDs.

    Raises:
        HierAllreduceError: an entry is neither a number nor the UUID of exactly one GPU.
    """
    uuids = dict(re.findall(r"^GPU (\d+):.*\(UUID: (\S+)\)", listing, re.M))
    numbers = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry in _HIDE_THE_REST:
            break
        matches = [int(number) for number, uuid in uuids.items() if uuid.startswith(entry)]
        if entry.isdigit():
            numbers.append(int(entry))
        elif len(matches) == 1:
            numbers += matches
        else:
            raise HierAllreduceError(
                f"CUDA_VISIBLE_DEVICES={visible!r}: {entry!r} is neither a GPU's number nor its UUID"
            )
    return numbers


def _by_tensorflow() -> Optional[Topology]:
    """Return the GPUs by TensorFlow's device locality: which reach each other's memory, and their sockets."""
    from tensorflow.python.client import device_lib

    return from_locality([d for d in device_lib.list_local_devices() if d.device_type == "GPU"])


def from_locality(gpus: Sequence[Any]) -> Optional[Topology]:
    """Return a topology of TensorFlow's ``DeviceAttributes``; None without GPUs.

    Peers count as PHB; other pairs as SYS, and their copies are staged.
    """
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
    model = name.group(1) if name else ""
    return from_matrix(LinkMatrix(labels, kinds, cpus, model, (warning,), ("SYS",)), "this machine")
