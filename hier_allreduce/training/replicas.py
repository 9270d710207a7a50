"""Who is a copy of whom: which variables are replicas, and which of them have to be equal.

A variable has a *replica* on each tower. Trained variables are replicas by their place in the rows,
their slots and the powers of beta by the optimizer's methods. All others are by one rule: the same
name with the tower's scope instead, wherever that is, and the same dtype and shape::

    tower1/bn/moving_mean      tower0/bn/moving_mean
    ema/tower1/w/Average       ema/tower0/w/Average
    tower1/bn/mean/EMA         bn/mean/EMA, as tensorpack has it
"""

from __future__ import annotations

import os
from collections import defaultdict
from itertools import chain
from typing import Any, Dict, Iterable, List, Mapping, Sequence, Set, Tuple

from ..compat import number_of, outer_graph, tf1
from ..errors import HierAllreduceError
from ..graphs import GraphMemory, memory_of
from .reads import all_variables, is_computed, uses_by_variable, writers_by_variable
from .towers import Column, Towers

Names = Tuple[str, ...]  # of a column

# The last level in the names of averages that layers and TensorFlow keep of a tower's batches.
_AVERAGES = ("moving_mean", "moving_variance", "ExponentialMovingAverage")


class Scopes:
    """The levels of names by which towers differ.

    Args:
        names: of known replicas, and whether a user gave them. Where two of them differ in a level,
            each has its tower's.
        readers: the towers whose gradients read a variable, by the op that makes it, if not all do.
    """

    def __init__(self, names: Mapping[Names, bool], readers: Mapping[Any, Set[int]]):
        # by a level, and by the tower that has it: what tower 0 has in its place, "" for none
        self._on_0_by_level: Dict[str, Dict[int, str]] = defaultdict(dict)
        given: Set[str] = set()
        for of_column, is_given in names.items():
            for tower, name in enumerate(of_column):
                levels, on_0 = name.split("/"), of_column[0].split("/")
                # What both begin with and, turned round, end with is no scope.
                for _ in range(2):
                    common = len(os.path.commonprefix([levels, on_0]))  # noqa: RUF071  of lists
                    levels, on_0 = levels[common:][::-1], on_0[common:][::-1]
                # A level that tower 0's lacks is a scope that it does not have.
                on_0 = [""] * (len(levels) - len(on_0)) + on_0
                for level, level_on_0 in zip(levels, on_0):
                    self._on_0_by_level[level].setdefault(tower, level_on_0)
                    self._on_0_by_level[level_on_0].setdefault(0, level_on_0)
                given.update(levels + on_0 if is_given else ())
        # Unless they are given, the model's own numbers may differ: in a variable that another
        # tower reads than the level says, it is no scope.
        for maker, towers in readers.items():
            if self.find(maker.name)[0] not in towers:
                for level in set(maker.name.split("/")) - given:
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
        renamed = [self._on_0_by_level.get(level, {}).get(tower, level) for level in levels]
        first = [n for n, level in enumerate(levels) if renamed[n] != level][:1]
        once = [renamed[n] if n in first else level for n, level in enumerate(levels)]
        return tower, ["/".join(filter(None, names)) for names in (once, renamed)]


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


def hold_owners(optimizer: Any, towers: Towers, owners: Mapping[int, Tuple[int, ...]]) -> None:
    """Note which towers update each variable of the rows, and so have its slots.

    Raises:
        HierAllreduceError: slots of an earlier update are elsewhere. They cannot move, because
            their values may be trained already.
    """
    for n, owners_now in owners.items():
        key = id(optimizer), towers.columns[n][0].op.name
        # The optimizer stays, because Python gives the id of a dropped object to a new one.
        noted_owners, _ = kept().owners.setdefault(key, (owners_now, optimizer))
        if noted_owners != owners_now:
            before = ", ".join(map(str, noted_owners))
            raise HierAllreduceError(
                f"{towers.place(owners_now[0], n)}: this tower would update it, and an earlier"
                f" apply_gradients made its slots on tower {before}; choose the same update= for"
                " both and, if it is 'sharded', Strategy(main=0); or give each loss a"
                " TowerOptimizer with another optimizer"
            )


