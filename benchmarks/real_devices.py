"""The devices of ``real.py``: GPUs, logical ones of the first GPU, or CPU devices; and sessions."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, List, NamedTuple

import tensorflow as tf

tf1 = tf.compat.v1
OF_MEMORY = 0.8  # that all logical GPUs take
MIB_WITHOUT_CUDA = 8192


class Devices(NamedTuple):
    """K devices of one kind.

    Attributes:
        towers: K.
        kind: ``"gpu"`` or ``"cpu"``.
        what: a word for people, such as ``"NVIDIA H100"``.
        logical_mb: the memory of each logical GPU; 0: they are whole GPUs.
    """

    kind: str
    towers: int
    what: str
    logical_mb: int = 0

    @property
    def names(self) -> List[str]:
        """K names, such as ``/gpu:0``."""
        return [f"/{self.kind}:{number}" for number in range(self.towers)]

    @property
    def machine(self) -> str:
        """What the JSON calls it."""
        return f"{self.towers} × {self.what}{', logical' if self.logical_mb else ''}"

    def session(self, graph: Any) -> Any:
        """Return a session whose threads can wait for all devices, and which has all kernels."""
        config = tf1.ConfigProto(inter_op_parallelism_threads=3 * self.towers)
        # else Grappler makes nothing of kernels whose values nobody reads
        config.graph_options.rewrite_options.dependency_optimization = 2
        # a device for each GPU on the way over the host; CPU devices have theirs beside them
        config.device_count["CPU"] = self.towers * (2 if self.kind == "cpu" else 1)
        # an emulated GPU lacks the kernels of the pass
        config.allow_soft_placement = True
        if self.kind == "cpu":
            config.device_count["GPU"] = 0
        else:
            # no others, because TensorFlow wants an entry of virtual_devices for each visible GPU
            visible = range(1 if self.logical_mb else self.towers)
            config.gpu_options.visible_device_list = ",".join(map(str, visible))
        if self.logical_mb:
            limits = [self.logical_mb] * self.towers
            config.gpu_options.experimental.virtual_devices.add().memory_limit_mb.extend(limits)
        return tf1.Session(graph=graph, config=config)

    def check(self) -> None:
        """Start the devices, which fails before anything is measured if it has to.

        Raises:
            SystemExit: a device is missing: TensorFlow cuts logical GPUs of CUDA only.
        """
        with self.session(tf.Graph()) as session:
            there = [device.name.lower() for device in session.list_devices()]
        for name in self.names:
            if not any(device.endswith(f"device:{name[1:]}") for device in there):
                raise SystemExit(f"TensorFlow made no {name}; there are {', '.join(there)}")

    def stages(self) -> List[str]:
        """Return a CPU device for each device that reads over the host."""
        first = self.towers if self.kind == "cpu" else 0
        return [f"/cpu:{first + number}" for number in range(self.towers)]


def find(count: int, on_cpu: bool, memory_mb: int) -> Devices:
    """Return ``count`` devices; 0: all GPUs, or 2 logical ones if there is one.

    Raises:
        SystemExit: TensorFlow sees no GPU.
    """
    if on_cpu:
        return Devices("cpu", count or 2, "CPU device")
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        raise SystemExit(
            "TensorFlow sees no GPU. Install tensorflow[and-cuda], or try --cpu, whose times say"
            " nothing about GPUs"
        )
    details = tf.config.experimental.get_device_details(gpus[0])
    what = details.get("device_name", "GPU")
    count = count or max(2, len(gpus))
    if count <= len(gpus):
        return Devices("gpu", count, what)
    return Devices("gpu", count, what, memory_mb or int(OF_MEMORY * _memory_mb() / count))


def _memory_mb() -> int:
    """Return the memory of the first GPU that CUDA shows this program.

    CUDA itself is asked, because nvidia-smi numbers GPUs without a look at CUDA_VISIBLE_DEVICES,
    and knows no part of a GPU (MIG) by its number.
    """
    device, size = ctypes.c_int(), ctypes.c_size_t()
    with contextlib.suppress(OSError):
        cuda = ctypes.CDLL("libcuda.so.1")
        faults = [
            cuda.cuInit(0),
            cuda.cuDeviceGet(ctypes.byref(device), 0),
            cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device),
        ]
        if not any(faults):
            return size.value >> 20
    return MIB_WITHOUT_CUDA
