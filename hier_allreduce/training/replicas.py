"""Equal towers: which variables are copies of each other, copying tower 0's to the others, and comparing them.

A variable's index in the rows, or its name, tells its tower and its copy on tower 0::

    tower1/w               is trained: its index counts                    tower0/w
    tower1/w/Adam          belongs to one: that one's name counts          tower0/w/Adam
    tower1/tower1/w/EMA    belongs to one, in its tower's scope            tower0/tower0/w/EMA
    tower1/bn/mean         is another one: its tower's scope counts        tower0/bn/mean
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from ..errors import HierAllreduceError
from ..formatting import count
from ..graph import copy_from_tower_0, tower_scopes
from ..graph.tf import tf1

Copies = Dict[str, Tuple[int, str]]  # of each variable's name: its tower, and the name of its copy on tower 0


class Replicas(NamedTuple):
    """Variables that every tower has a copy of, K×V ``rows[tower][variable]``; and names of all others."""

    rows: List[List[Any]]
    left_out: List[str]

    @property
    def names(self) -> List[str]:
        """The V names on tower 0."""
        return [var.op.name for row in self.rows[:1] for var in row]

    def drift(self, values: Sequence[Sequence[float]]) -> Drift:
        """Return the largest of the (K−1)×V ``values`` of :func:`differences`."""
        drift = Drift("", 0, 0.0, len(self.left_out))
        for tower, row in enumerate(values, 1):
            for name, difference in zip(self.names, row):
                if difference > drift.difference:
                    drift = drift._replace(variable=name, tower=tower, difference=float(difference))
        return drift


class Drift(NamedTuple):
    """The largest difference between tower 0 and another tower of this host: its variable, tower and size.

    ``left_out`` is the number of variables that were not compared, as no copy of them was found on every tower.
    """

    variable: str
    tower: int
    difference: float
    left_out: int = 0

    def __str__(self) -> str:
        if self.difference:
            return f"{self.variable!r} differs by {self.difference:.3g} between tower 0 and tower {self.tower}"
        if not self.left_out:
            return "all towers are equal"
        return (
            f"all towers are equal, except for {count(self.left_out, 'variable')} without a copy on every tower, not"
            " compared"
        )


def copies_of(updates: Sequence[Sequence[Sequence[Any]]]) -> Copies:
    """Return the towers of all trained variables, and the names of their copies on tower 0.

    Args:
        updates: of each update, K×N variables.

    Raises:
        HierAllreduceError: an update pairs a variable with another one of tower 0 than an earlier update did.
    """
    copies: Copies = {}
    for rows in updates:
        for tower, row in enumerate(rows):
            for var, first in zip(row, rows[0]):
                known = copies.setdefault(var.op.name, (tower, first.op.name))
                if known != (tower, first.op.name):
                    raise HierAllreduceError(
                        f"tower {tower}: {var.op.name!r} is listed as a copy of tower 0's {first.op.name!r}, but in an"
                        f" earlier apply_gradients it was tower {known[0]}'s copy of {known[1]!r}; list the variables"
                        " in one order on every tower"
                    )
    return copies


def owner_of(name: str, copies: Copies) -> Optional[Tuple[str, int, str]]:
    """Split ``"ema/tower1/w/average"``: return ``"ema/"``, the tower of ``tower1/w``, and the name on tower 0."""
    levels = name.split("/")
    for start in range(len(levels)):
        for end in range(len(levels), start, -1):
            found = copies.get("/".join(levels[start:end]))
            if found:
                before = "".join(f"{level}/" for level in levels[:start])
                return before, found[0], before + "/".join([found[1], *levels[end:]])
    return None


def match_created(
    trained: Sequence[Sequence[Any]], created: Sequence[Sequence[Any]]
) -> Tuple[List[List[Any]], List[Any]]:
    """Match the variables that K updates created: slots by names, others by kind and then by order.

    Args:
        trained: K×N variables that they update.
        created: K lists of variables.

    Returns:
        K rows of copies, and the variables that only some updates created, such as Adam's beta powers.
    """
    copies = copies_of([trained])
    towers = []
    for tower, variables in enumerate(created):
        groups: Dict[Any, List[Any]] = defaultdict(list)
        for var in variables:
            owner = owner_of(var.op.name, copies)
            # without numbers, w_1/Adam_2 is w/Adam
            kind = re.sub(r"_\d+(?=/|$)", "", var.op.name), var.dtype.base_dtype, str(var.shape)
            groups[owner[2] if owner and owner[1] == tower else kind].append(var)
        towers.append(groups)
    keys = [key for key, found in towers[0].items() if all(len(tower.get(key, ())) == len(found) for tower in towers)]
    rows = [[var for key in keys for var in tower[key]] for tower in towers]
    matched = {id(var) for row in rows for var in row}
    return rows, [var for variables in created for var in variables if id(var) not in matched]


def find_replicas(updates: Sequence[Any]) -> Replicas:
    """Find the copies among all variables of the current graph, after one or more updates of the same K towers.

    Variables that are local on tower 0, such as metrics, count differently on every tower and are no copies, unless
    they belong to a trained variable.

    Args:
        updates: :class:`.Updated`.
    """
    copies = copies_of([update.trained for update in updates])
    scopes = {item for update in updates for item in _scopes(update.trained)}
    by_length = sorted(scopes, key=lambda item: (-len(item[0]), item))  # "" is a prefix of all names
    columns = list({id(column[0]): column for update in updates for column in zip(*update.rows)}.values())
    settled = [var for column in columns for var in column] + [var for update in updates for var in update.single]
    ids = set(map(id, [*settled, *tf1.get_collection(tf1.GraphKeys.GLOBAL_STEP)]))
    found: Dict[str, Dict[int, Any]] = defaultdict(dict)  # by name on tower 0, by tower
    for var in tf1.global_variables() + tf1.local_variables():
        identity = None if id(var) in ids else _on_tower_0(var.op.name, copies, by_length)
        if identity:
            found[identity[1]][identity[0]] = var
    left_out, private = [], set(map(id, tf1.local_variables()))
    for name, by_tower in found.items():
        if len(by_tower) < len(updates[0].trained):
            left_out += [var.op.name for var in by_tower.values()]
        elif id(by_tower[0]) not in private or owner_of(name, copies):
            columns.append(tuple(by_tower[tower] for tower in sorted(by_tower)))
    return Replicas(list(map(list, zip(*columns))), sorted(left_out))


def _scopes(trained: Sequence[Sequence[Any]]) -> List[Tuple[str, int, str]]:
    """Return the scope of each tower in the names of K×N variables, the tower's number and tower 0's scope."""
    scopes = tower_scopes(trained)
    return [(scope, tower, scopes[0]) for tower, scope in enumerate(scopes)]


def _on_tower_0(name: str, copies: Copies, scopes: Sequence[Tuple[str, int, str]]) -> Optional[Tuple[int, str]]:
    """Return the tower of a variable and the name of its copy on tower 0; None if it belongs to no tower.

    Args:
        name: of the variable.
        copies: the trained variables.
        scopes: towers' scopes, their towers and tower 0's scope, the longest first.
    """
    owner = owner_of(name, copies)
    if owner:
        before, tower, renamed = owner
        around = _by_scope(before, [item for item in scopes if item[0]])
        if around is None:
            return tower, renamed
        if around[0] == tower:
            return tower, around[1] + renamed[len(before) :]
    return _by_scope(name, scopes)


def _by_scope(name: str, scopes: Sequence[Tuple[str, int, str]]) -> Optional[Tuple[int, str]]:
    return next(((tower, first + name[len(scope) :]) for scope, tower, first in scopes if name.startswith(scope)), None)


# ---- ops ---------------------------------------------------------------------------------------------


def broadcast(replicas: Replicas, devices: Sequence[Any]) -> Any:
    """Return an op that copies tower 0's variables to the other towers. Adds ops."""
    values = []
    for var in replicas.rows[0]:
        with tf1.device(devices[0]):
            values.append(var.read_value())
    assigned = []
    for tower, row in enumerate(copy_from_tower_0(values, devices)):
        with tf1.device(devices[tower]):
            assigned += [var.assign(value).op for var, value in zip(replicas.rows[tower], row) if tower]
    return tf.group(*assigned)


