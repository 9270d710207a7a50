"""Which chunk takes which moves: the rule where a strategy leaves the choice open, and the roots.

The rule sees K, and whether the towers are on CPU devices::

    up to 4 GPUs      flat                 chunks of 4 MiB; the last packed ones are smaller
    from 5 GPUs       flat_hierarchical    as well
    CPU devices       flat                 gradients below 64 KiB packed up to 10 MiB, others whole

One sum for each chunk waits for the fewest copies. Its copies back need not all leave its root:
through two groups fewer bytes do.

Algorithms and the chunk size are from sweeps of emulated machines: ``benchmarks/sweep.py`` has the
score, ``benchmarks/results/published/sweep`` the runs.

No rule knows how far the launching thread is ahead of the GPUs, and that decides which plan is the
fastest. ``hier-allreduce tune`` measures it.

Of a plan's S schedules chunk c takes schedule c mod S, so that the roots rotate. Where owners
update, each variable has one root instead, and the roots have about equal bytes.
"""

from __future__ import annotations

from typing import List, Optional, Sequence

from .chunks import Chunk
from .plan import Plan, root_of

KIB = 1 << 10
MIB = 1 << 20
CHUNK_BYTES = 4 * MIB
# Two gradients or more below this size fit into a chunk.
PACK_BELOW = int(0.4 * CHUNK_BYTES)
MANY_TOWERS = 5


def rule(towers: int, on_cpu: bool = False) -> Plan:
    """Return the plan of the rule for K towers, whose algorithm has yet to give the schedules."""
    if on_cpu:
        # CPU devices share one memory, so the plan of GPUs takes 1.7 to 3 times as long there:
        # benchmarks/results/cpu-plans.txt.
        return Plan((), 10 * MIB, "flat", pack_below=64 * KIB, whole=True)
    name = "flat" if towers < MANY_TOWERS else "flat_hierarchical"
    return Plan((), CHUNK_BYTES, name, PACK_BELOW, tapers=True)


def scheduled(
    chunks: Sequence[Chunk], plan: Plan, variable_bytes: Optional[Sequence[int]] = None
) -> List[Chunk]:
    """Return C chunks, each with its schedule.

    With the bytes of N variables, which the roots update, each root gets about as many. Then a
    chunk has the same root with every algorithm whose roots are the same towers.
    """
    schedules = plan.schedules
    if variable_bytes is None:
        # The roots rotate, so that no tower works more than the others.
        return [
            chunk._replace(schedule=schedules[c % len(schedules)]) for c, chunk in enumerate(chunks)
        ]
    sizes = []  # of each chunk, in bytes of its variables
    for chunk in chunks:
        sizes.append(sum(variable_bytes[span.gradient] for span in chunk.ranges))
    # Largest chunk first: it takes the root that has the fewest bytes so far. Of roots with equal
    # bytes that is the least used one, since variables may have no bytes.
    share_by_schedule = {schedule: [0, 0] for schedule in sorted(schedules, key=root_of)}
    with_schedule = list(chunks)
    for c in sorted(range(len(chunks)), key=lambda c: -sizes[c]):
        schedule = min(share_by_schedule, key=share_by_schedule.__getitem__)
        share_by_schedule[schedule][0] += sizes[c]
        share_by_schedule[schedule][1] += 1
        with_schedule[c] = chunks[c]._replace(schedule=schedule)
    return with_schedule
