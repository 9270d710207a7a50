"""The table of a machine's links: what kinds there are, from near to far, and who is joined to whom by which.

::

          GPU0  GPU1  GPU2            NV4  four NVLinks, bonded
    GPU0   X    NV4   SYS             PIX  one PCIe switch
    GPU1  NV4    X    SYS             …
    GPU2  SYS   SYS    X              SYS  PCIe, and the bus between sockets
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Tuple

Kinds = Tuple[Tuple[str, ...], ...]

SELF = "X"
PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS")  # from near to far
HOST = "HOST"  # not nvidia-smi's: devices in one host's memory


@dataclass(frozen=True)
class LinkMatrix:
    """What a table says: K labels, K×K kinds (``X`` on the diagonal), K CPU affinities, and what looks odd.

    ``gpu`` is the model's name where a listing of the GPUs (``nvidia-smi -L``) was pasted along, else empty.
    """

    labels: Tuple[str, ...]
    kinds: Kinds
    cpus: Tuple[str, ...]
    gpu: str
    warnings: Tuple[str, ...]


def distance(kind: str) -> int:
    """Orders link kinds from near (many NVLinks) to far (SYS)."""
    return PCIE.index(kind) if kind in PCIE else -nvlinks(kind)


def nvlinks(kind: str) -> int:
    """How many NVLinks are bonded in a link of this kind: 0 for PCIe."""
    return int(kind[2:]) if kind.startswith("NV") else 0
