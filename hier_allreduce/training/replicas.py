"""Who is a copy of whom: which variables are replicas, and which of them have to be equal.

A variable has a *replica* on each tower. Trained variables are replicas by their place in the rows,
their slots and the powers of beta by the optimizer's methods. All others are by one rule: the same
name with the tower's scope instead, wherever that is, and the same dtype and shape::

    tower1/bn/moving_mean      tower0/bn/moving_mean
    ema/tower1/w/Average       ema/tower0/w/Average
    tower1/bn/mean/EMA         bn/mean/EMA, as tensorpack has it
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any, Dict, Iterable, List, Mapping, Sequence, Set, Tuple

from ..compat import outer_graph, tensor_of, tf1
from ..errors import HierAllreduceError
from ..graphs import GraphMemory, memory_of
from .reads import is_computed, uses_by_variable
from .towers import Column, Towers

Names = Tuple[str, ...]  # of a column

# The last level in the names of averages that layers and TensorFlow keep of a tower's batches.
_AVERAGES = ("moving_mean", "moving_variance", "ExponentialMovingAverage")


class Scopes:
    """The levels of names by which towers differ.

    Args:
        columns: names of known replicas. Where two of them differ in a level, each has its tower's.
            A level that tower 0's lacks is a scope that it does not have.
        readers: the towers whose gradients read a variable, by its name, if not all do.
    """

    def __init__(self, columns: Iterable[Sequence[str]], readers: Mapping[str, Set[int]]):
        # by a level, and by the tower that has it: what tower 0 has in its place
        self._on_0_by_level: Dict[str, Dict[int, Names]] = defaultdict(dict)
        for names in columns:
            for tower, name in enumerate(names):
                levels, on_0 = _differing(_levels(name), _levels(names[0]))
                more = max(0, len(levels) - len(on_0))
                for level in levels[:more]:
                    self._on_0_by_level[level].setdefault(tower, ())
                for level, level_on_0 in zip(levels[more:], on_0):
                    self._on_0_by_level[level].setdefault(tower, (level_on_0,))
                    self._on_0_by_level[level_on_0].setdefault(0, (level_on_0,))
        # Without scopes the model's own numbers differ: in a variable that another tower reads than
        # the level says, it is no scope.
        for name, towers in readers.items():
            if self.find(name)[0] not in towers:
                for level in name.split("/"):
                    self._on_0_by_level.pop(level, None)

    def find(self, name: str) -> Tuple[int, List[str]]:
        """Return the tower of a variable, and what the copy on tower 0 may be called."""
        levels = name.split("/")
        towers: Set[int] = set()
        for level in levels:
            # The first scope tells the tower; a model may have levels that are called as scopes.
            known = set(self._on_0_by_level.get(level, ()))
            towers = towers & known or towers or known
        tower = min(towers, default=0)
        renamed = [self._on_0_by_level.get(level, {}).get(tower, (level,)) for level in levels]
        first = next((n for n, new in enumerate(renamed) if new != (levels[n],)), len(levels))
        once = [
            *levels[:first],
            *itertools.chain(*renamed[first : first + 1]),
            *levels[first + 1 :],
        ]
        return tower, ["/".join(once), "/".join(itertools.chain(*renamed))]


def _levels(name: str) -> List[str]:
    return name.split("/") if name else []


def _differing(levels: List[str], on_0: List[str]) -> Tuple[List[str], List[str]]:
    """Return what two names have between the beginning and the end that they have in common."""
    first = 0
    while first < min(len(levels), len(on_0)) and levels[first] == on_0[first]:
        first += 1
    levels, on_0 = levels[first:], on_0[first:]
    while levels and on_0 and levels[-1] == on_0[-1]:
        levels, on_0 = levels[:-1], on_0[:-1]
    return levels, on_0


# ---- what the updates of a graph keep equal ------------------------------------------------------


def kept() -> GraphMemory:
    """Return what updates of the current graph noted."""
    return memory_of(outer_graph())


def names_of(column: Column) -> Names:
    """Return the names of a column's variables."""
    return tuple(var.op.name for var in column)


def by_names(columns: Iterable[Column]) -> Dict[Names, Column]:
    """Return columns by the names of their variables, each once."""
    return {names_of(column): tuple(column) for column in columns}


def hold_owners(optimizer: Any, towers: Towers, owners: Dict[int, Tuple[int, ...]]) -> None:
    """Note which towers update each variable of the rows, and so have its slots.

    Raises:
        HierAllreduceError: slots of an earlier update are elsewhere. They cannot move, because
            their values may be trained already.
    """
    noted = kept().owners
    key_by_n = {n: (id(optimizer), towers.columns[n][0].op.name) for n in owners}
    for n, key in key_by_n.items():
        noted_owners, _ = noted.get(key, (owners[n], optimizer))
        if noted_owners != owners[n]:
            before = ", ".join(map(str, noted_owners))
            raise HierAllreduceError(
                f"{towers.place(owners[n][0], n)}: this tower would update it, and an earlier"
                f" apply_gradients made its slots on tower {before}; choose the same update= for"
                " both and, if it is 'sharded', Strategy(main=0); or give each loss a"
                " TowerOptimizer with another optimizer"
            )
    # The optimizer stays, because Python gives the id of a dropped object to a new one.
    noted.update({key: (owners[n], optimizer) for n, key in key_by_n.items()})


