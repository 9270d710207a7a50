"""Equal towers: which variables are copies, how tower 0's get to the others, and how they compare.

Trained variables are copies by their index in the rows. Their names show the towers' scopes. Other
variables are copies if their names differ by these scopes only, wherever the scope is::

    tower1/w/Adam, tower1/bn/moving_mean     tower0/w/Adam, tower0/bn/moving_mean
    ema/tower1/w/Average                     ema/tower0/w/Average

tensorpack's tower 0 has no scope: there "tower1/bn/mean/EMA" is the copy of "bn/mean/EMA".
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from ..checksums import checksum_of
from ..compat import outer_graph, tf1
from ..errors import HierAllreduceError
from ..graph import copy_from_tower_0
from ..graph.record import log_once
from .towers import ReplicatedVariables

ByName = Dict[str, List[Any]]  # a tower's variables, by their names on tower 0

# the last level in the names of batch normalization's averages, in Keras and in tf.layers
_AVERAGES = ("moving_mean", "moving_variance")


def all_variables() -> List[Any]:
    """Return the global and the local variables of the current graph, each once."""
    variables = tf1.global_variables() + tf1.local_variables()
    return list({id(var): var for var in variables}.values())


# ---- which variables are copies ------------------------------------------------------------------


def note_copies(copies: ReplicatedVariables, devices: Sequence[Any]) -> None:
    """Note the copies of one update, for :func:`copies_by_name` of any update on the same devices.

    The names of the variables are kept, because the variables would keep their graph alive.
    """
    noted = _noted_names(devices)
    for names, new_names in zip(noted, _names_of(copies)):
        names += new_names


def copies_by_name(known: ReplicatedVariables, devices: Sequence[Any]) -> ReplicatedVariables:
    """Return ``known`` copies, each once, and all variables that have copies by their names.

    Variables that are local on tower 0, such as metrics, count differently on every tower and are
    no copies.
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


def copies_of_model(known: ReplicatedVariables, devices: Sequence[Any]) -> ReplicatedVariables:
    """Return those :func:`copies_by_name` that belong to the model, and not to a tower alone.

    These are trained variables and what is named after them, such as slots; variables in the
    collections ``TRAINABLE_VARIABLES``, ``MODEL_VARIABLES`` and ``MOVING_AVERAGE_VARIABLES``; and
    the averages of batch normalization. Others in a tower's scope are its own: its share of the
    data, the state of its recurrent layers.
    """
    in_model: Set[int] = set()
    keys = tf1.GraphKeys
    collections = keys.TRAINABLE_VARIABLES, keys.MODEL_VARIABLES, keys.MOVING_AVERAGE_VARIABLES
    for collection in collections:
        in_model.update(map(id, tf1.get_collection(collection)))
    names_of_known = {*_names_of(known)[0], *_noted_names(devices)[0]}

    def is_of_model(var: Any) -> bool:
        levels = var.op.name.split("/")
        if id(var) in in_model or levels[-1] in _AVERAGES:
            return True
        paths = itertools.combinations(range(len(levels) + 1), 2)
        return any("/".join(levels[start:end]) in names_of_known for start, end in paths)

    columns = list(zip(*copies_by_name(known, devices)))
    own = [column[0].op.name for column in columns if not is_of_model(column[0])]
    if own:
        listed = ", ".join(map(repr, own[:3])) + (", …" if own[3:] else "")
        log_once(
            f"not copied from tower 0 to the others, because each tower may have its own: {listed};"
            " tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.MODEL_VARIABLES, variable)"
            " makes it one of the model"
        )
    kept = [column for column in columns if is_of_model(column[0])]
    return [list(row) for row in zip(*kept)]


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
    values = []
    for var in copies[0]:
        with _device_of(var):
            values.append(var.read_value())
    assigned = []
    for variables, row in zip(copies[1:], copy_from_tower_0(values, devices)[1:]):
        for var, value in zip(variables, row):
            with _device_of(var):
                assigned.append(var.assign(value).op)
    return tf.group(*assigned)


