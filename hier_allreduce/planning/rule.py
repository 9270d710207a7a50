"""The rule: the plan of a strategy that leaves the choice open.

It sees K, the bytes, and whether control edges hold the launching thread near the GPUs' sums::

    GPUs           flat                 chunks of 4 MiB
      with edges   flat_hierarchical    from 5 towers and 200 MB of gradients on, chunks of 4 MiB;
                                        hierarchical for the last gradient, if it is cut
      without      hierarchical         from 5 towers on, chunks of 4 MiB
    CPU devices    flat                 gradients below 64 KiB packed up to 10 MiB, others whole

Without edges, a launching thread that runs ahead lets every sum wait for the end of the backward
pass. Then nothing overlaps, and the bytes over slow links decide, as for the last gradient.

The constants for GPUs are from a sweep of seven emulated machines: ``benchmarks/sweep.py`` has the
score, and ``benchmarks/results/archive`` the runs, of models of 102, 438 and 553 MB. 200 MB is a
round number between the first two.

Nothing is left to compute while the last gradient travels. So one sum more costs little, but each
byte over a slow link costs its full time, and through two groups fewer bytes cross than from all
towers to one. ``earlier-bert_base`` there has the runs without it.

No rule knows how far the launching thread is ahead of the GPUs, and that decides which plan is the
fastest. ``hier-allreduce tune`` measures it.
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
MANY_BYTES = 200e6


class TowersOn(Enum):
    """What towers are on, and whether their backward passes wait for earlier sums."""

    CPU_DEVICES = auto()
    GPUS_WITH_EDGES = auto()
    # They are so in functions, in eager calls and on several hosts, or if edges are switched off.
    GPUS_WITHOUT_EDGES = auto()


def rule(
    gradients: Sequence[GradientSize], towers: int, on: TowersOn = TowersOn.GPUS_WITH_EDGES
) -> Plan:
    """Return the plan of the rule for N gradients on K towers."""
    if on is TowersOn.CPU_DEVICES:
        # CPU devices share one memory, so they have a plan of their own; `make bench` measures it.
        schedules = schedules_of(BY_NAME["flat"], towers)
        return Plan(towers, schedules, 10 * MIB, "flat", pack_below=64 * KIB, whole=True)
    total = sum(gradient.bytes for gradient in gradients)
    # One sum for each chunk waits for the fewest copies, so few towers always take it.
    algorithm, of_last = "flat", ""
    if towers >= MANY_TOWERS and on is TowersOn.GPUS_WITHOUT_EDGES:
        algorithm = "hierarchical"
    elif towers >= MANY_TOWERS and total >= MANY_BYTES:
        algorithm, of_last = "flat_hierarchical", "hierarchical"
    schedules = schedules_of(BY_NAME[algorithm], towers)
    return Plan(towers, schedules, CHUNK_BYTES, algorithm, algorithm_of_last=of_last)
