"""Equal towers: copying tower 0's variables to the others, and measuring differences."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from ..errors import HierAllreduceError
from ..formatting import count
from ..graph import copy_from_tower_0, tf1, tower_scopes
from .variables import Pairs, SlotName, parse_slot_name, scopes_in


class Replicas(NamedTuple):
    """Variables that every tower has a copy of, K×V ``rows[tower][variable]``; and names of all others."""

    rows: List[List[Any]]
    left_out: List[str]


class Drift(NamedTuple):
    """The largest difference between tower 0 and another tower: its variable, tower and size.

    ``left_out`` is the number of variables that were not compared, as no copy of them was found on every tower. Towers
    on other ``hosts`` are not compared.
    """

    variable: str
    tower: int
    difference: float
    left_out: int = 0
    hosts: int = 1

    def __str__(self) -> str:
        if self.difference:
            return f"{self.variable!r} differs by {self.difference:.3g} between tower 0 and tower {self.tower}"
        equal = "all towers of this host are equal" if self.hosts > 1 else "all towers are equal"
        if not self.left_out:
            return equal
        return f"{equal}, except for {count(self.left_out, 'variable')} without a copy on every tower, not compared"


class TowerUpdate(NamedTuple):
    """What an update of K towers tells about their variables.

    Attributes:
        rows: its K×N (gradient, variable) pairs.
        alike: K×M variables that it created and that are copies of each other, whatever their names.
        single: names of variables that it created once for all towers.
        scope: the variable scope in which it was built.
        once_a_step: the optimizers that change what all towers read: see :func:`refuse_shared_state`.
    """

    rows: Sequence[Pairs]
    alike: Sequence[Sequence[Any]] = ()
    single: Sequence[str] = ()
    scope: str = ""
    once_a_step: Sequence[Any] = ()


def trained_places(updates: Iterable[TowerUpdate]) -> Dict[str, Tuple[int, str]]:
    """Return the tower of each trained variable, and the name of its copy on tower 0, by its name.

    Raises:
        HierAllreduceError: an update pairs a variable with another one of tower 0 than an earlier update did.
    """
    places: Dict[str, Tuple[int, str]] = {}
    for update in updates:
        for tower, row in enumerate(update.rows):
            for (_, var), (_, first) in zip(row, update.rows[0]):
                place = places.setdefault(var.op.name, (tower, first.op.name))
                if place != (tower, first.op.name):
                    raise HierAllreduceError(
                        f"tower {tower}: {var.op.name!r} is listed as a copy of tower 0's {first.op.name!r}, but in an"
                        f" earlier apply_gradients it was tower {place[0]}'s copy of {place[1]!r}; list the variables"
                        " in one order on every tower"
                    )
    return places


class _Sorter:
    """Tells a variable's tower, and the name of its copy on tower 0.

    ::

        tower1/w               is trained: its place in the rows counts       1, "tower0/w"
        tower1/w/Adam          is a slot: its variable's name counts          1, "tower0/w/Adam"
        tower1/tower1/w/EMA    is one too, created in its tower's scope       1, "tower0/tower0/w/EMA"
        tower1/bn/mean         is another one: its tower's scope counts       1, "tower0/bn/mean"
    """

    def __init__(self, updates: Sequence[TowerUpdate]):
        self._trained = trained_places(updates)
        self._update_scopes = {"", *(f"{update.scope}/" for update in updates)}
        scopes = [tower_scopes([[var for _, var in row] for row in update.rows]) for update in updates]
        towers = {(scope, tower, row[0]) for row in scopes for tower, scope in enumerate(row)}
        # "" is a prefix of all names: the longest comes first
        self._tower_scopes = sorted(towers, key=lambda item: (-len(item[0]), item))

    def belongs(self, name: str) -> Optional[SlotName]:
        """Return the parts of the name of a trained variable, or of what belongs to one."""
        return parse_slot_name(name, self._trained, scopes_in(name))

    def place(self, name: str) -> Optional[Tuple[int, str]]:
        """Return the tower and the name on tower 0, or None for a variable that belongs to no tower."""
        parts = self.belongs(name)
        if parts:
            tower, first = self._trained[parts.variable]
            inside = None if parts.scope in self._update_scopes else self._by_scope(parts.scope)
            owner, scope = inside or (tower, parts.scope)
            if owner == tower:
                return tower, scope + first + parts.slot
        return self._by_scope(name)

    def _by_scope(self, name: str) -> Optional[Tuple[int, str]]:
        for scope, tower, first in self._tower_scopes:
            if name.startswith(scope):
                return tower, first + name[len(scope) :]
        return None


def find_replicas(
    updates: Sequence[TowerUpdate], variables: Iterable[Any], shared: Iterable[str] = (), private: Iterable[str] = ()
) -> Replicas:
    """Find the variables that every tower has a copy of, by their names within the towers' scopes, and the others.

    Args:
        updates: one or more updates of the same K towers.
        variables: all that may have copies: weights, optimizer slots, moving averages.
        shared: names of those that exist once for all towers. They are neither copied nor reported as left out.
        private: names of those that each tower has for itself, such as metrics, which count differently. What belongs
            to a trained variable is copied all the same.
    """
    sorter, towers = _Sorter(updates), range(len(updates[0].rows))
    settled = {*shared, *(var.op.name for update in updates for row in update.alike for var in row)}
    found: Dict[str, Dict[int, Any]] = {}  # by name on tower 0, by tower
    left_out = []
    for name, var in {var.op.name: var for var in variables}.items():
        place = None if name in settled else sorter.place(name)
        if place and found.setdefault(place[1], {}).setdefault(place[0], var) is not var:
            left_out.append(name)
    columns = []
    for copies in found.values():
        if len(copies) < len(towers):
            left_out += [var.op.name for var in copies.values()]
        elif copies[0].op.name not in private or sorter.belongs(copies[0].op.name):
            columns.append(copies)
    rows = [[copies[tower] for copies in columns] for tower in towers]
    for update in updates:
        for row, more in zip(rows, update.alike):
            row.extend(more)
    return Replicas(rows, sorted(left_out))


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
    largest = Drift("", 0, 0.0, len(replicas.left_out), hosts)
    for tower, row in enumerate(values, 1):
        for var, difference in zip(replicas.rows[0], row):
            if difference > largest.difference:
                largest = largest._replace(variable=var.op.name, tower=tower, difference=float(difference))
    return largest
