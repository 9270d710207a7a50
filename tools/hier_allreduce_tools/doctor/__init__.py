"""``hier-allreduce doctor``: versions, GPUs, known problems with their remedies; copies; groups.

::

    packages, TensorFlow (probe), nvidia_smi ─► facts ─► problems, each with its remedy
    nvidia-smi topo -m ─► nvlinks ─► groups=…
    --copies ─► copies (copier) ─► bits, GB/s      causes: why probe or copier ended
"""

from __future__ import annotations

from .command import add_arguments, main

__all__ = ["add_arguments", "main"]
