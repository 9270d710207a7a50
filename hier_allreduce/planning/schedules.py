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
    with_steps = []
    for number, chunk in enumerate(chunks):
        schedules = of_last if number in pieces else plan.schedules
        with_steps.append(chunk._replace(steps=schedules[number % len(schedules)]))
    return with_steps


def _pieces_of_last(chunks: Sequence[Chunk], chunk_bytes: int) -> List[int]:
    """Return the numbers of the chunks into which the last gradient is cut; none if it is not.

    Gradients that become ready after it do not count, if they have less than ``chunk_bytes``.
    """
    after = 0
    for chunk in reversed(chunks):
        is_piece = len(chunk.ranges) == 1 and chunk.ranges[0].stop is not None
        if is_piece:
            return [number for number, piece in enumerate(chunks) if piece.first == chunk.first]
        after += chunk.bytes
        if after >= chunk_bytes:
            break
    return []


def _spread(chunks: Sequence[Chunk], schedules: Sequence[Schedule], load: Load) -> List[Chunk]:
    """Return chunks with steps such that their roots have about equal bytes in the end.

    Largest chunk first: it takes the root that has the fewest bytes so far. A chunk has the same
    root with every algorithm whose roots are the same towers.
    """
    bytes_on = list(load.towers)  # each tower
    uses = dict.fromkeys(sorted(schedules, key=root_of), 0)
    sizes = []  # of each chunk, in bytes of its variables
    for chunk in chunks:
        sizes.append(sum(load.variables[part.number] for part in chunk.ranges))

    def cost(schedule: Schedule) -> Tuple[int, int]:
        return bytes_on[root_of(schedule)], uses[schedule]

    with_steps = list(chunks)
    for number in sorted(range(len(chunks)), key=lambda number: -sizes[number]):
        schedule = min(uses, key=cost)
        bytes_on[root_of(schedule)] += sizes[number]
        uses[schedule] += 1
        with_steps[number] = chunks[number]._replace(steps=schedule)
    return with_steps
