"""Equal towers: which variables are copies, how tower 0's get to the others, and how they compare.

Trained variables are copies by their index in the rows. Their names show the towers' scopes. Other
variables are copies if their names differ by these scopes only, wherever the scope is::

    tower1/w/Adam, tower1/bn/mean            tower0/w/Adam, tower0/bn/mean
    ema/tower1/w/Average                     ema/tower0/w/Average

tensorpack's tower 0 has no scope: there "tower1/bn/mean" is the copy of "bn/mean".
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from ..compat import outer_graph, tf1
from ..graph import copy_from_tower_0

ReplicatedVariables = List[List[Any]]  # K×V variables; a column holds the copies of one variable
ByName = Dict[str, List[Any]]  # a tower's variables, by their names on tower 0


def all_variables() -> List[Any]:
    """Return the global and the local variables of the current graph, each once."""
    variables = tf1.global_variables() + tf1.local_variables()
    return list({id(var): var for var in variables}.values())


# ---- which variables are copies ------------------------------------------------------------------


def with_created(
    trained: ReplicatedVariables,
    created: Sequence[Sequence[Any]],
    names_on_tower_0: Dict[int, str],
) -> ReplicatedVariables:
    """Return the K×N trained variables, and after them the copies that K updates created.

    Copies have the same name but for the towers' scopes, or the name in ``names_on_tower_0`` by
    ``id(variable)``. Otherwise they have the same name but for numbers, and the same order. A
    variable that only some updates created is left out.
    """
    tower_names = TowerNames(_names_of(trained))
    names = []
    for row in created:
        row_names = []
        for var in row:
            by_scope = tower_names.name_on_tower_0(var.op.name)
            row_names.append(names_on_tower_0.get(id(var), by_scope))
        names.append(row_names)
    shared = set(names[0]).intersection(*names[1:])

    towers: List[ByName] = [defaultdict(list) for _ in created]
    for by_name, row, row_names in zip(towers, created, names):
        for var, name in zip(row, row_names):
            unnumbered = re.sub(r"_\d+(?=/|$)", "", name)
            by_name[name if name in shared else unnumbered].append(var)
    return _appended(trained, _columns(towers))


def note_copies(copies: ReplicatedVariables, devices: Sequence[Any]) -> None:
    """Note the copies of one update, for :func:`find_copies` of any update on the same K devices.

    The names of the variables are kept, because the variables would keep their graph alive.
    """
    noted = _noted_names(devices)
    for names, new_names in zip(noted, _names_of(copies)):
        names += new_names


def find_copies(known: ReplicatedVariables, devices: Sequence[Any]) -> ReplicatedVariables:
    """Return ``known`` copies, each once, and the other copies in the current graph.

    These are the copies of other updates on the same K devices, and variables whose names differ by
    the towers' scopes only. Variables that are local on tower 0, such as metrics, count
    differently on every tower and are no copies.
    """
    columns = {id(column[0]): column for column in zip(*known)}
    once = list(zip(*columns.values()))
    is_known = set(map(id, itertools.chain(*once)))
    local = set(map(id, tf1.local_variables()))
    tower_names = TowerNames(_appended(_names_of(known), _noted_names(devices)))
    towers: List[ByName] = [defaultdict(list) for _ in known]
    for var in all_variables():
        tower, name = tower_names.find(var.op.name)
        is_private = tower == 0 and id(var) in local
        if id(var) not in is_known and not is_private:
            towers[tower][name].append(var)
    return _appended(once, _columns(towers))


_noted: WeakKeyDictionary = WeakKeyDictionary()  # by graph, and by devices: K rows of names


def _noted_names(devices: Sequence[Any]) -> List[List[str]]:
    """Return K rows of the names of copies that updates in the current graph noted."""
    by_devices = _noted.setdefault(outer_graph(), {})
    rows: List[List[str]] = by_devices.setdefault(tuple(devices), [[] for _ in devices])
    return rows


def _names_of(variables: ReplicatedVariables) -> List[List[str]]:
    """Return the names of K rows of variables."""
    rows = []
    for row in variables:
        rows.append([var.op.name for var in row])
    return rows


def _appended(rows: Sequence[Sequence[Any]], others: Sequence[Sequence[Any]]) -> List[List[Any]]:
    """Return K rows, each followed by its row of ``others``."""
    return [[*row, *after] for row, after in zip(rows, others)]


def _columns(towers: Sequence[ByName]) -> ReplicatedVariables:
    """Return the variables with a name of which all towers have equally many."""
    rows: ReplicatedVariables = [[] for _ in towers]
    for name, first in towers[0].items():
        found = [tower.get(name, []) for tower in towers]
        if all(len(variables) == len(first) for variables in found):
            for row, variables in zip(rows, found):
                row += variables
    return rows


class TowerNames:
    """The tower of a variable, and the name of its copy on tower 0, by the variable's name.

    The first known variable, or scope of a tower, in the name tells the tower. Names without any
    are tower 0's. If towers have no scopes, ``w_1`` counts as one.

    Args:
        names: K×N names of known copies. Trained variables come first, because what else an update
            creates may have a scope on other towers only: ``steps``, ``tower1/steps``.
    """

    def __init__(self, names: Sequence[Sequence[str]]):
        self._variables: Dict[str, Tuple[int, str]] = {}  # tower, and name on tower 0
        self._scopes: Dict[str, Tuple[int, str]] = {}
        for tower, row in enumerate(names):
            for name, first in zip(row, names[0]):
                self._variables[name] = tower, first
                if tower:
                    self._add_scope(tower, name, first)

    def _add_scope(self, tower: int, name: str, first: str) -> None:
        """Note the scopes in which a variable and its copy on tower 0 have the same name."""
        levels = name.split("/")
        first_levels = first.split("/")
        while levels and first_levels and levels[-1] == first_levels[-1]:
            levels.pop()
            first_levels.pop()
        on_tower_0 = "/".join(first_levels)
        self._scopes.setdefault("/".join(levels), (tower, on_tower_0))
        self._scopes.setdefault(on_tower_0, (0, on_tower_0))

    def find(self, name: str) -> Tuple[int, str]:
        """Return the tower of a variable, and the name of its copy on tower 0."""
        tower: Optional[int] = None
        renamed: List[str] = []
        levels = name.split("/")
        while levels:
            found, length = self._beginning(levels, tower)
            if found is None:
                renamed.append(levels.pop(0))
                continue
            tower, on_tower_0 = found
            renamed.append(on_tower_0)
            levels = levels[length:]
        return tower or 0, "/".join(filter(None, renamed))

    def name_on_tower_0(self, name: str) -> str:
        """Return the name of a variable's copy on tower 0."""
        return self.find(name)[1]

    def _beginning(
        self, levels: Sequence[str], tower: Optional[int]
    ) -> Tuple[Optional[Tuple[int, str]], int]:
        """Return the longest variable or scope with which ``levels`` begin, and its length.

        It belongs to ``tower``, if that is known.
        """
        for length in range(len(levels), 0, -1):
            key = "/".join(levels[:length])
            found = self._variables.get(key)
            if found is None and tower is None and length < len(levels):
                found = self._scopes.get(key)
            if found is not None and tower in (None, found[0]):
                return found, length
        return None, 0


