"""``hier-allreduce doctor``: versions, GPUs, known problems with their remedies; with ``--measure``, copies."""

from __future__ import annotations

from .command import add_arguments, main

__all__ = ["add_arguments", "main"]
