"""Names of towers, variables and ops, in messages and in the graph."""

from __future__ import annotations

import os
import re
from collections import Counter
from itertools import chain
from typing import Any, Dict, List, Optional, Sequence

from ..compat import number_of
from ..errors import HierAllreduceError


def where(
    tower: int, devices: Sequence[Any], variable: Optional[int] = None, name: str = ""
) -> str:
    """Return ``tower 3 (/gpu:3), variable 5 ('conv1/W')``, which begins an error message."""
    place = f"tower {tower} ({devices[tower]})"
    if variable is None:
        return place
    place = f"{place}, variable {variable}"
    return f"{place} ({name!r})" if name else place


def variable_names(variables: Sequence[Sequence[Any]], devices: Sequence[Any]) -> List[str]:
    """Return the N names of K×N variables, without the scope that a tower's own have in common.

    Raises:
        HierAllreduceError: the towers list the same variables in different orders.
    """
    uses = Counter(map(id, chain(*variables)))
    rows = []
    for row in variables:
        paths = [name_of(var).split("/") for var in row]
        parents = [path[:-1] for var, path in zip(row, paths) if uses[id(var)] == 1]
        scope = os.path.commonprefix(parents)  # noqa: RUF071  of lists of levels
        names = []
        for var, path in zip(row, paths):
            is_own = uses[id(var)] == 1
            names.append("/".join(path[len(scope) :] if is_own else path))
        rows.append(names)
    for tower, row in enumerate(rows):
        made = ""
        elsewhere = [n for n, name in enumerate(row) if name != rows[0][n]]
        # Without scopes the names of two towers differ, and eager variables may all have one name.
        # But one program makes all towers, so the order in which each has made its variables tells
        # which of them are copies.
        are_alike = not elsewhere and len(set(row)) < len(row)
        if are_alike or sorted(row) != sorted(rows[0]):
            made = ", which was made earlier or later among those of its shape"
            kinds = [f"{var.dtype} {var.shape}" for var in variables[0]]
            own = _ranks(variables[tower], variables[0], kinds)
            on_tower_0 = _ranks(variables[0], variables[tower], kinds)
            elsewhere = [n for n, rank in enumerate(own) if rank != on_tower_0[n]]
        if elsewhere:
            n = elsewhere[0]
            raise HierAllreduceError(
                f"{where(tower, devices, n, row[n])}: tower 0 has {rows[0][n]!r} there{made};"
                " list the variables in one order on every tower"
            )
    return rows[0]


def _ranks(row: Sequence[Any], other_row: Sequence[Any], kinds: Sequence[str]) -> List[int]:
    """Return the rank of each variable: by its kind, and in this as they were made."""
    shared = set(map(id, other_row))
    made = []
    for kind, var in zip(kinds, row):
        # A variable of Keras 3 has TensorFlow's in it.
        number = number_of(var.value if hasattr(var, "path") else var)
        # What both towers have is itself, and comes before what each has made.
        made.append((kind, -1 - number if id(var) in shared else number))
    rank_by_variable = {variable: rank for rank, variable in enumerate(sorted(set(made)))}
    return [rank_by_variable[variable] for variable in made]


def name_of(variable: Any) -> str:
    """Return a variable's name, or its path in Keras 3, where every kernel is called "kernel"."""
    return str(getattr(variable, "path", variable.name)).split(":")[0]


def op_names(names: Sequence[str]) -> List[str]:
    """Return ``names`` made safe and unique in op names: ``conv1/W`` → ``conv1.W``."""
    taken: Dict[str, None] = {}
    times: Counter = Counter()
    for variable in names:
        safe = re.sub(r"[^A-Za-z0-9_.-]", ".", variable).lstrip("._-") or "chunk"
        free = safe
        while free in taken:
            times[safe] += 1
            free = f"{safe}.{times[safe] + 1}"
        taken[free] = None
    return list(taken)
