"""``hier-allreduce tune``: the user's program with each all-reduce, measured.

::

    command ─► rounds: all candidates, in both orders ─► run: one process tree, one clock op a step
                 │                                        └► faults: why a run has failed
                 └► verdict: a ratio for each row ─► report: table, JSON, YAML

    a program that is measured: observer ─► inside, in the all-reduce
    both speak by ``protocol``

A *candidate* is an all-reduce to measure, a *run* is one start of the program with it, a *row* has
all runs of a candidate.
"""

from __future__ import annotations

from .command import add_arguments, main

__all__ = ["add_arguments", "main"]
