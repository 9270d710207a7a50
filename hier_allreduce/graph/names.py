"""Names of towers, variables and ops, in messages and in the graph."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from typing import Any, Dict, List, Optional, Sequence

import tensorflow as tf

from ..compat import is_eager
from ..errors import HierAllreduceError


def where(
    tower: int, devices: Sequence[Any], variable: Optional[int] = None, names: Sequence[str] = ()
) -> str:
    """Return ``tower 3 (/gpu:3), variable 5 ('conv1/W')``, which begins an error message."""
    text = f"tower {tower} ({devices[tower]})"
    if variable is None:
        return text
    text = f"{text}, variable {variable}"
    return f"{text} ({names[variable]!r})" if names else text


def names_of_gradients(rows: Sequence[Sequence[Any]]) -> List[str]:
    """Return names for N variables of which only gradients are known: of each column's first op."""
    names = []
    for variable, grads in enumerate(zip(*rows)):
        name = f"gradient{variable}"
        for grad in grads:
            tensor = grad.values if isinstance(grad, tf.IndexedSlices) else grad
            if isinstance(tensor, tf.Tensor) and not is_eager(tensor):
                name = str(tensor.op.name)
                break
        names.append(name)
    return names


def check_scope(name: str) -> None:
    """Raise a HierAllreduceError if ``name`` is not a name scope in both TensorFlows."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9.][A-Za-z0-9_./-]*", name):
        raise HierAllreduceError(
            f"name={name!r} is not a name scope: expected letters, digits and any of ./_-, a letter"
            " or digit first"
        )


def variable_names(pairs: Sequence[Sequence[Any]], devices: Sequence[Any]) -> List[str]:
    """Return the N names of K×N (gradient, variable) pairs, without the towers' scopes.

    Raises:
        HierAllreduceError: the towers list the same variables in different orders.
    """
    variables = []
    for row in pairs:
        variables.append([var for _, var in row])
    rows = names_within_towers(variables)
    # without scopes TensorFlow numbers the copies: w/kernel and w_1/kernel
    unnumbered = [list(map(_without_numbers, row)) for row in rows]
    for compared in (rows, unnumbered):
        first = compared[0]
        for tower, row in enumerate(compared):
            if row == first or sorted(row) != sorted(first):
                continue
            differing = [n for n, name in enumerate(row) if name != first[n]]
            place = where(tower, devices, differing[0], rows[tower])
            raise HierAllreduceError(
                f"{place}: tower 0 has {rows[0][differing[0]]!r} there; list the variables in one"
                " order on every tower"
            )
    return rows[0]


def _without_numbers(name: str) -> str:
    return re.sub(r"_?\d+", "", name)


def names_within_towers(variables: Sequence[Sequence[Any]]) -> List[List[str]]:
    """Return the names of K rows of variables, without the towers' scopes."""
    rows = []
    for row in variables:
        rows.append([str(var.name).split(":")[0] for var in row])
    within = []
    for row, scope in zip(rows, tower_scopes(rows)):
        within.append([name_within(scope, name) for name in row])
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
    owners: Counter = Counter()  # the number of rows with a name
    homes: Counter = Counter()  # and with a level
    levels_of = []
    for row in rows:
        paths = [name.split("/")[:-1] for name in row]
        levels_of.append(paths)
        owners.update(set(row))
        homes.update(set(itertools.chain(*paths)))
    scopes = []
    for row, paths in zip(rows, levels_of):
        own = [path for name, path in zip(row, paths) if owners[name] == 1]
        scope = os.path.commonprefix(own)  # noqa: RUF071  of lists of levels
        while scope and homes[scope[-1]] > 1:  # a level that other rows have too ends no scope
            scope = scope[:-1]
        scopes.append("".join(f"{level}/" for level in scope))
    return scopes


def op_names(names: Sequence[str]) -> List[str]:
    """Return ``names`` made safe and unique in op names: ``conv1/W`` → ``conv1.W``."""
    safe: Dict[str, None] = {}
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9_.-]", ".", name).lstrip("._-") or "chunk"
        free = plain
        number = 2
        while free in safe:
            free = f"{plain}.{number}"
            number += 1
        safe[free] = None
    return list(safe)
