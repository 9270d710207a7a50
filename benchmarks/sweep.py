"""The sweep behind the rule's constants: algorithms × chunk sizes over all cells.

A cell is a machine, a model, a pass and a host's share. A candidate is the rule's choice, or an
algorithm with a chunk size. It scores what it adds to a step, divided by what the cell's best
candidate adds: 1 is the best there.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any, Dict, List, Sequence, Tuple

from ratios import OURS, best, exposed_ratio

from hier_allreduce.formatting import table
from hier_allreduce.planning.algorithms import BY_NAME, schedules_of

SIZES = (1, 2, 4, 8, 16, 32, 64)  # MiB
OF_BEST = ("flat", "flat_hierarchical")  # these with all sizes, the other algorithms with two
FEW_SIZES = (4, 16)

Result = Dict[str, Any]


def swept(gpus: int) -> List[str]:
    """Return ours and the candidates for so many GPUs; of algorithms with equal steps the first."""
    by_steps: Dict[Any, str] = {}
    for name in sorted(BY_NAME, key=lambda name: name not in OF_BEST):
        schedules = schedules_of(BY_NAME[name], gpus)
        by_steps.setdefault(frozenset(frozenset(schedule) for schedule in schedules), name)
    candidates = [OURS]
    for name in by_steps.values():
        candidates += [f"{name}/{size}" for size in (SIZES if name in OF_BEST else FEW_SIZES)]
    return candidates


def scores(cell: Result) -> Dict[str, float]:
    """Return the score of each candidate in a cell."""
    names = list(cell["contenders"])
    least = best(cell, names)
    return {name: exposed_ratio(cell, name, least) for name in names}


def sweep_table(cells: Sequence[Result]) -> str:
    """Return the best candidates for each number of GPUs and each model."""
    kinds: Dict[Tuple[int, str], List[Dict[str, float]]] = defaultdict(list)
    for cell in cells:
        kinds[cell["gpus"], cell["model"]].append(scores(cell))
    parts = []
    for (gpus, model), found in kinds.items():
        rows = [["candidate", "mean", "median", "most"]]
        shared = set.intersection(*(set(one) for one in found))
        by_mean = sorted(shared, key=lambda name: statistics.mean(one[name] for one in found))
        for name in by_mean[:12]:
            values = [one[name] for one in found]
            numbers = (statistics.mean(values), statistics.median(values), max(values))
            rows.append([name, *(f"{number:.2f}" for number in numbers)])
        parts.append(f"{gpus} GPUs, {model}, {len(found)} cells\n{table(rows)}")
    return "\n\n".join(parts)
