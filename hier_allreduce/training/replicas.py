"""Equal towers: copying tower 0's variables to the others, and measuring differences."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from ..formatting import count
from ..graph import copy_from_tower_0, tf1, tower_scopes
from .variables import Pairs, parse_slot_name


class Replicas(NamedTuple):
    """Variables that every tower has a copy of, K×V ``rows[tower][variable]``; and names of all others."""

    rows: List[List[Any]]
    left_out: List[str]


class Drift(NamedTuple):
    """The largest difference between tower 0 and another tower: its variable, tower and size.

    ``left_out`` is the number of variables that were not compared, as no copy of them was found on every tower.
    """

    variable: str
    tower: int
    difference: float
    left_out: int = 0

    def __str__(self) -> str:
        if not self.difference:
            return self._all_equal("all towers are equal")
        return f"{self.variable!r} differs by {self.difference:.3g} between tower 0 and tower {self.tower}"

    def _all_equal(self, text: str) -> str:
        if not self.left_out:
            return text
        return f"{text}, except for {count(self.left_out, 'variable')} without a copy on every tower, not compared"


class HostDrift(Drift):
    """The largest difference between towers of this host; towers on other hosts were not compared."""

    def __str__(self) -> str:
        return super().__str__() if self.difference else self._all_equal("all towers of this host are equal")


class _Sorter:
    """Tells a variable's tower, and the name of its copy on tower 0.

    ::

        tower1/w         is trained: its place in the rows counts         1, "tower0/w"
        tower1/w/Adam    is a slot: its variable's name counts            1, "tower0/w/Adam"
        tower1/bn/mean   is another one: its tower's scope counts         1, "tower0/bn/mean"

    Args:
        rows: K rows of N (gradient, variable) pairs.
        scope: the variable scope in which the update was built.
    """

    def __init__(self, rows: Sequence[Pairs], scope: str):
        self._scope = scope
        self._trained = {
            var.op.name: (tower, first.op.name)
            for tower, row in enumerate(rows)
            for (_, var), (_, first) in zip(row, rows[0])
        }
        self._tower_scopes = tower_scopes([[var for _, var in row] for row in rows])
        # "" is a prefix of all names: the longest comes first
        self._longest_first = sorted(enumerate(self._tower_scopes), key=lambda item: -len(item[1]))

    def place(self, name: str) -> Optional[Tuple[int, str]]:
        """Return the tower and the name on tower 0, or None for a variable that belongs to no tower."""
        parts = parse_slot_name(name, self._trained, self._scope)
        if parts:
            tower, first = self._trained[parts.variable]
            return tower, parts.scope + first + parts.slot
        for tower, scope in self._longest_first:
            if name.startswith(scope):
                return tower, self._tower_scopes[0] + name[len(scope) :]
        return None


def find_replicas(
    rows: Sequence[Pairs],
    variables: Iterable[Any],
    shared: Iterable[Any] = (),
    alike: Sequence[Sequence[Any]] = (),
    scope: str = "",
    private: Iterable[Any] = (),
) -> Replicas:
    """Find the variables that every tower has a copy of, by their names within the towers' scopes, and the others.

    Args:
        rows: K rows of N (gradient, variable) pairs.
        variables: all that may have copies: weights, optimizer slots, moving averages.
        shared: those among them that exist once for all towers. They are neither copied nor reported as left out.
        alike: K rows of further variables that are known to be copies of each other.
        scope: the variable scope in which the update was built.
        private: variables of tower 0 that each tower has for itself, such as metrics, which count differently.
    """
    settled = {id(var) for var in shared} | {id(var) for row in alike for var in row}
    excluded = {id(var) for var in private}
    sorter = _Sorter(rows, scope)
    towers: List[Dict[str, Any]] = [{} for _ in rows]  # of each tower {name on tower 0: variable}
    for var in variables:
        place = None if id(var) in settled else sorter.place(var.op.name)
        if place:
            tower, name = place
            towers[tower][name] = var
    everywhere = [name for name in towers[0] if all(name in tower for tower in towers)]
    left_out = [var.op.name for tower in towers for name, var in tower.items() if name not in everywhere]
    copied = [name for name in everywhere if id(towers[0][name]) not in excluded]
    copies = [[tower[name] for name in copied] for tower in towers]
    for row, more in zip(copies, alike):
        row.extend(more)
    return Replicas(copies, sorted(left_out))


def match_created(created: Sequence[Sequence[Any]]) -> List[List[Any]]:
    """Match the variables that the towers' updates created, by names without numbers, dtypes and shapes.

    Args:
        created: K lists of variables.

    Returns:
        K rows of copies. Variables that only some updates created, such as Adam's beta powers, are left out.
    """
    towers = [_by_kind(variables) for variables in created]
    kinds = [
        kind
        for kind, variables in towers[0].items()
        if all(len(tower.get(kind, ())) == len(variables) for tower in towers)
    ]
    return [[var for kind in kinds for var in tower[kind]] for tower in towers]


def _by_kind(variables: Sequence[Any]) -> Dict[Any, List[Any]]:
    """Group variables by name without numbers (``w_1/Adam_2`` as ``w/Adam``), dtype and shape."""
    groups: Dict[Any, List[Any]] = defaultdict(list)
    for var in variables:
        groups[re.sub(r"_\d+(?=/|$)", "", var.op.name), var.dtype.base_dtype, str(var.shape)].append(var)
    return groups


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


def differences(replicas: Replicas) -> Any:
    """Return a (K−1)×V tensor of the largest differences between tower 0 and each other tower. Adds ops.

    Equal numbers differ by 0, also if both are infinite or NaN. NaN differs from any other number by infinity, and
    strings differ by 1.
    """
    rows = []
    for row in replicas.rows[1:]:
        rows.append([_largest_difference(var, first) for var, first in zip(row, replicas.rows[0])])
    return tf.stack([tf.stack(row) for row in rows])


def _largest_difference(var: Any, first: Any) -> Any:
    values, others = (tf.reshape(v.read_value(), [-1]) for v in (var, first))
    if var.dtype.base_dtype == tf.string:
        difference = tf.cast(tf.not_equal(values, others), tf.float64)
    elif var.dtype.is_integer:
        # large ones differ by less than float64 resolves; those of 4 bits can be cast to integers only
        whole = [tf.cast(v, tf.int64) for v in (values, others)]
        unequal = tf.cast(tf.not_equal(*whole), tf.float64)
        wide = [tf.cast(v, tf.float64) for v in (whole if var.dtype.size < tf.int64.size else (values, others))]
        difference = tf.maximum(unequal, tf.abs(wide[0] - wide[1]))
    else:
        difference = _float_differences(values, others)
    return tf.reduce_max(tf.concat([difference, [0.0]], 0))  # the 0 is for variables without elements


def _float_differences(values: Any, others: Any) -> Any:
    """Return the absolute differences of two real, complex or boolean vectors as float64."""
    values, others = (tf.cast(v, tf.complex128 if v.dtype.is_complex else tf.float64) for v in (values, others))
    difference, is_nan = tf.abs(values - others), tf.math.is_nan
    zeros = tf.zeros_like(difference)
    difference = tf.where(is_nan(difference), zeros + float("inf"), difference)
    same = tf.equal(values, others) | (is_nan(tf.abs(values)) & is_nan(tf.abs(others)))
    return tf.where(same, zeros, difference)


def drift(replicas: Replicas, values: Any, hosts: int = 1) -> Drift:
    """Return the largest of the (K−1)×V ``values`` of :func:`differences`, for one of ``hosts`` hosts."""
    kind = HostDrift if hosts > 1 else Drift
    largest = kind("", 0, 0.0, len(replicas.left_out))
    for tower, row in enumerate(values, 1):
        for var, difference in zip(replicas.rows[0], row):
            if difference > largest.difference:
                largest = kind(var.op.name, tower, float(difference), largest.left_out)
    return largest
