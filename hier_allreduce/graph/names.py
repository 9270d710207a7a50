"""Names of towers, variables and ops, in messages and in the graph."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter, defaultdict
from typing import Any, Dict, Iterable, List, Optional, Sequence, Set, Tuple

import tensorflow as tf

from ..compat import is_eager
from ..errors import HierAllreduceError

Numbers = Tuple[Tuple[int, ...], ...]  # in each level of a name


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
    comparisons: List[Sequence[Sequence[Any]]] = [rows, _ranks(rows)]
    for compared in comparisons:
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
    """Return ``layer/w`` for ``layer_1/w_2``."""
    return re.sub(r"_?\d+", "", name)


def _ranks(rows: Sequence[Sequence[str]]) -> List[List[Tuple[str, int]]]:
    """Return for each name its rank among those of its row that differ from it by numbers only.

    ::

        dense_3/b, dense_4/b, out_1/b    ──►    (dense/b, 0), (dense/b, 1), (out/b, 0)

    Numbers tell an order only where all have one meaning. In ``w_2, w_1_1`` TensorFlow's are beside
    the model's own, so the ranks of such names are 0, on every tower.
    """
    numbers = list(map(_numbers_by_text, rows))
    unordered = {text for row in numbers for text in row if _are_mixed(row[text])}
    ranks = []
    for row, by_text in zip(rows, numbers):
        in_order = {text: sorted(by_text[text]) for text in by_text}
        ranked = []
        for name in row:
            text = _without_numbers(name)
            rank = 0 if text in unordered else in_order[text].index(_numbers(name))
            ranked.append((text, rank))
        ranks.append(ranked)
    return ranks


def _numbers_by_text(row: Sequence[str]) -> Dict[str, Set[Numbers]]:
    """Return the numbers in names, by what the names are without them."""
    found: Dict[str, Set[Numbers]] = defaultdict(set)
    for name in row:
        found[_without_numbers(name)].add(_numbers(name))
    return found


def _numbers(name: str) -> Numbers:
    """Return the numbers in each level of a name: ``a/b2_3`` has ``((), (2, 3))``."""
    return tuple(tuple(map(int, re.findall(r"\d+", level))) for level in name.split("/"))


def _are_mixed(numbers: Iterable[Numbers]) -> bool:
    """Return whether some names have more numbers in a level than others that have any."""
    lengths = [{len(level) for level in levels if level} for levels in zip(*numbers)]
    return any(len(different) > 1 for different in lengths)


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
