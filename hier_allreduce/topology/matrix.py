"""The matrix of a machine's links: which kind of link, from near to far, joins each pair of devices.

::

          GPU0  GPU1  GPU2            NV4  four NVLinks, bonded
    GPU0   X    NV4   SYS             PIX  one PCIe switch
    GPU1  NV4    X    SYS             …
    GPU2  SYS   SYS    X              SYS  PCIe, and the bus between sockets
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple

Kinds = Tuple[Tuple[str, ...], ...]

SELF = "X"
PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS")  # from near to far
HOST = "HOST"  # devices in one host's memory; nvidia-smi does not have it


@dataclass(frozen=True)
class LinkMatrix:
    """A K×K matrix of link kinds.

    Attributes:
        labels: K device labels.
        kinds: K×K kinds, ``X`` on the diagonal.
        cpus: K CPU affinities.
        gpu: the model, if a listing of the GPUs (``nvidia-smi -L``) stands above the table; else empty.
        warnings: what looks wrong.
        staged: kinds of links, and pairs (``GPU0-GPU3``), without peer access; None if the model decides.
    """

    labels: Tuple[str, ...]
    kinds: Kinds
    cpus: Tuple[str, ...]
    gpu: str
    warnings: Tuple[str, ...]
    staged: Optional[Tuple[str, ...]] = None


def distance(kind: str) -> int:
    """Return a number that orders link kinds from near (many NVLinks) to far (SYS)."""
    return PCIE.index(kind) if kind in PCIE else -nvlinks(kind)


def nvlinks(kind: str) -> int:
    """Return the number of NVLinks that are bonded in a link of this kind: 0 for PCIe."""
    return int(kind[2:]) if kind.startswith("NV") else 0
