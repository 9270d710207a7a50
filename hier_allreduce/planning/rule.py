"""The rule: the plan of a strategy that leaves the choice open.

It sees K, and whether control edges hold the launching thread near the GPUs' sums::

    up to 4 GPUs              flat                 chunks of 4 MiB
    from 5 GPUs, with edges   flat_hierarchical    chunks of 4 MiB; hierarchical for the last
                                                   gradient, if it is cut
             without edges    hierarchical         chunks of 4 MiB
    CPU devices               flat                 gradients below 64 KiB packed up to 10 MiB,
                                                   others whole

One sum for each chunk waits for the fewest copies. Its copies back need not all leave its root:
through two groups fewer bytes do. Without edges, a launching thread that runs ahead lets every sum
wait for the end of the backward pass. Then nothing overlaps, and the bytes over slow links decide,
so the sums go through two groups, too. The last gradient is always in this place.

Algorithms and the chunk size are from sweeps of emulated machines: ``benchmarks/sweep.py`` has the
score, ``benchmarks/results/published/sweep`` the runs. The exception for the last gradient is from
older ones, in ``benchmarks/results/archive``; ``earlier-bert_base`` is without it.

No rule knows how far the launching thread is ahead of the GPUs, and that decides which plan is the
fastest. ``hier-allreduce tune`` measures it.
"""

from __future__ import annotations

from enum import Enum, auto

from .algorithms import BY_NAME, schedules_of
from .plan import Plan

KIB, MIB = 1 << 10, 1 << 20
CHUNK_BYTES = 4 * MIB
MANY_TOWERS = 5


class TowersOn(Enum):
    """What towers are on, and whether their backward passes wait for earlier sums."""

    CPU_DEVICES = auto()
    GPUS_WITH_EDGES = auto()
    # They are so in functions, in eager calls and on several hosts, or if edges are switched off.
    GPUS_WITHOUT_EDGES = auto()


def rule(towers: int, on: TowersOn = TowersOn.GPUS_WITH_EDGES) -> Plan:
    """Return the plan of the rule for K towers."""
    if on is TowersOn.CPU_DEVICES:
        # CPU devices share one memory, so the plan of GPUs takes 1.7 to 3 times as long there:
        # benchmarks/results/cpu-plans.txt.
        schedules = schedules_of(BY_NAME["flat"], towers)
        return Plan(towers, schedules, 10 * MIB, "flat", pack_below=64 * KIB, whole=True)
    algorithm, of_last = "flat", ""
    if towers >= MANY_TOWERS and on is TowersOn.GPUS_WITHOUT_EDGES:
        algorithm = "hierarchical"
    elif towers >= MANY_TOWERS:
        algorithm, of_last = "flat_hierarchical", "hierarchical"
    schedules = schedules_of(BY_NAME[algorithm], towers)
    return Plan(towers, schedules, CHUNK_BYTES, algorithm, algorithm_of_last=of_last)
