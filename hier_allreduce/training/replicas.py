"""Equal towers: which variables are replicas, how tower 0's are copied, and how they compare.

A variable has a *replica* on each tower. Trained variables are replicas by their index in the rows;
their names show the towers' scopes. Other variables are replicas if their names differ by these
scopes only, wherever the scope is::

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

from ..cluster.collectives import fingerprint
from ..compat import outer_graph, tf1
from ..errors import HierAllreduceError
from ..graph.collectives import broadcast as copies_of
from ..graph.names import where
from ..graph.record import log_once
from .options import Options
from .towers import ReplicatedVariables

# the last level in the names of batch normalization's averages, in Keras and in tf.layers
_AVERAGES = ("moving_mean", "moving_variance")


# ---- which variables are replicas ----------------------------------------------------------------


def note_replicas(replicas: ReplicatedVariables, devices: Sequence[Any]) -> None:
    """Note the replicas of one update, for :func:`replicas_by_name` on the same devices.

    The names of the variables are kept, because the variables would keep their graph alive.
    """
    noted = _noted_names(devices)
    for names_there, new_names in zip(noted, _names_of(replicas)):
        names_there += new_names


def distinct(replicas: ReplicatedVariables) -> ReplicatedVariables:
    """Return replicas, each once: several updates may have the same."""
    column_by_id = {id(column[0]): column for column in zip(*replicas)}
    return [list(variables) for variables in zip(*column_by_id.values())]


def replicas_by_name(known: ReplicatedVariables, devices: Sequence[Any]) -> ReplicatedVariables:
    """Return ``known`` replicas, each once, and all others that are replicas by their names.

    Variables that are local on tower 0, such as metrics, count differently on every tower and are
    no replicas.
    """
    # Trained variables are replicas by their place; only the others are found by their names.
    replicas = distinct(known)
    known_ids = set(map(id, itertools.chain(*replicas)))
    local_ids = set(map(id, tf1.local_variables()))
    noted = zip(_names_of(known), _noted_names(devices))
    tower_names = TowerNames([[*names, *earlier] for names, earlier in noted])
    towers: List[Dict[str, List[Any]]] = [defaultdict(list) for _ in known]
    # A variable may be in both collections, and counts once.
    variable_by_id = {id(var): var for var in tf1.global_variables() + tf1.local_variables()}
    for var in variable_by_id.values():
        tower, name_on_0 = tower_names.find(var.op.name)
        is_private = tower == 0 and id(var) in local_ids
        if id(var) not in known_ids and not is_private:
            towers[tower][name_on_0].append(var)
    # Where towers have unequally many variables of a name, nobody can tell which are replicas.
    for name_on_0, on_tower_0 in towers[0].items():
        same_name = [tower.get(name_on_0, []) for tower in towers]
        if all(len(variables) == len(on_tower_0) for variables in same_name):
            for variables, more in zip(replicas, same_name):
                variables += more
    return replicas


def columns_elsewhere(devices: Sequence[Any]) -> List[Tuple[Any, ...]]:
    """Return the replicas of each variable that an update on other devices than these keeps equal.

    It is an update in the current graph, and its own tower 0 comes first.
    """
    variables = tf1.global_variables() + tf1.local_variables()
    variable_by_name = {var.op.name: var for var in variables}
    replicated: List[Tuple[Any, ...]] = []
    for there, names in _noted.get(outer_graph(), {}).items():
        if there == tuple(devices):
            continue
        # A variable may be in no collection, and is then not saved either.
        columns = [column for column in zip(*names) if variable_by_name.keys() >= set(column)]
        known: ReplicatedVariables = [[] for _ in there]
        for column in columns:
            for variables_there, noted in zip(known, column):
                variables_there.append(variable_by_name[noted])
        replicated += zip(*replicas_by_name(known, there))
    return replicated


def of_model_and_own(
    known: ReplicatedVariables, devices: Sequence[Any]
) -> Tuple[ReplicatedVariables, Tuple[str, ...]]:
    """Return the replicas that belong to the model, and the names of those of a tower alone.

    To the model belong trained variables and what is named after them, such as slots; variables in
    the collections ``TRAINABLE_VARIABLES``, ``MODEL_VARIABLES`` and ``MOVING_AVERAGE_VARIABLES``;
    and the averages of batch normalization. Others in a tower's scope are its own: its share of the
    data, the state of its recurrent layers. A lone tower has none that another one could lack.
    """
    in_model = _ids_in_model_collections()
    # A slot or an average has the name of its variable somewhere in its own.
    names_of_known = {*_names_of(known)[0], *_noted_names(devices)[0]}

    def is_of_layer(var: Any) -> bool:
        return id(var) in in_model or var.op.name.split("/")[-1] in _AVERAGES

    def is_of_model(var: Any) -> bool:
        levels = var.op.name.split("/")
        paths = itertools.combinations(range(len(levels) + 1), 2)
        parts = ("/".join(levels[start:end]) for start, end in paths)
        return is_of_layer(var) or any(part in names_of_known for part in parts)

    # Towers may rightly differ in variables that do not belong to the model, so these stay.
    kept = []
    own = []
    replicas = replicas_by_name(known, devices)
    for column in zip(*replicas):
        if is_of_model(column[0]):
            kept.append(column)
        elif len(devices) > 1:
            own.append(column[0].op.name)
    if own:
        log_once(
            "not copied from tower 0 to the others, because each tower may have its own:"
            f" {_first_of(own)};"
            " tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.MODEL_VARIABLES, variable)"
            " makes it one of the model"
        )
    # Keras numbers the layers of a graph, so that towers may have other names for one layer.
    with_replicas = set(map(id, itertools.chain(*replicas, *columns_elsewhere(devices))))
    layers = filter(is_of_layer, tf1.global_variables())
    alone = [var.op.name for var in layers if id(var) not in with_replicas]
    if alone and len(devices) > 1:
        log_once(
            "not copied from tower 0 to the others, because no other tower has a variable of that"
            f" name: {_first_of(alone)}; if towers have copies of it, list them in the rows, at one"
            " place on every tower, with the gradient None"
        )
    return [list(variables) for variables in zip(*kept)], tuple(own)


def _ids_in_model_collections() -> Set[int]:
    keys = tf1.GraphKeys
    collections = keys.TRAINABLE_VARIABLES, keys.MODEL_VARIABLES, keys.MOVING_AVERAGE_VARIABLES
    return set(map(id, itertools.chain(*map(tf1.get_collection, collections))))


def _first_of(names: Sequence[str]) -> str:
    """Return the first three names for a message, which should not become long."""
    return ", ".join(map(repr, names[:3])) + (", …" if names[3:] else "")


_noted: WeakKeyDictionary = WeakKeyDictionary()  # by graph, and by devices: K rows of names


def _noted_names(devices: Sequence[Any]) -> List[List[str]]:
    """Return K rows of the names of replicas that updates in the current graph noted."""
    names_by_devices = _noted.setdefault(outer_graph(), {})
    names: List[List[str]] = names_by_devices.setdefault(tuple(devices), [[] for _ in devices])
    return names


def _names_of(variables: ReplicatedVariables) -> List[List[str]]:
    """Return the names of K rows of variables."""
    names = []
    for variables_there in variables:
        names.append([var.op.name for var in variables_there])
    return names


class TowerNames:
    """The tower of a variable, and the name of its copy on tower 0, by the variable's name.

    The first known variable, or scope of a tower, in the name tells the tower. Names without any
    are tower 0's. If towers have no scopes, ``w_1`` counts as one.

    Args:
        names: K×N names of known replicas. Trained variables come first, because what else an
            update creates may have a scope on other towers only: ``steps``, ``tower1/steps``.
    """

    def __init__(self, names: Sequence[Sequence[str]]):
        # both to a tower, and to the name on tower 0
        self._copy_by_variable: Dict[str, Tuple[int, str]] = {}
        self._copy_by_scope: Dict[str, Tuple[int, str]] = {}
        for tower, names_there in enumerate(names):
            for variable, copy_on_0 in zip(names_there, names[0]):
                self._copy_by_variable[variable] = tower, copy_on_0
                if tower == 0:
                    continue
                # The levels with which both names end are the variable's, so the others are scopes.
                levels = variable.split("/")
                levels_on_0 = copy_on_0.split("/")
                while levels and levels_on_0 and levels[-1] == levels_on_0[-1]:
                    levels.pop()
                    levels_on_0.pop()
                scope_on_0 = "/".join(levels_on_0)
                self._copy_by_scope.setdefault("/".join(levels), (tower, scope_on_0))
                self._copy_by_scope.setdefault(scope_on_0, (0, scope_on_0))

    def find(self, variable: str) -> Tuple[int, str]:
        """Return the tower of a variable's name, and the name of its copy on tower 0."""
        tower: Optional[int] = None
        renamed: List[str] = []
        levels = variable.split("/")
        while levels:
            # The longest beginning counts, because a variable's name may be another one's scope.
            for length in range(len(levels), 0, -1):
                beginning = "/".join(levels[:length])
                copy_on_0 = self._copy_by_variable.get(beginning)
                if copy_on_0 is None and tower is None and length < len(levels):
                    copy_on_0 = self._copy_by_scope.get(beginning)
                # A name belongs to one tower, so what it has of another tower's is a coincidence.
                if copy_on_0 is not None and tower in (None, copy_on_0[0]):
                    tower = copy_on_0[0]
                    renamed.append(copy_on_0[1])
                    levels = levels[length:]
                    break
            else:
                renamed.append(levels.pop(0))
        return tower or 0, "/".join(filter(None, renamed))