def differences(replicas: Replicas, devices: Sequence[Any]) -> Any:
    """Return a (K−1)×V tensor of the largest differences between tower 0 and the other towers. Adds ops.

    NaN differs from any number by infinity, and from NaN by 0. Complex numbers, strings and quantized numbers, which
    no optimizer has, count as equal.
    """
    first, *others = replicas.rows
    rows = []
    for row, device in zip(others, devices[1:]):
        with tf1.device(device):
            rows.append(tf.stack([_largest_difference(*pair) for pair in zip(row, first)]))
    return tf.stack(rows) if rows else tf.zeros([0, len(first)], tf.float64)


def _largest_difference(var: Any, first: Any) -> Any:
    dtype = var.dtype.base_dtype
    if not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        return tf.constant(0.0, tf.float64)
    exact = tf.int64 if dtype.is_integer else tf.float64  # float64 has not all 64-bit integers
    whole = [tf.cast(tf.reshape(v.read_value(), [-1]), exact) for v in (var, first)]
    values, others = (tf.cast(v, tf.float64) for v in whole)
    is_nan, zeros = tf.math.is_nan, tf.zeros_like(values)
    difference = tf.abs(values - others)
    difference = tf.where(is_nan(difference), zeros + float("inf"), difference)
    difference = tf.maximum(difference, 1.0) if dtype.is_integer else difference
    same = tf.equal(*whole) | (is_nan(values) & is_nan(others))
    # the 0 is for variables without elements
    return tf.reduce_max(tf.concat([tf.where(same, zeros, difference), tf.zeros([1], tf.float64)], 0))