def columns_of(devices: Sequence[Any]) -> List[Column]:
    """Return all columns of the current graph on K devices: those of updates, and those of names.

    Variables of another dtype or shape than tower 0's are no replicas, because they cannot get its
    value.
    """
    named = (column for column in named_on(devices) if len(set(map(_kind, column))) == 1)
    return [*written_on(devices), *named]


def named_on(devices: Sequence[Any]) -> List[Column]:
    """Return the columns on K devices that names tell, beside those of updates; of any shape.

    Variables that are local on tower 0, such as metrics, count differently on every tower and are
    no replicas.
    """
    towers = tuple(devices)
    if len(towers) == 1:
        return []
    readers = {source.name: readers for source, readers in kept().read[towers].items()}
    rule = Scopes(kept().scopes[towers], readers)
    taken = set(itertools.chain(*by_names(written_on(devices))))
    local = {var.op.name for var in tf1.local_variables()}
    variables = {var.op.name: var for var in tf1.global_variables() + tf1.local_variables()}
    by_name_on_0: Dict[str, List[List[Any]]] = defaultdict(lambda: [[] for _ in towers])
    for name, var in variables.items():
        tower, names_on_0 = rule.find(name)
        if name not in taken and not (tower == 0 and name in local):
            existing = [on_0 for on_0 in names_on_0 if on_0 in variables]
            by_name_on_0[(existing or names_on_0)[0]][tower].append(var)
    # Where a tower has several of a name, nobody can tell which one is the copy.
    single = (same for same in by_name_on_0.values() if set(map(len, same)) == {1})
    return [tuple(itertools.chain(*same)) for same in single]


def written_on(devices: Sequence[Any]) -> List[Column]:
    """Return the columns on K devices that updates of the current graph write."""
    return list(kept().columns[tuple(devices)].values())


def _kind(var: Any) -> Tuple[Any, str]:
    """Return what copies have in common, so that one can get the value of another."""
    return var.dtype.base_dtype, str(var.shape)


def belongings(devices: Sequence[Any]) -> Tuple[List[Column], List[Column]]:
    """Return the columns that are copied, and those that have to be equal without that.

    Copied is what updates write, what is in the collections ``TRAINABLE_VARIABLES``,
    ``MODEL_VARIABLES`` and ``MOVING_AVERAGE_VARIABLES``, and averages of layers. All else is a
    tower's own, but for what gradients only read: nobody can tell a frozen layer from a share of
    the data.
    """
    in_model = {names[0] for names in by_names(written_on(devices))}
    keys = tf1.GraphKeys
    for key in (keys.TRAINABLE_VARIABLES, keys.MODEL_VARIABLES, keys.MOVING_AVERAGE_VARIABLES):
        in_model.update(var.op.name for var in tf1.get_collection(key))
    model = []
    for column in columns_of(devices):
        name = column[0].op.name
        if name in in_model or name.split("/")[-1] in _AVERAGES:
            model.append(column)
    return model, unsaid_on(devices, model)


def unsaid_on(devices: Sequence[Any], copied: Sequence[Column]) -> List[Column]:
    """Return columns of variables that gradients only read, and nobody copies."""
    uses = uses_by_variable(set(outer_graph().get_operations()) - kept().copies)
    read = kept().read[tuple(devices)]
    in_model = by_names(copied)
    unsaid: List[Column] = []
    for column in with_read_columns(devices):
        is_read = any(tensor_of(var).op in read for var in column)
        # What all towers compute anew is each tower's own, such as the state of an LSTM.
        is_own = all(is_computed(var, uses) for var in column)
        if is_read and not is_own and names_of(column) not in in_model:
            unsaid.append(column)
    return unsaid


def with_read_columns(devices: Sequence[Any]) -> List[Column]:
    """Return all columns, and those that no name tells: each variable is read by one tower only.

    A layer may have names without any rule, as Keras numbers them. One program makes all towers, so
    those of one kind stand for each other in the order in which each tower made them. If tower 0's
    is a local variable, each tower has its own.
    """
    read, columns = kept().read[tuple(devices)], columns_of(devices)
    variables = {tensor_of(var).op: var for var in tf1.global_variables() + tf1.local_variables()}
    with_copies = {tensor_of(var).op for var in itertools.chain(*columns)}
    by_kind: Dict[Any, List[List[Any]]] = defaultdict(lambda: [[] for _ in devices])
    for op in outer_graph().get_operations():
        if op in variables and op not in with_copies and len(read.get(op, ())) == 1:
            by_kind[_kind(variables[op])][min(read[op])].append(variables[op])
    local = set(map(id, tf1.local_variables()))
    for of_towers in by_kind.values():
        if len(set(map(len, of_towers))) == 1:
            columns += [column for column in zip(*of_towers) if id(column[0]) not in local]
    return columns
