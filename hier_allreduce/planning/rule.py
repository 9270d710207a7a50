"""The rule: the plan of a strategy that leaves the choice open.

It sees K, and whether the towers are on CPU devices::

    up to 4 GPUs      flat                 chunks of 4 MiB
    from 5 GPUs       flat_hierarchical    chunks of 4 MiB; hierarchical for the last gradient, if
                                           it is cut
    CPU devices       flat                 gradients below 64 KiB packed up to 10 MiB, others whole

One sum for each chunk waits for the fewest copies. Its copies back need not all leave its root:
through two groups fewer bytes do. The last gradient travels when nothing is left to compute. Then
the bytes over slow links decide, so its sums go through two groups, too.

Algorithms and the chunk size are from sweeps of emulated machines: ``benchmarks/sweep.py`` has the
score, ``benchmarks/results/published/sweep`` the runs. The exception for the last gradient is from
older ones, in ``benchmarks/results/archive``; ``earlier-bert_base`` is without it.

No rule knows how far the launching thread is ahead of the GPUs, and that decides which plan is the
fastest. ``hier-allreduce tune`` measures it.
"""

from __future__ import annotations

from .algorithms import BY_NAME, schedules_of
from .plan import Plan

KIB, MIB = 1 << 10, 1 << 20
CHUNK_BYTES = 4 * MIB
MANY_TOWERS = 5


def rule(towers: int, on_cpu: bool = False) -> Plan:
    """Return the plan of the rule for K towers."""
    if on_cpu:
        # CPU devices share one memory, so the plan of GPUs takes 1.7 to 3 times as long there:
        # benchmarks/results/cpu-plans.txt.
        schedules = schedules_of(BY_NAME["flat"], towers)
        return Plan(towers, schedules, 10 * MIB, "flat", pack_below=64 * KIB, whole=True)
    if towers < MANY_TOWERS:
        return Plan(towers, schedules_of(BY_NAME["flat"], towers), CHUNK_BYTES, "flat")
    schedules = schedules_of(BY_NAME["flat_hierarchical"], towers)
    return Plan(
        towers,
        schedules,
        CHUNK_BYTES,
        "flat_hierarchical",
        algorithm_of_last="hierarchical",
    )