# ---- copying and comparing -----------------------------------------------------------------------


def broadcast(replicas: ReplicatedVariables, devices: Sequence[Any]) -> Any:
    """Return an op that copies tower 0's variables to the other towers.

    Raises:
        HierAllreduceError: a variable has another dtype or shape than the copy on tower 0.
    """
    # Variables that are found by their names alone may differ, and TensorFlow would name no tower.
    for column in zip(*replicas):
        kinds = [f"{var.dtype.base_dtype.name} {var.shape}" for var in column]
        for tower, var in enumerate(column):
            is_alike = var.shape.is_compatible_with(column[0].shape)
            if not is_alike or var.dtype.base_dtype != column[0].dtype.base_dtype:
                raise HierAllreduceError(
                    f"{where(tower, devices)}: {var.op.name!r} is {kinds[tower]}, and cannot be"
                    f" a copy of tower 0's {column[0].op.name!r}, which is {kinds[0]}; give them"
                    " one dtype and shape or, if each tower has its own, names that differ by more"
                    " than the towers' scopes"
                )
    on_tower_0 = []
    for var in replicas[0]:
        with _device_of(var):
            on_tower_0.append(var.read_value())
    assigned = []
    for variables, values_there in zip(replicas[1:], copies_of(on_tower_0, devices)[1:]):
        for var, new_value in zip(variables, values_there):
            with _device_of(var):
                assigned.append(var.assign(new_value).op)
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
        own: variables that no update keeps equal, because each tower may have its own.
    """

    variables: Tuple[str, ...] = ()
    tower: int = 0
    alone: Tuple[str, ...] = ()
    own: Tuple[str, ...] = ()

    def __str__(self) -> str:
        sentence = "all towers are equal"
        if self.variables:
            more = f" and {len(self.variables) - 1} more" if self.variables[1:] else ""
            verb = "differ" if more else "differs"
            sentence = f"{self.variables[0]!r}{more} {verb} between tower 0 and tower {self.tower}"
        if self.alone:
            listed = ", ".join(map(repr, self.alone))
            sentence += f"; not on every tower, and so not compared: {listed}"
        if self.own:
            own = _first_of(self.own)
            sentence += f"; not compared, because each tower may have its own: {own}"
        return sentence


def comparison(replicas: ReplicatedVariables, devices: Sequence[Any]) -> Callable[[Any], Drift]:
    """Return a function that compares all towers in a session; its ops are added now."""
    names = [var.op.name for var in replicas[0]]
    fingerprints: List[List[Any]] = [[] for _ in devices]  # K×V
    before: List[Any] = []
    for column in zip(*replicas):
        for var, fingerprints_there in zip(column, fingerprints):
            # One after another, because the CPU needs a copy of each value that is on a GPU.
            with tf.control_dependencies(before):
                before = [_fingerprint_of(var)]
            fingerprints_there += before

    def compare(session: Any) -> Drift:
        values = np.array(session.run(fingerprints))
        differ = values != values[0]
        different = [names[n] for n in np.flatnonzero(differ.any(axis=0))]
        towers = np.flatnonzero(differ.any(axis=1))
        return Drift(tuple(different), int(towers[0])) if different else Drift()

    return compare


def _fingerprint_of(var: Any) -> Any:
    """Return the fingerprint of a variable's value, which is read where the variable is."""
    with _device_of(var):
        return fingerprint(var.read_value())


