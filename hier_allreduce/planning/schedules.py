"""Which chunk takes which moves: the rule where a strategy leaves the choice open, and the roots.

The rule sees K, and whether the towers are on CPU devices::

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

Of a plan's S schedules chunk c takes schedule c mod S, so that the roots rotate. Where owners
update, each variable has one root instead, and the roots have about equal bytes.
"""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

from .algorithms import BY_NAME, schedules_of
from .chunks import Chunk, OwnedBytes
from .plan import Plan, Schedule, root_of

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


def scheduled(
    chunks: Sequence[Chunk], plan: Plan, owned: Optional[OwnedBytes] = None
) -> List[Chunk]:
    """Return C chunks, each with its schedule."""
    if owned is not None:
        return _spread(chunks, plan.schedules, owned)
    pieces = _pieces_of_last(chunks, plan.chunk_bytes) if plan.algorithm_of_last else []
    of_last = schedules_of(BY_NAME[plan.algorithm_of_last], plan.towers) if pieces else ()
    # The roots rotate, so that no tower works more than the others.
    with_schedule = []
    for c, chunk in enumerate(chunks):
        schedules = of_last if c in pieces else plan.schedules
        with_schedule.append(chunk._replace(schedule=schedules[c % len(schedules)]))
    return with_schedule


def _pieces_of_last(chunks: Sequence[Chunk], chunk_bytes: int) -> List[int]:
    """Return the numbers of the chunks into which the last gradient is cut; none if it is not.

    Gradients that become ready after it do not count, if they have less than ``chunk_bytes``.
    """
    after = 0
    for chunk in reversed(chunks):
        if len(chunk.ranges) == 1 and not chunk.ranges[0].is_whole:
            return [c for c, piece in enumerate(chunks) if piece.first == chunk.first]
        after += chunk.bytes
        if after >= chunk_bytes:
            break
    return []


def _spread(
    chunks: Sequence[Chunk], schedules: Sequence[Schedule], owned: OwnedBytes
) -> List[Chunk]:
    """Return chunks with schedules such that their roots have about equal bytes in the end.

    Largest chunk first: it takes the root that has the fewest bytes so far. A chunk has the same
    root with every algorithm whose roots are the same towers.
    """
    bytes_by_tower = list(owned.towers)
    uses_by_schedule = dict.fromkeys(sorted(schedules, key=root_of), 0)
    sizes = []  # of each chunk, in bytes of its variables
    for chunk in chunks:
        sizes.append(sum(owned.variables[span.gradient] for span in chunk.ranges))

    # Among roots with equal bytes the least used one is taken, since variables may have no bytes.
    def cost(schedule: Schedule) -> Tuple[int, int]:
        return bytes_by_tower[root_of(schedule)], uses_by_schedule[schedule]

    with_schedule = list(chunks)
    for c in sorted(range(len(chunks)), key=lambda c: -sizes[c]):
        schedule = min(uses_by_schedule, key=cost)
        bytes_by_tower[root_of(schedule)] += sizes[c]
        uses_by_schedule[schedule] += 1
        with_schedule[c] = chunks[c]._replace(schedule=schedule)
    return with_schedule
