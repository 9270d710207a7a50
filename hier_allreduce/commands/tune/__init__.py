"""``hier-allreduce tune``: the user's program with each all-reduce, measured.

::

    command ─► search: which all-reduces, how often ─► run: one process group, one clock op a step
                  │                                      └► faults: why a run has failed
                  └► verdict: ratios of pairs of runs ─► report: table, JSON, YAML │ picture

``observer`` runs inside the program: it sees a program that trains without this package.
"""

from __future__ import annotations

from .command import add_arguments, main

__all__ = ["add_arguments", "main"]
