"""A machine: its devices, the links between them, and the resources that these share. No TensorFlow.

::

    nvidia-smi topo -m │ YAML ──matrix, machine──► Topology ──links──► Links
            this machine ──detect──────────────────┘   │
                                     gpus: bytes/s of models
"""

from __future__ import annotations

from .detect import this_machine
from .gpus import GB, Speeds, known_gpu
from .links import Link, Links, links_of
from .machine import Topology, from_text
from .matrix import PCIE, nvlinks

__all__ = ["GB", "PCIE", "Link", "Links", "Speeds", "Topology"]
__all__ += ["from_text", "known_gpu", "links_of", "nvlinks", "this_machine"]