def _device_of(var: Any) -> Any:
    """Return a context for ops of a variable: the tower's GPU may have no kernel of its dtype.

    TensorFlow places the ops of a variable without a device where it places the variable.
    """
    return tf1.device(var.device or None)


class Drift(NamedTuple):
    """How the towers of this host differ.

    Attributes:
        variables: names on tower 0 of those that are not the same, to the bit, on all towers.
        tower: the first one that differs from tower 0.
        alone: trainable variables that are not on every tower.
    """

    variables: Tuple[str, ...] = ()
    tower: int = 0
    alone: Tuple[str, ...] = ()

    def __str__(self) -> str:
        text = "all towers are equal"
        if self.variables:
            more = f" and {len(self.variables) - 1} more" if self.variables[1:] else ""
            verb = "differ" if more else "differs"
            text = f"{self.variables[0]!r}{more} {verb} between tower 0 and tower {self.tower}"
        if self.alone:
            names = ", ".join(map(repr, self.alone))
            text += f"; not on every tower, and so not compared: {names}"
        return text


def comparison(copies: ReplicatedVariables, devices: Sequence[Any]) -> Callable[[Any], Drift]:
    """Return a function that compares all towers in a session; its ops are added now.

    Two checksums of each variable are compared. The host computes them one after another, because
    they need more memory than the variable.
    """
    compared = [column for column in zip(*copies) if column[0].dtype.base_dtype != tf.string]
    rows: List[List[Any]] = [[] for _ in devices]  # K×V
    before: List[Any] = []
    for column in compared:
        for var, row in zip(column, rows):
            with tf.control_dependencies(before):
                with _device_of(var):
                    value = var.read_value()
                with tf1.device("/cpu:0"):
                    row.append(checksum_of(value))
            before = [row[-1]]

    def compare(session: Any) -> Drift:
        sums = np.reshape(session.run(rows), [len(rows), -1, 2])  # K×V×2
        are_other = (sums != sums[0]).any(axis=2)
        names = [compared[n][0].op.name for n in np.flatnonzero(are_other.any(axis=0))]
        towers = np.flatnonzero(are_other.any(axis=1))
        return Drift(tuple(names), int(towers[0])) if names else Drift()

    return compare


def check_equal(drift: Drift, step: int, equal_after: int) -> None:
    """Raise a HierAllreduceError if towers differ after a step.

    Args:
        drift: how they differ.
        step: the number of the step, counted from 1.
        equal_after: the last step after which they were equal, 0 for the start.
    """
    if drift.variables:
        raise HierAllreduceError(
            f"after step {step} {drift}; they were equal after step {equal_after}. Either the"
            " program assigns to a variable on one tower only, or init_op has not run after the"
            " variables got their values, or two train ops update these variables in one run, or"
            " the transform does not do the same on each tower"
        )


def is_step_to_compare(step: int, every: Optional[int] = None) -> bool:
    """Return whether towers are compared after a step, counted from 1.

    By default that is in steps 1, 2, 4, 8, … and then each thousandth: most faults show at once.
    """
    if every is None:
        return step & (step - 1) == 0 or step % 1000 == 0
    return bool(every) and step % every == 0


class PeriodicComparison:
    """Compares towers, and hosts, after some steps of a training; a difference is an error.

    Args:
        compare: from :func:`comparison`.
        every: a number of steps, as of :func:`is_step_to_compare`.
        cluster: of several hosts, which all have to count the same steps.
    """

    def __init__(self, compare: Callable[[Any], Drift], every: Optional[int], cluster: Any):
        self._compare = compare
        self._every = every
        self._cluster = cluster
        self._equal_after = 0  # the last step after which all towers were equal

    def after_step(self, step: int, session: Any) -> None:
        """Compare if the step, counted from 1, is one to compare."""
        if not is_step_to_compare(step, self._every):
            return
        check_equal(self._compare(session), step, self._equal_after)
        self._equal_after = step
        if self._cluster is not None:
            self._cluster.check_weights(session)
