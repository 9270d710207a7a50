"""Names of towers, variables and ops, in messages and in the graph."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from typing import Any, Dict, List, Optional, Sequence, Tuple

import tensorflow as tf

from ..compat import is_eager, number_of
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


def names_of_gradients(rows: Sequence[Sequence[Any]]) -> List[str]:
    """Return names for N variables of which only gradients are known: of each column's first op."""
    first_ops = []
    for variable, grads in enumerate(zip(*rows)):
        op_name = f"gradient{variable}"
        for grad in grads:
            if isinstance(grad, (tf.Tensor, tf.IndexedSlices)) and not is_eager(grad):
                op_name = str(grad.op.name)
                break
        first_ops.append(op_name)
    return first_ops


def variable_names(variables: Sequence[Sequence[Any]], devices: Sequence[Any]) -> List[str]:
    """Return the N names of K×N variables, without the towers' scopes.

    Raises:
        HierAllreduceError: the towers list the same variables in different orders.
    """
    full_names = [list(map(name_of, row)) for row in variables]
    rows = []
    for row, scope in zip(full_names, tower_scopes(full_names)):
        rows.append([name_within(scope, full_name) for full_name in row])
    for tower, row in enumerate(rows):
        made = ""
        elsewhere = [n for n, name in enumerate(row) if name != rows[0][n]]
        # Without scopes the names of two towers differ, and eager variables may all have one name.
        # But one program makes all towers, so the order in which each has made its variables tells
        # which of them are copies.
        are_alike = not elsewhere and len(set(row)) < len(row)
        if are_alike or sorted(row) != sorted(rows[0]):
            made = ", which was made earlier or later among those of its shape"
            elsewhere = _made_elsewhere(variables[tower], variables[0])
        if elsewhere:
            n = elsewhere[0]
            raise HierAllreduceError(
                f"{where(tower, devices, n, row[n])}: tower 0 has {rows[0][n]!r} there{made};"
                " list the variables in one order on every tower"
            )
    return rows[0]


def _made_elsewhere(row: Sequence[Any], row_of_tower_0: Sequence[Any]) -> List[int]:
    """Return the numbers of the variables that two towers made in different orders.

    Only variables of one shape are compared, because the shapes of others tell them apart.
    """
    own = _ranks(row, row_of_tower_0)
    on_tower_0 = _ranks(row_of_tower_0, row)
    # If shapes differ, a later error tells.
    if [kind for kind, _ in own] != [kind for kind, _ in on_tower_0]:
        return []
    return [n for n in range(len(row)) if own[n] != on_tower_0[n]]


def _ranks(row: Sequence[Any], other_row: Sequence[Any]) -> List[Tuple[str, int]]:
    """Return the kind of each variable, and its rank among those of its kind as they were made."""
    shared = set(map(id, other_row))
    made = []
    for var in row:
        # A variable of Keras 3 has TensorFlow's in it.
        number = number_of(var.value if hasattr(var, "path") else var)
        # What both towers have is itself, and comes before what each has made.
        is_shared = id(var) in shared
        made.append((f"{var.dtype} {var.shape}", -1 - number if is_shared else number))
    # Equal kinds are neighbours, so that each rank is that in its kind, and how many come before.
    rank_by_variable = {variable: rank for rank, variable in enumerate(sorted(set(made)))}
    return [(variable[0], rank_by_variable[variable]) for variable in made]


def name_of(variable: Any) -> str:
    """Return a variable's name, or its path in Keras 3, where every kernel is called "kernel"."""
    return str(getattr(variable, "path", variable.name)).split(":")[0]


def name_within(scope: str, name: str) -> str:
    """Return a variable's name without its tower's scope, such as ``tower1/``, if it has that."""
    return name[len(scope) :] if name.startswith(scope) else name


def tower_scopes(rows: Sequence[Sequence[str]]) -> List[str]:
    """Return the scope of each tower, from K rows of variables' names.

    A tower's scope begins all names of its row, and ends with the last level that no other row
    has::

        tower 0                tower 1
        w, layer/b             tower1/w, tower1/layer/b        "" and "tower1/", as in tensorpack
        m_0/w, m_0/layer/b     m_1/w, m_1/layer/b              "m_0/" and "m_1/"

    A name in several rows is a variable that towers share, and does not count.
    """
    rows_by_name: Counter = Counter()
    rows_by_level: Counter = Counter()
    paths_of_rows = []  # K × N lists of levels
    for row in rows:
        paths = [variable.split("/")[:-1] for variable in row]
        paths_of_rows.append(paths)
        rows_by_name.update(set(row))
        rows_by_level.update(set(itertools.chain(*paths)))
    scopes = []
    for row, paths in zip(rows, paths_of_rows):
        own = [path for variable, path in zip(row, paths) if rows_by_name[variable] == 1]
        scope = os.path.commonprefix(own)  # noqa: RUF071  of lists of levels
        # A level that other rows have too ends no scope, because it does not tell towers apart.
        while scope and rows_by_level[scope[-1]] > 1:
            scope = scope[:-1]
        scopes.append("".join(f"{level}/" for level in scope))
    return scopes


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