def is_step_to_compare(step: int, every: Optional[int] = None) -> bool:
    """Return whether towers are compared after a step, counted from 1.

    By default that is in steps 1, 2, 4, 8, … and then each thousandth: most faults show at once.
    """
    if every is None:
        return step & (step - 1) == 0 or step % 1000 == 0
    return bool(every) and step % every == 0


class PeriodicComparison:
    """Compares towers after some steps of a training; a difference is an error.

    Args:
        compare: a function that :func:`comparison` has returned.
        options: of the training.

    Attributes:
        steps: those that were counted.
    """

    def __init__(self, compare: Callable[[Any], Drift], options: Options):
        self._compare = compare
        self._options = options
        self.steps = 0
        self._equal_after = 0  # the last step after which all towers were equal

    def after_step(self, session: Any) -> None:
        """Count a step, and compare if it is one to compare.

        Raises:
            HierAllreduceError: the towers differ.
        """
        self.steps += 1
        if not is_step_to_compare(self.steps, self._options.check_replicas_every):
            return
        drift = self._compare(session)
        if drift.variables:
            raise HierAllreduceError(
                f"after step {self.steps} {drift}; they were equal after step {self._equal_after}."
                " Either the program assigns to a variable on one tower only, or init_op has not"
                " run after the variables got their values, or two train ops update these variables"
                " in one run, or the transform does not do the same on each tower"
            )
        self._equal_after = self.steps
