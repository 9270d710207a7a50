"""The rule: the plan of a strategy that leaves the choice open. It sees K only.

::

    GPUs, up to 4 towers    flat                 chunks of 4 MiB
    GPUs, more towers       flat_hierarchical    chunks of 4 MiB
    CPU devices             flat                 below 64 KiB packed up to 10 MiB, others whole

No rule knows how far the host is ahead of the GPUs, and that decides which plan is the fastest.
``hier-allreduce tune`` measures it.
"""

from __future__ import annotations

from typing import Sequence

from .algorithms import BY_NAME, schedules_of
from .chunks import GradientSize
from .plan import Plan

KIB, MIB = 1 << 10, 1 << 20
FLAT_TOWERS = 4  # at most
CHUNK_BYTES = 4 * MIB  # `benchmarks/emulated.py … --sweep`


def rule(gradients: Sequence[GradientSize], towers: int, on_cpu: bool = False) -> Plan:
    """Return the plan of the rule for N gradients on K towers, which are GPUs or CPU devices."""
    if on_cpu:
        # CPU devices share one memory: `make bench` measures packed and whole gradients on them
        schedules = schedules_of(BY_NAME["flat"], towers)
        return Plan(towers, schedules, 10 * MIB, "flat", pack_below=64 * KIB, whole=True)
    name = "flat" if towers <= FLAT_TOWERS else "flat_hierarchical"
    return Plan(towers, schedules_of(BY_NAME[name], towers), CHUNK_BYTES, name)