# ---- copying and comparing -----------------------------------------------------------------------


def broadcast(copies: ReplicatedVariables, devices: Sequence[Any]) -> Any:
    """Return an op that copies tower 0's variables to the other towers."""
    with tf1.device(devices[0]):
        values = [var.read_value() for var in copies[0]]
    assigned = []
    for tower, row in enumerate(copy_from_tower_0(values, devices)):
        with tf1.device(devices[tower]):
            others = zip(copies[tower], row) if tower else []
            assigned += [var.assign(value).op for var, value in others]
    return tf.group(*assigned)


class Drift(NamedTuple):
    """The largest difference between tower 0 and another tower of this host.

    Attributes:
        variable: that differs most; "" if none does.
        tower: where it differs.
        difference: of one of its elements.
        alone: trainable variables that are not on every tower.
    """

    variable: str
    tower: int
    difference: float
    alone: Tuple[str, ...] = ()

    def __str__(self) -> str:
        text = "all towers are equal"
        if self.difference:
            size = f"{self.difference:.3g}"
            text = f"{self.variable!r} differs by {size} between tower 0 and tower {self.tower}"
        if self.alone:
            names = ", ".join(map(repr, self.alone))
            text += f"; not on every tower, and so not compared: {names}"
        return text


def comparison(copies: ReplicatedVariables, devices: Sequence[Any]) -> Callable[[Any], Drift]:
    """Return a function that compares tower 0 with the others in a session; its ops are added now.

    NaN differs from any number by infinity, and from NaN by 0. Complex numbers and strings, which
    no optimizer has, count as equal.
    """
    first = copies[0]
    rows = []
    for row, device in zip(copies[1:], devices[1:]):
        with tf1.device(device):
            differences = [_largest_difference(var, other) for var, other in zip(row, first)]
            rows.append(tf.stack(differences))

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
    value = tf.cast(tf.reshape(var.read_value(), [-1]), tf.float64)
    other = tf.cast(tf.reshape(first.read_value(), [-1]), tf.float64)
    zeros = tf.zeros_like(value)
    are_both_nan = tf.math.is_nan(value) & tf.math.is_nan(other)
    is_one_nan = tf.math.is_nan(value - other)
    difference = tf.where(is_one_nan, zeros + float("inf"), tf.abs(value - other))
    return tf.reduce_max(tf.where(tf.equal(value, other) | are_both_nan, zeros, difference))
