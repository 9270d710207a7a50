"""Which chunk takes which schedule of a plan.

::

    all chunks        chunk c takes schedule c mod S, so that the roots rotate
    last gradient     the schedules of another algorithm, if the plan names one
    with a load       each variable has one root, and the roots have about equal bytes
"""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

from .algorithms import BY_NAME, schedules_of
from .chunks import Chunk, Load
from .plan import Plan, Schedule, root_of


def scheduled(chunks: Sequence[Chunk], plan: Plan, load: Optional[Load] = None) -> List[Chunk]:
    """Return C chunks, each with its steps."""
    if load is not None:
        return _spread(chunks, plan.schedules, load)
    pieces = _pieces_of_last(chunks, plan.chunk_bytes) if plan.algorithm_of_last else []
    of_last = schedules_of(BY_NAME[plan.algorithm_of_last], plan.towers) if pieces else ()
    # The roots rotate, so that no tower works more than the others.
    with_steps = []
    for c, chunk in enumerate(chunks):
        schedules = of_last if c in pieces else plan.schedules
        with_steps.append(chunk._replace(steps=schedules[c % len(schedules)]))
    return with_steps


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


def _spread(chunks: Sequence[Chunk], schedules: Sequence[Schedule], load: Load) -> List[Chunk]:
    """Return chunks with steps such that their roots have about equal bytes in the end.

    Largest chunk first: it takes the root that has the fewest bytes so far. A chunk has the same
    root with every algorithm whose roots are the same towers.
    """
    bytes_by_tower = list(load.towers)
    uses_by_schedule = dict.fromkeys(sorted(schedules, key=root_of), 0)
    sizes = []  # of each chunk, in bytes of its variables
    for chunk in chunks:
        sizes.append(sum(load.variables[span.gradient] for span in chunk.ranges))

    # Among roots with equal bytes the least used one is taken, since variables may have no bytes.
    def cost(schedule: Schedule) -> Tuple[int, int]:
        return bytes_by_tower[root_of(schedule)], uses_by_schedule[schedule]

    with_steps = list(chunks)
    for c in sorted(range(len(chunks)), key=lambda c: -sizes[c]):
        schedule = min(uses_by_schedule, key=cost)
        bytes_by_tower[root_of(schedule)] += sizes[c]
        uses_by_schedule[schedule] += 1
        with_steps[c] = chunks[c]._replace(steps=schedule)
    return with_steps
