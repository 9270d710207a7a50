"""A user's program, run once for each all-reduce, with one clock op a step.

::

    facts of the first run ─► candidates ─► runs (each a process group) ─► clock: seconds of a step ─► verdict
"""

from __future__ import annotations

from .candidates import KNOWN_NAMES, Candidate, candidates, check_names
from .runs import Run, measure_all
from .verdict import as_json, as_yaml, report, verdict

__all__ = [
    "KNOWN_NAMES",
    "Candidate",
    "Run",
    "as_json",
    "as_yaml",
    "candidates",
    "check_names",
    "measure_all",
    "report",
    "verdict",
]
