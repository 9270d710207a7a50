"""The command line: ``hier-allreduce COMMAND``, also ``python -m hier_allreduce_tools``."""

from __future__ import annotations

from .entry import main

__all__ = ["main"]
