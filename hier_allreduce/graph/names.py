"""Names of towers, variables and ops, in messages and in the graph."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from typing import Any, Dict, List, Optional, Sequence

import tensorflow as tf

from ..compat import is_eager, tf1
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
            tensor = grad.values if isinstance(grad, tf.IndexedSlices) else grad
            if isinstance(tensor, tf.Tensor) and not is_eager(tensor):
                op_name = str(tensor.op.name)
                break
        first_ops.append(op_name)
    return first_ops


def check_scope(scope: str) -> None:
    """Raise a HierAllreduceError if ``name=`` is not a name scope in both TensorFlows."""
    is_scope = r"[A-Za-z0-9.]([A-Za-z0-9_./-]*[A-Za-z0-9_.-])?"
    if not isinstance(scope, str) or not re.fullmatch(is_scope, scope):
        raise HierAllreduceError(
            f"name={scope!r} is not a name scope: expected letters, digits and any of ./_-, a"
            " letter or digit first, and no / at the end, with which two all-reduces would share it"
        )


def variable_names(variables: Sequence[Sequence[Any]], devices: Sequence[Any]) -> List[str]:
    """Return the N names of K×N variables, without the towers' scopes.

    Raises:
        HierAllreduceError: the towers list the same variables in different orders.
    """
    rows = names_within_towers(variables)
    for tower, row in enumerate(rows):
        orders: Sequence[Sequence[Any]] = (row, rows[0])
        made = ""
        # Without scopes the names of two towers differ. But one program makes all towers, so the
        # order in which each has made its variables tells which of them are copies.
        if sorted(row) != sorted(rows[0]):
            orders = _orders_made(variables[tower], variables[0])
            made = ", which was made earlier or later among those of its shape"
        for n, (here, on_tower_0) in enumerate(zip(*orders)):
            if here != on_tower_0:
                raise HierAllreduceError(
                    f"{where(tower, devices, n, row[n])}: tower 0 has {rows[0][n]!r} there{made};"
                    " list the variables in one order on every tower"
                )
    return rows[0]


def _orders_made(*rows: Sequence[Any]) -> List[List[int]]:
    """Return of each variable its place among its row's variables of its shape, as they were made.

    A variable that the rows share is itself. Empty if rows have other shapes, of which an error
    tells later, or variables of no graph, as of eager programs.
    """
    place_by_op = {op: place for place, op in enumerate(tf1.get_default_graph().get_operations())}
    places = []
    for row in rows:
        # A variable of Keras 3 has TensorFlow's in it.
        inner = [var.value if hasattr(var, "path") else var for var in row]
        places.append([place_by_op.get(getattr(var, "op", None)) for var in inner])
    kinds = [[(var.dtype, str(var.shape)) for var in row] for row in rows]
    if any(None in of_row for of_row in places) or kinds[0] != kinds[1]:
        return [[], []]
    shared = set.intersection(*(set(map(id, row)) for row in rows))
    orders = []
    for row, of_row in zip(rows, places):
        made: Counter = Counter()
        order = list(map(id, row))
        for _, n in sorted(zip(of_row, range(len(row)))):
            if order[n] not in shared:
                order[n] = made[kinds[0][n]]
                made[kinds[0][n]] += 1
        orders.append(order)
    return orders


def name_of(variable: Any) -> str:
    """Return a variable's name, or its path in Keras 3, where every kernel is called "kernel"."""
    return str(getattr(variable, "path", variable.name)).split(":")[0]


def names_within_towers(variables: Sequence[Sequence[Any]]) -> List[List[str]]:
    """Return the names of K rows of variables, without the towers' scopes."""
    rows = []
    for row in variables:
        rows.append(list(map(name_of, row)))
    within = []
    for row, scope in zip(rows, tower_scopes(rows)):
        within.append([name_within(scope, full_name) for full_name in row])
    return within


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
