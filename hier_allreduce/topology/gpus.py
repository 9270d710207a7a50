"""How fast the parts of a machine are: by the GPU's model, or by what its links look like where that is not known.

A table of links says nothing about bytes per second. All numbers are explained in ``docs/cost-model.md``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, Optional

from .matrix import HOST, Kinds, nvlinks

GB = 1e9
# What is left of a PCIe port's speed when the bytes go by a switch, two, the host bridge, across bridges, sockets.
_PCIE_SHARE = {"PIX": 1.0, "PXB": 0.95, "PHB": 0.85, "NODE": 0.8, "SYS": 0.77}


@dataclass(frozen=True)
class Speeds:
    """How fast the parts of a machine are: bytes/s in each direction, and seconds.

    ``nvlink`` is one NVLink (NV2 has two), ``pcie`` a device's PCIe port, ``memory`` what a reduction reads and
    writes, ``host`` the memory that CPU devices share. ``copy_latency`` is the start of one device-to-device copy,
    ``kernel`` the launch of one reduction.
    """

    nvlink: float = 22.0 * GB
    pcie: float = 12.0 * GB
    memory: float = 700.0 * GB
    host: float = 8.0 * GB
    copy_latency: float = 10e-6
    kernel: float = 8e-6

    def of(self, kind: str) -> float:
        """Bytes/s of a link of this kind, in each direction."""
        if kind == HOST:
            return self.host
        return nvlinks(kind) * self.nvlink or self.pcie * _PCIE_SHARE[kind]


class Gpu(NamedTuple):
    """A model of GPU: ``pattern`` finds it in a name, and the rest is what such a GPU has."""

    pattern: str
    nvlinks: int  # of one GPU, 0 for none: a table with more counts the way through an NVSwitch K-1 times
    nvlink: float  # GB/s of one link, as measured by peer-to-peer copies
    pcie: float  # GB/s of its port: 12, 24, 48 for generations 3, 4, 5 with 16 lanes
    memory: float  # GB/s


GPUS = (
    Gpu(r"P100", 4, 18.4, 12, 500),
    Gpu(r"V100", 6, 22.8, 12, 780),
    Gpu(r"[AH]?A[18]00|A30\b", 12, 22.0, 24, 1400),
    Gpu(r"H[12]0{1,2}\b|H[128]00|L20Y", 18, 21.0, 48, 2600),
    Gpu(r"B[123]00", 18, 45.0, 48, 6000),
    Gpu(r"RTX A\d[05]00|30[6-9]0|A40\b", 4, 13.0, 24, 650),
    Gpu(r"PRO [456][05]00|RTX 6000D|50[6-9]0", 0, 22.0, 48, 1400),
    Gpu(r"40[6-9]0|\d[05]00 Ada|L40S?|L20\b|L4\b|A10G?\b|A16\b|A2\b", 0, 22.0, 24, 650),
    Gpu(r"2080|RTX [68]000|TITAN RTX|T4\b|M60|K80", 2, 22.0, 12, 500),
)


def guess_speeds(kinds: Kinds, gpu: str = "") -> Speeds:
    """Speeds of a GPU model; without one, or with one that is not known, of the model that usually has such links.

    NV1 alone between more than two GPUs is a P100, NV4 between pairs an RTX A6000 or 3090; the widest of a V100's links
    is NV1, NV2, NV3 or NV6, an H100's is wider than NV12; all others are an A100's.
    """
    known = known_gpu(gpu) or known_gpu(likely_gpu(kinds))
    return Speeds(known.nvlink * GB, known.pcie * GB, known.memory * GB) if known else Speeds()


def known_gpu(gpu: str) -> Optional[Gpu]:
    """The model in a name such as "Tesla V100-SXM2-16GB"; None where it is not in :data:`GPUS`."""
    return next((known for known in GPUS if re.search(known.pattern, gpu, re.I)), None)


def likely_gpu(kinds: Kinds) -> str:
    """The model that usually has such links; empty where there is no NVLink among them."""
    counts = [sorted(nvlinks(kind) for kind in row if nvlinks(kind)) for row in kinds]
    most = max((max(row) for row in counts if row), default=0)
    if most == 1 and len(kinds) > 2:
        return "P100"
    if most == 4 and all(len(row) <= 1 for row in counts):
        return "RTX A6000"
    if most in (1, 2, 3, 6):
        return "V100"
    return "H100" if most > 12 else "A100" if most else ""
