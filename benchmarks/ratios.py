"""How all-reduces are compared: one definition of each number, for all tables and the rule's score.

A cell is a machine, a model, a pass and a share of the host: an entry of ``cells`` in the JSON.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, Sequence

import numpy as np
from rounds import FUNCTION

Cell = Dict[str, Any]

OURS = "ours"
WITHOUT_EDGES = " without edges"  # ends a name
COMPARED = (  # baselines, each with its defaults and its best knob
    "tensorpack packed",
    "tensorpack",
    "tensorpack gpu",
    "HierarchicalCopyAllReduce",
    "HierarchicalCopyAllReduce in 8 packs",
    "ReductionToOneDevice",
)
LEAST_MS = 0.1  # rounds do not tell shorter exposed times from nothing


def exposed_ms(cell: Cell, name: str) -> float:
    """Return what an all-reduce adds to a step, in ms: the median of the rounds."""
    return float(cell["contenders"][name]["median_ms"])


def step_ms(cell: Cell, name: str) -> float:
    """Return a step with an all-reduce, in ms."""
    in_function = name.endswith(FUNCTION)
    return float(cell["base_ms_of_functions" if in_function else "base_ms"]) + exposed_ms(
        cell, name
    )


def baselines_in(cell: Cell) -> List[str]:
    """Return the compared baselines that ran."""
    return [name for name in COMPARED if name in cell["contenders"]]


def best(cell: Cell, names: Iterable[str]) -> str:
    """Return the all-reduce that adds least."""
    return min(names, key=lambda name: exposed_ms(cell, name))


def best_baseline(cell: Cell) -> str:
    """Return the baseline that adds least."""
    return best(cell, baselines_in(cell))


def exposed_ratio(cell: Cell, name: str, other: str) -> float:
    """Return what one adds, divided by what another one adds."""
    return max(LEAST_MS, exposed_ms(cell, name)) / max(LEAST_MS, exposed_ms(cell, other))


def step_ratio(cell: Cell, name: str, other: str) -> float:
    """Return a step with one, divided by a step with another one."""
    return step_ms(cell, name) / step_ms(cell, other)


def price(step_ms: Mapping[str, Sequence[float]], of: str, without: str) -> List[float]:
    """Return what a step costs more than another one: a quarter, the median, three quarters, in ms.

    Both ran in each round, and the differences of rounds are compared.
    """
    differences = [own - other for own, other in zip(step_ms[of], step_ms[without])]
    return list(map(float, np.percentile(differences, [25, 50, 75])))
