"""Names of towers, variables and ops, in messages and in the graph."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter, defaultdict
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import tensorflow as tf

from ..compat import is_eager
from ..errors import HierAllreduceError

Numbers = Tuple[Tuple[int, ...], ...]  # in each level of a name


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
    # Ranks are compared too, because TensorFlow numbers the variables of towers without scopes:
    # w/kernel and w_1/kernel.
    comparisons: List[Sequence[Sequence[Any]]] = [rows, _ranks(rows)]
    for compared in comparisons:
        of_tower_0 = compared[0]
        for tower, row in enumerate(compared):
            if row == of_tower_0 or sorted(row) != sorted(of_tower_0):
                continue
            first = next(n for n, of_row in enumerate(row) if of_row != of_tower_0[n])
            place = where(tower, devices, first, rows[tower][first])
            raise HierAllreduceError(
                f"{place}: tower 0 has {rows[0][first]!r} there; list the variables in one order on"
                " every tower"
            )
    return rows[0]


def _ranks(rows: Sequence[Sequence[str]]) -> List[List[Tuple[str, int]]]:
    """Return for each name its rank among those of its row that differ from it by numbers only.

    ::

        dense_3/b, dense_4/b, out_1/b    ──►    (dense/b, 0), (dense/b, 1), (out/b, 0)

    Numbers tell an order only where all have one meaning. In ``w_2, w_1_1`` TensorFlow's are beside
    the model's own, so the ranks of such names are 0, on every tower.
    """
    numbers_by_stem: List[Dict[str, Set[Numbers]]] = []  # of each row
    unordered = set()
    for row in rows:
        of_row: Dict[str, Set[Numbers]] = defaultdict(set)
        for name in row:
            of_row[_stem(name)].add(_numbers(name))
        numbers_by_stem.append(of_row)
        # Numbers have several meanings if some names have more of them in a level than others.
        for stem, variants in of_row.items():
            lengths = [set(map(len, filter(None, levels))) for levels in zip(*variants)]
            if any(len(different) > 1 for different in lengths):
                unordered.add(stem)
    ranks = []
    for row, of_row in zip(rows, numbers_by_stem):
        in_order = {stem: sorted(variants) for stem, variants in of_row.items()}
        ranked = []
        for name in row:
            stem = _stem(name)
            rank = 0 if stem in unordered else in_order[stem].index(_numbers(name))
            ranked.append((stem, rank))
        ranks.append(ranked)
    return ranks


def _stem(name: str) -> str:
    """Return a name without its numbers: ``layer/w`` for ``layer_1/w_2``."""
    return re.sub(r"_?\d+", "", name)


def _numbers(name: str) -> Numbers:
    """Return the numbers in each level of a name: ``a/b2_3`` has ``((), (2, 3))``."""
    return tuple(tuple(map(int, re.findall(r"\d+", level))) for level in name.split("/"))


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
    for variable in names:
        safe = re.sub(r"[^A-Za-z0-9_.-]", ".", variable).lstrip("._-") or "chunk"
        free = safe
        suffix = 2
        while free in taken:
            free = f"{safe}.{suffix}"
            suffix += 1
        taken[free] = None
    return list(taken)
