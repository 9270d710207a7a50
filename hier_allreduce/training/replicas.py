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

from ..graph import copy_from_tower_0
from ..graph.tf import tf1

Copies = List[List[Any]]  # K×V variables; a column holds copies of one variable


class Drift(NamedTuple):
    """The largest difference between tower 0 and another tower of this host: its variable, tower and size."""

    variable: str
    tower: int
    difference: float

    def __str__(self) -> str:
        if not self.difference:
            return "all towers are equal"
        return f"{self.variable!r} differs by {self.difference:.3g} between tower 0 and tower {self.tower}"


def match_created(trained: Copies, created: Sequence[Sequence[Any]]) -> Copies:
    """Return the copies among the variables that K updates created.

    Copies have the same name but for the towers' scopes. Otherwise they have the same name but for numbers, and the
    same order. A variable that only some updates created, such as Adam's beta powers, is left out.
    """
    find = finder(trained)
    names = [[find(var.op.name)[1] for var in row] for row in created]
    shared = set(names[0]).intersection(*names[1:])
    towers = []
    for row, row_names in zip(created, names):
        groups: Dict[Any, List[Any]] = defaultdict(list)
        for var, name in zip(row, row_names):
            kind = re.sub(r"_\d+(?=/|$)", "", name), var.dtype.base_dtype, str(var.shape)
            groups[name if name in shared else kind].append(var)
        towers.append(groups)
    keys = [key for key, found in towers[0].items() if all(len(tower.get(key, ())) == len(found) for tower in towers)]
    return [[var for key in keys for var in tower[key]] for tower in towers]


def find_copies(updates: Sequence[Any]) -> Copies:
    """Return the copies among all variables of the current graph, after ``Updated``s of the same K towers.

    Variables that are local on tower 0, such as metrics, count differently on every tower and are no copies.
    """
    columns = {id(column[0]): column for update in updates for column in zip(*update.rows)}
    known = {id(var) for column in columns.values() for var in column}
    others = [var for var in tf1.global_variables() + tf1.local_variables() if id(var) not in known]
    private = set(map(id, tf1.local_variables()))
    for update in updates:
        find, towers = finder(update.trained), range(len(update.trained))
        found: Dict[str, Dict[int, Any]] = defaultdict(dict)  # by name on tower 0, by tower
        for var in others:
            tower, name = find(var.op.name)
            found[name][tower] = var
        for copies in found.values():
            if len(copies) == len(towers) and id(copies[0]) not in private:
                columns[id(copies[0])] = tuple(copies[tower] for tower in towers)
    return [list(row) for row in zip(*columns.values())]


def finder(trained: Copies) -> Callable[[str], Tuple[int, str]]:
    """Return a function that takes a variable's name and returns its tower, and the name of its copy on tower 0.

    Names without the scope of another tower are tower 0's. If towers have no scopes, ``w_1`` counts as one.
    """
    scopes = {}  # of the other towers: the tower, and tower 0's scope
    for tower, row in enumerate(trained):
        for var, first in zip(row, trained[0]):
            levels, firsts = var.op.name.split("/"), first.op.name.split("/")
            while levels and firsts and levels[-1] == firsts[-1]:
                levels.pop()
                firsts.pop()
            if levels:
                scopes["/".join([*levels, ""])] = tower, "/".join([*firsts, ""])

    def find(name: str) -> Tuple[int, str]:
        for scope, (tower, first) in scopes.items():
            renamed = re.sub(f"(?<![^/]){re.escape(scope)}", first, name)
            if renamed != name:
                return tower, renamed
        return 0, name

    return find


# ---- ops ---------------------------------------------------------------------------------------------


def broadcast(copies: Copies, devices: Sequence[Any]) -> Any:
    """Return an op that copies tower 0's variables to the other towers. Adds ops."""
    values = []
    for var in copies[0]:
        with tf1.device(devices[0]):
            values.append(var.read_value())
    assigned = []
    for tower, row in enumerate(copy_from_tower_0(values, devices)):
        with tf1.device(devices[tower]):
            assigned += [var.assign(value).op for var, value in zip(copies[tower], row) if tower]
    return tf.group(*assigned)


def differences(copies: Copies, devices: Sequence[Any]) -> Any:
    """Return a (K−1)×V tensor of the largest differences between tower 0 and the other towers. Adds ops.

    NaN differs from any number by infinity, and from NaN by 0. Complex numbers and strings, which no optimizer has,
    count as equal.
    """
    first, *others = copies
    rows = []
    for row, device in zip(others, devices[1:]):
        with tf1.device(device):
            rows.append(tf.stack([_largest_difference(*pair) for pair in zip(row, first)]))
    return tf.stack(rows) if rows else tf.zeros([0, len(first)], tf.float64)


def _largest_difference(var: Any, first: Any) -> Any:
    dtype = var.dtype.base_dtype
    if not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        return tf.constant(0.0, tf.float64)
    value, other = (tf.cast(tf.reshape(v.read_value(), [-1]), tf.float64) for v in (var, first))
    is_nan, zeros = tf.math.is_nan, tf.zeros_like(value)
    same = tf.equal(value, other) | (is_nan(value) & is_nan(other))
    difference = tf.where(is_nan(value - other), zeros + float("inf"), tf.abs(value - other))
    return tf.reduce_max(tf.where(same, zeros, difference))


def drift_of(copies: Copies, values: Any) -> Drift:
    """Return the largest of the (K−1)×V ``values`` of :func:`differences`."""
    values = np.asarray(values)
    if not values.size or values.max() <= 0:
        return Drift("", 0, 0.0)
    tower, index = np.unravel_index(values.argmax(), values.shape)
    return Drift(copies[0][index].op.name, int(tower) + 1, float(values[tower, index]))
