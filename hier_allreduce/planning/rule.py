"""The rule: the plan of a strategy that leaves the choice open.

It sees K, the bytes, and whether control edges hold the host near the sums of the GPUs::

    GPUs           flat                 chunks of 4 MiB
      with edges   flat_hierarchical    from 5 towers and 200 MB of gradients on, chunks of 4 MiB;
                                        hierarchical for the last gradient, if it is cut
      without      hierarchical         from 5 towers on, chunks of 4 MiB
    CPU devices    flat                 gradients below 64 KiB packed up to 10 MiB, others whole

Without edges, a host that runs ahead lets every sum wait for the end of the backward pass. Then
nothing overlaps, and the bytes over slow links decide, as for the last gradient.

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

from enum import Enum, auto
from typing import Sequence

from .algorithms import BY_NAME, schedules_of
from .chunks import GradientSize
from .plan import Plan

KIB, MIB = 1 << 10, 1 << 20
CHUNK_BYTES = 4 * MIB
MANY_TOWERS = 5
MANY_BYTES = 200e6  # of gradients


class TowersOn(Enum):
    """What towers are on, and whether their backward passes wait for earlier sums."""

    CPU_DEVICES = auto()
    GPUS_WITH_EDGES = auto()
    GPUS_WITHOUT_EDGES = auto()  # functions, eager calls, several hosts; or they are switched off


def rule(
    gradients: Sequence[GradientSize], towers: int, on: TowersOn = TowersOn.GPUS_WITH_EDGES
) -> Plan:
    """Return the plan of the rule for N gradients on K towers."""
    if on is TowersOn.CPU_DEVICES:
        # CPU devices share one memory: `make bench` measures packed and whole gradients on them
        schedules = schedules_of(BY_NAME["flat"], towers)
        return Plan(towers, schedules, 10 * MIB, "flat", pack_below=64 * KIB, whole=True)
    total = sum(gradient.bytes for gradient in gradients)
    name, of_last = "flat", ""
    if towers >= MANY_TOWERS and on is TowersOn.GPUS_WITHOUT_EDGES:
        name = "hierarchical"
    elif towers >= MANY_TOWERS and total >= MANY_BYTES:
        name, of_last = "flat_hierarchical", "hierarchical"
    schedules = schedules_of(BY_NAME[name], towers)
    return Plan(towers, schedules, CHUNK_BYTES, name, algorithm_of_last=of_last)
