"""A user's program, run twice for each all-reduce, with one clock op a step.

::

    facts of the first run ─► candidates ─► runs (each a process group) ─► seconds of a step ─► verdict
"""

from __future__ import annotations

from .candidates import NAMES, candidates
from .runs import MOST, Run, measure_all
from .verdict import as_json, as_yaml, report, verdict

__all__ = [
    "MOST",
    "NAMES",
    "Run",
    "as_json",
    "as_yaml",
    "candidates",
    "measure_all",
    "report",
    "verdict",
]