def columns_of() -> List[Column]:
    """Return all columns of the current graph: those of updates, and those that names tell.

    Variables that are local on tower 0, such as metrics, count differently on every tower and are
    no replicas; those of another dtype or shape than tower 0's cannot get its value.
    """
    memory = kept()
    columns = list(memory.columns.values())
    if len(memory.devices) == 1:
        return columns
    rule = Scopes(memory.scopes, memory.read)
    taken = set(chain(*memory.columns))
    local = {var.op.name for var in tf1.local_variables()}
    variables = {var.op.name: var for var in all_variables()}
    by_name_on_0: Dict[str, List[List[Any]]] = defaultdict(lambda: [[] for _ in memory.devices])
    for name, var in variables.items():
        tower, names_on_0 = rule.find(name)
        if name not in taken and not (tower == 0 and name in local):
            existing = [on_0 for on_0 in names_on_0 if on_0 in variables]
            by_name_on_0[(existing or names_on_0)[0]][tower].append(var)
    for same in by_name_on_0.values():
        column = tuple(chain(*same))
        # Where a tower has several of a name, nobody can tell which one is the copy.
        if set(map(len, same)) == {1} and len(set(map(_kind, column))) == 1:
            columns.append(column)
    return columns


def _kind(var: Any) -> Tuple[Any, str]:
    """Return what copies have in common, so that one can get the value of another."""
    return var.dtype.base_dtype, str(var.shape)


def belongings() -> Tuple[List[Column], List[Column]]:
    """Return the columns that are copied, and those that have to be equal without that.

    Copied is what updates write, what is in the collections ``TRAINABLE_VARIABLES``,
    ``MODEL_VARIABLES`` and ``MOVING_AVERAGE_VARIABLES``, and averages of layers. All else is a
    tower's own, but for what gradients only read: nobody can tell a frozen layer from a share of
    the data.
    """
    in_model = {names[0] for names in kept().columns}
    keys = tf1.GraphKeys
    for key in (keys.TRAINABLE_VARIABLES, keys.MODEL_VARIABLES, keys.MOVING_AVERAGE_VARIABLES):
        in_model.update(var.op.name for var in tf1.get_collection(key))
    model = []
    for column in columns_of():
        name = column[0].op.name
        if name in in_model or name.split("/")[-1] in _AVERAGES:
            model.append(column)
    return model, unsaid_among(model)


def unsaid_among(copied: Sequence[Column]) -> List[Column]:
    """Return columns of variables that gradients only read, beside those that are copied."""
    memory = kept()
    ops = set(outer_graph().get_operations()) - memory.copies
    writers = writers_by_variable(uses_by_variable(ops))
    in_model = by_names(copied)
    unsaid: List[Column] = []
    for column in with_read_columns():
        is_read = any(var.op in memory.read for var in column)
        # What all towers compute anew is each tower's own, such as the state of an LSTM.
        is_own = (is_computed(var, writers) for var in column)
        if is_read and names_of(column) not in in_model and not all(is_own):
            unsaid.append(column)
    return unsaid


def with_read_columns() -> List[Column]:
    """Return all columns, and those that no name tells: each variable is read by one tower only.

    A layer may have names without any rule, as Keras numbers them. One program makes all towers, so
    those of one kind stand for each other in the order in which each tower made them. If tower 0's
    is a local variable, each tower has its own.
    """
    memory, columns = kept(), columns_of()
    with_copies = {var.op for var in chain(*columns)}
    by_kind: Dict[Any, List[List[Any]]] = defaultdict(lambda: [[] for _ in memory.devices])
    for var in sorted(all_variables(), key=number_of):
        readers = memory.read.get(var.op, ())
        if len(readers) == 1 and var.op not in with_copies:
            by_kind[_kind(var)][min(readers)].append(var)
    local = {var.op for var in tf1.local_variables()}
    for of_towers in by_kind.values():
        if len(set(map(len, of_towers))) == 1:
            columns += [column for column in zip(*of_towers) if column[0].op not in local]
    return columns
