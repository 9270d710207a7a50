"""``hier-allreduce tune``: the user's program with each all-reduce, measured.

::

    command ─► rounds: all candidates, shuffled ─► run: one process group, until it has 41 steps
                 └► report: a ratio for each candidate, a table, YAML

    a program that is measured: inside/sitecustomize, by hier_allreduce.substitute
    both write lines into one journal

A *candidate* is an all-reduce to measure, a *run* is one start of the program with it, and in a
*round* each candidate runs once.
"""
