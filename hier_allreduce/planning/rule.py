"""The rule: the plan of a strategy that leaves the choice open. It sees K and the bytes only.

::

    GPUs           flat                 chunks of 4 MiB
                   flat_hierarchical    from 5 towers and 200 MB of gradients on, chunks of 4 MiB;
                                        hierarchical for the last gradient, if it is cut
    CPU devices    flat                 gradients below 64 KiB packed up to 10 MiB, others whole

The constants for GPUs are from a sweep of seven emulated machines: ``benchmarks/sweep.py`` has the
score, and ``benchmarks/results/archive`` the runs, of models of 102, 438 and 553 MB. Between
the first two, 200 MB is a round number.

No backward pass overlaps with the last gradient. So its sums wait for no kernels, one sum more
costs little, and the bytes over slow links decide: through two groups they are fewer than from all
towers to one. ``earlier-bert_base`` there has the runs without it.

No rule knows how far the host is ahead of the GPUs, and that decides which plan is the fastest.
``hier-allreduce tune`` measures it.
"""

from __future__ import annotations

from typing import Sequence

from .algorithms import BY_NAME, schedules_of
from .chunks import GradientSize
from .plan import Plan

KIB, MIB = 1 << 10, 1 << 20
CHUNK_BYTES = 4 * MIB
MANY_TOWERS = 5
MANY_BYTES = 200e6  # of gradients


def rule(gradients: Sequence[GradientSize], towers: int, on_cpu: bool = False) -> Plan:
    """Return the plan of the rule for N gradients on K towers, which are GPUs or CPU devices."""
    if on_cpu:
        # CPU devices share one memory: `make bench` measures packed and whole gradients on them
        schedules = schedules_of(BY_NAME["flat"], towers)
        return Plan(towers, schedules, 10 * MIB, "flat", pack_below=64 * KIB, whole=True)
    total = sum(gradient.bytes for gradient in gradients)
    is_large = towers >= MANY_TOWERS and total >= MANY_BYTES
    name, of_last = ("flat_hierarchical", "hierarchical") if is_large else ("flat", "")
    schedules = schedules_of(BY_NAME[name], towers)
    return Plan(towers, schedules, CHUNK_BYTES, name, algorithm_of_last=of_last)
