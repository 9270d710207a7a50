"""A machine: its devices, the links between them, and what the links share. No TensorFlow.

::

    nvidia-smi topo -m │ YAML │ TensorFlow's devices        text: files, detect
              │ nvidia_smi, machine_file
              ▼
    LinkMatrix   K×K kinds: NV2, PIX, SYS …                 matrix
              │ gpus, machine_file: bytes/s and seconds
              ▼
    Topology     a Link for each ordered pair               topology, links
              │
              ▼
    Resources    the queues that a byte passes through      contention (lanes: several queues for one GPU)
"""

from __future__ import annotations

from .contention import crowds, resources
from .detect import calibration_file, detected, device_names, free_gpu_memory, this_machine
from .gpus import GB, Speeds, staged_kinds
from .lanes import with_lanes
from .matrix import nvlinks
from .topology import Topology, calibrated, decoded, flat_host, from_text, guessed, load, subset

__all__ = [
    "GB",
    "Speeds",
    "Topology",
    "calibrated",
    "calibration_file",
    "crowds",
    "decoded",
    "detected",
    "device_names",
    "flat_host",
    "free_gpu_memory",
    "from_text",
    "guessed",
    "load",
    "nvlinks",
    "resources",
    "staged_kinds",
    "subset",
    "this_machine",
    "with_lanes",
]
