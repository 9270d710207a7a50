"""Equal towers: which variables are copies of each other, copying tower 0's to the others, and comparing them.

Trained variables are copies by their index in the rows. Their names show the towers' scopes. Other variables are copies
if their names differ by these scopes only, wherever the scope is::

    tower1/w/Adam, tower1/bn/mean            tower0/w/Adam, tower0/bn/mean
    ema/tower1/w/Average                     ema/tower0/w/Average

tensorpack's tower 0 has no scope: there "tower1/bn/mean" is the copy of "bn/mean".
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
import tensorflow as tf

from ..compat import tf1
from ..graph import copy_from_tower_0

Copies = List[List[Any]]  # K×V variables; a column holds copies of one variable


def all_variables() -> List[Any]:
    """Return the global and the local variables of the current graph, each once."""
    return list({id(var): var for var in tf1.global_variables() + tf1.local_variables()}.values())


def with_created(
    trained: Copies, created: Sequence[Sequence[Any]], names_on_tower_0: Dict[int, str]
) -> Copies:
    """Return the K×N trained variables, and after them the copies among the variables that K updates created.

    Copies have the same name but for the towers' scopes, or the name in ``names_on_tower_0`` by ``id(variable)``.
    Otherwise they have the same name but for numbers, and the same order. A variable that only some updates created is
    left out.
    """
    find = finder(trained)
    names = [
        [names_on_tower_0.get(id(var)) or find(var.op.name)[1] for var in row] for row in created
    ]
    shared = set(names[0]).intersection(*names[1:])
    towers: List[Dict[str, List[Any]]] = [defaultdict(list) for _ in created]
    for tower, row, row_names in zip(towers, created, names):
        for var, name in zip(row, row_names):
            tower[name if name in shared else re.sub(r"_\d+(?=/|$)", "", name)].append(var)
    return [[*row, *others] for row, others in zip(trained, _columns(towers))]


def find_copies(copies: Copies) -> Copies:
    """Return ``copies``, each once, and the other copies among all variables of the current graph.

    Variables that are local on tower 0, such as metrics, count differently on every tower and are no copies.
    """
    columns = {id(column[0]): column for column in zip(*copies)}
    known = {id(var) for column in columns.values() for var in column}
    private = set(map(id, tf1.local_variables()))
    find = finder(copies)
    towers: List[Dict[str, List[Any]]] = [defaultdict(list) for _ in copies]
    for var in all_variables():
        tower, name = find(var.op.name)
        if id(var) not in known and not (tower == 0 and id(var) in private):
            towers[tower][name].append(var)
    return [[*row, *others] for row, others in zip(zip(*columns.values()), _columns(towers))]


def _columns(towers: Sequence[Dict[str, List[Any]]]) -> Copies:
    """Return the variables with a key of which all towers have equally many."""
    keys = [
        key
        for key, found in towers[0].items()
        if all(len(tower.get(key, ())) == len(found) for tower in towers)
    ]
    return [[var for key in keys for var in tower[key]] for tower in towers]


def finder(copies: Copies) -> Callable[[str], Tuple[int, str]]:
    """Return a function that takes a variable's name and returns its tower, and the name of its copy on tower 0.

    The first trained variable or scope of a tower in the name tells the tower. Names without any are tower 0's. If
    towers have no scopes, ``w_1`` counts as one.
    """
    known = {
        var.op.name: (tower, first.op.name)
        for tower, row in enumerate(copies)
        for var, first in zip(row, copies[0])
    }
    scopes: Dict[str, Tuple[int, str]] = {}
    for name, (tower, first) in known.items():
        levels, firsts = name.split("/"), first.split("/")
        while levels and firsts and levels[-1] == firsts[-1]:
            levels.pop()
            firsts.pop()
        if tower:
            scopes["/".join(levels)] = tower, "/".join(firsts)
            scopes.setdefault("/".join(firsts), (0, "/".join(firsts)))

    def find(name: str) -> Tuple[int, str]:
        levels, tower = name.split("/"), -1
        renamed: List[str] = []
        while levels:
            for end in range(len(levels), 0, -1):
                key = "/".join(levels[:end])
                found = known.get(key) or (
                    scopes.get(key) if tower < 0 and end < len(levels) else None
                )
                if found and tower in (-1, found[0]):
                    tower, renamed, levels = found[0], [*renamed, found[1]], levels[end:]
                    break
            else:
                renamed.append(levels.pop(0))
        return max(tower, 0), "/".join(filter(None, renamed))

    return find


def broadcast(copies: Copies, devices: Sequence[Any]) -> Any:
    """Return an op that copies tower 0's variables to the other towers."""
    with tf1.device(devices[0]):
        values = [var.read_value() for var in copies[0]]
    assigned = []
    for tower, row in enumerate(copy_from_tower_0(values, devices)):
        with tf1.device(devices[tower]):
            assigned += [var.assign(value).op for var, value in zip(copies[tower], row) if tower]
    return tf.group(*assigned)


class Drift(NamedTuple):
    """The largest difference between tower 0 and another tower of this host: its variable, tower and size."""

    variable: str
    tower: int
    difference: float
    alone: Tuple[str, ...] = ()  # trainable variables that are not on every tower

    def __str__(self) -> str:
        largest = f"{self.variable!r} differs by {self.difference:.3g} between tower 0 and tower {self.tower}"
        alone = (
            f"; not on every tower, and so not compared: {', '.join(map(repr, self.alone))}"
            if self.alone
            else ""
        )
        return (largest if self.difference else "all towers are equal") + alone


def comparison(copies: Copies, devices: Sequence[Any]) -> Callable[[Any], Drift]:
    """Return a function that takes a session and compares tower 0 with the others in it; its ops are added now.

    NaN differs from any number by infinity, and from NaN by 0. Complex numbers and strings, which no optimizer has,
    count as equal.
    """
    first, *others = copies
    rows = []
    for row, device in zip(others, devices[1:]):
        with tf1.device(device):
            rows.append(tf.stack([_largest_difference(*pair) for pair in zip(row, first)]))

    def compare(session: Any) -> Drift:
        values = np.asarray(session.run(rows))
        if not values.size or values.max() <= 0:
            return Drift("", 0, 0.0)
        tower, index = np.unravel_index(values.argmax(), values.shape)
        return Drift(first[index].op.name, int(tower) + 1, float(values[tower, index]))

    return compare


def _largest_difference(var: Any, first: Any) -> Any:
    dtype = var.dtype.base_dtype
    if not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        return tf.constant(0.0, tf.float64)
    value, other = (tf.cast(tf.reshape(v.read_value(), [-1]), tf.float64) for v in (var, first))
    is_nan, zeros = tf.math.is_nan, tf.zeros_like(value)
    same = tf.equal(value, other) | (is_nan(value) & is_nan(other))
    difference = tf.where(is_nan(value - other), zeros + float("inf"), tf.abs(value - other))
    return tf.reduce_max(tf.where(same, zeros, difference))
