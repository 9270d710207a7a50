"""A catalogue of GPUs and their speeds. ``docs/cost-model.md`` has the source of each number.

``nvidia-smi topo -m`` says nothing about bytes per second, so the model decides. An unknown model counts as the model
that usually has such links.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, Optional

from .matrix import Kinds, nvlinks

GB = 1e9
# The share of a PCIe port's speed that is left across one switch, several, the host bridge, two bridges, two sockets.
_PCIE_SHARE = {"PIX": 1.0, "PXB": 0.95, "PHB": 0.85, "NODE": 0.8, "SYS": 0.77}
_STAGED_SHARE = 0.93  # across the host's memory: 22.3 of 24 GB/s between RTX 4090, github.com/NVIDIA/nccl/issues/814
GEFORCE = re.compile(
    r"(?<!\d)[2-5]0[5-9]0?(?!\d)"
)  # RTX 2050 to 5090, or cut: peer access over NVLink only


@dataclass(frozen=True)
class Speeds:
    """The speeds of a machine: bytes/s in each direction, and seconds.

    Attributes:
        nvlink: one NVLink (NV2 has two).
        pcie: a device's PCIe port.
        memory: of a GPU, for the operands and results of sums.
        staged: the host's memory, which all copies between GPUs without peer access share.
        copy_latency: seconds to start one device-to-device copy.
        staged_latency: seconds that a copy without peer access takes longer to start.
        kernel: seconds to launch one sum.
        dispatch: seconds of the host for each op, one after another; None where it was not measured.
    """

    nvlink: float = 22.0 * GB
    pcie: float = 12.0 * GB
    memory: float = 700.0 * GB
    staged: float = 26.0 * GB
    copy_latency: float = 10e-6
    staged_latency: float = 13e-6
    kernel: float = 8e-6
    dispatch: Optional[float] = None

    def of(self, kind: str, staged: bool = False) -> float:
        """Return the bytes/s of a link of this kind, in each direction; ``staged`` is one without peer access."""
        if staged:
            return min(self.pcie * _STAGED_SHARE, self.staged)
        return nvlinks(kind) * self.nvlink or self.pcie * _PCIE_SHARE[kind]


class Gpu(NamedTuple):
    """A model of GPU: ``pattern`` finds it in a name."""

    pattern: str
    nvlinks: int  # of one GPU; a matrix with more than these counts the links to an NVSwitch once for each peer
    nvlink: float  # GB/s of one link, as measured by peer-to-peer copies
    pcie: float  # GB/s of its port: 12, 24, 48 for generations 3, 4, 5 with 16 lanes
    memory: float  # GB/s


GPUS = (
    Gpu(r"P100", 4, 18.4, 12, 500),
    Gpu(r"V100", 6, 22.8, 12, 780),
    Gpu(r"[AH]?A[18]00|A30\b", 12, 22.0, 24, 1400),
    Gpu(r"H[12]0{1,2}\b|H[128]00|L20Y", 18, 21.0, 48, 2600),
    Gpu(r"B[123]00", 18, 45.0, 48, 6000),
    Gpu(r"RTX A\d[05]00|30[6-9]0?|A40\b", 4, 13.0, 24, 650),
    Gpu(r"PRO [456][05]00|RTX 6000D|50[6-9]0?", 0, 22.0, 48, 1400),
    Gpu(r"40[6-9]0?|\d[05]00 Ada|L40S?|L20\b|L4\b|A10G?\b|A16\b|A2\b", 0, 22.0, 24, 650),
    Gpu(r"208|RTX [68]000|TITAN RTX|T4\b|M60|K80", 2, 22.0, 12, 500),
)


def guess_speeds(kinds: Kinds, gpu: str = "") -> Speeds:
    """Return the speeds of a GPU model; if it is unknown, of the model that usually has such links."""
    model = known_gpu(gpu) or known_gpu(likely_gpu(kinds))
    return Speeds(model.nvlink * GB, model.pcie * GB, model.memory * GB) if model else Speeds()


def known_gpu(gpu: str) -> Optional[Gpu]:
    """Return the model in a name such as "Tesla V100-SXM2-16GB"; None if it is not in :data:`GPUS`."""
    return next((model for model in GPUS if re.search(model.pattern, gpu, re.I)), None)


def likely_gpu(kinds: Kinds) -> str:
    """Return the model that usually has such links; empty if no link is an NVLink.

    ::

        the widest link   NV1 (more than two GPUs)   NV4 (pairs only)       NV1, NV2, NV3, NV6   above NV12   others
        the model         P100                       RTX A6000, as a 3090   V100                 H100         A100
    """
    nvlink_counts = [[nvlinks(kind) for kind in row if nvlinks(kind)] for row in kinds]
    widest = max((max(counts) for counts in nvlink_counts if counts), default=0)
    if not widest:
        return ""
    if widest == 1 and len(kinds) > 2:
        return "P100"
    if widest == 4 and all(len(counts) <= 1 for counts in nvlink_counts):
        return "RTX A6000"
    if widest in (1, 2, 3, 6):
        return "V100"
    return "H100" if widest > 12 else "A100"
