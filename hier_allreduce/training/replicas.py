"""Who is a copy of whom: which variables are replicas, and to whom they belong.

A variable has a *replica* on each tower. Trained variables are replicas by their place in the rows,
their slots and the powers of beta by the optimizer's methods. All others are by one rule: the same
name with the tower's scope instead, wherever that is::

    tower1/bn/moving_mean      tower0/bn/moving_mean
    ema/tower1/w/Average       ema/tower0/w/Average
    tower1/bn/mean/EMA         bn/mean/EMA, as tensorpack has it
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple
from weakref import WeakKeyDictionary

from ..compat import outer_graph, tf1
from ..errors import HierAllreduceError
from .reads import is_computed, uses_by_variable
from .towers import Column, Towers

Names = Tuple[str, ...]  # of a column

# The last level in the names of averages that layers and TensorFlow keep of a tower's batches.
_AVERAGES = ("moving_mean", "moving_variance", "ExponentialMovingAverage")

WITHOUT_COPIES = (
    "nobody can tell what copies of it the other towers have. Let names differ by the tower's scope"
    " only, or give TowerOptimizer(…, scopes=…), or list it in the rows, at one place on every"
    " tower, with the gradient None"
)


class Scopes:
    """The levels of names by which towers differ.

    Args:
        columns: names of known replicas. Where two of them differ in a level, each has its tower's.
            A level that tower 0's lacks is a scope that it does not have.
    """

    def __init__(self, columns: Iterable[Sequence[str]]):
        # by a level, and by the tower that has it: what tower 0 has in its place
        self._on_0_by_level: Dict[str, Dict[int, Names]] = defaultdict(dict)
        for names in columns:
            for tower, name in enumerate(names):
                levels, on_0 = _differing(*(n.split("/") if n else [] for n in (name, names[0])))
                more = max(0, len(levels) - len(on_0))
                for level in levels[:more]:
                    self._on_0_by_level[level].setdefault(tower, ())
                for level, level_on_0 in zip(levels[more:], on_0):
                    self._on_0_by_level[level].setdefault(tower, (level_on_0,))
                    self._on_0_by_level[level_on_0].setdefault(0, (level_on_0,))

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


class Kept:
    """What the updates of one graph note; names only, because variables would keep the graph.

    Attributes:
        trained: the columns of rows, by K devices.
        written: the columns of all that updates write, by K devices.
        read: the towers whose gradients read a variable, by its name, if not all do.
        owners: the towers that have an optimizer's slots of a variable, by its id and the name.
        flags: those of all updates.
        bytes_by_device: what sharded updates own.
        owned: what a sharded update got, by the ids of its optimizer and variables.
    """

    def __init__(self) -> None:
        self.trained: Dict[Any, Dict[Names, None]] = defaultdict(dict)
        self.written: Dict[Any, Dict[Names, None]] = defaultdict(dict)
        self.read: Dict[str, Set[int]] = {}
        self.owners: Dict[Tuple[int, str], Tuple[int, ...]] = {}
        self.flags: List[Any] = []
        self.bytes_by_device: Counter = Counter()
        self.owned: Dict[Any, Any] = {}


_kept_by_graph: WeakKeyDictionary = WeakKeyDictionary()


def kept() -> Kept:
    """Return what updates of the current graph noted."""
    found: Kept = _kept_by_graph.setdefault(outer_graph(), Kept())
    return found


def hold_owners(optimizer: Any, towers: Towers, owners: Dict[int, Tuple[int, ...]]) -> None:
    """Note which towers update each variable of the rows, and so have its slots.

    Raises:
        HierAllreduceError: slots of an earlier update are elsewhere. They cannot move, because
            their values may be trained already.
    """
    noted = kept().owners
    key_by_n = {n: (id(optimizer), towers.columns[n][0].op.name) for n in owners}
    for n, key in key_by_n.items():
        if noted.get(key, owners[n]) != owners[n]:
            before = ", ".join(map(str, noted[key]))
            raise HierAllreduceError(
                f"{towers.place(owners[n][0], n)}: this tower would update it, and an earlier"
                f" apply_gradients made its slots on tower {before}; choose the same update= for"
                " both and, if it is 'sharded', Strategy(main=0); or give each loss a"
                " TowerOptimizer with another optimizer"
            )
    noted.update({key: owners[n] for n, key in key_by_n.items()})


def names_of(columns: Iterable[Column]) -> Dict[Names, None]:
    """Return the names of columns, each once."""
    return dict.fromkeys(tuple(var.op.name for var in column) for column in columns)


def distinct(columns: Iterable[Column]) -> List[Column]:
    """Return columns, each once: several updates may have the same."""
    return list({column[0].op.name: tuple(column) for column in columns}.values())


def columns_of(
    known: Iterable[Column], devices: Sequence[Any], scopes: Optional[Sequence[str]] = None
) -> List[Column]:
    """Return all columns of a graph on K devices: ``known`` ones, and those that names tell.

    ``scopes`` are those of K towers, if the user has given them. Variables that are local on tower
    0, such as metrics, count differently on every tower and are no replicas.
    """
    variables = tf1.global_variables() + tf1.local_variables()
    variable_by_name = {var.op.name: var for var in variables}
    # A variable may be in no collection; then only its own TowerOptimizer knows it.
    noted = [
        [variable_by_name.get(name) for name in names]
        for names in (*kept().trained[tuple(devices)], *kept().written[tuple(devices)])
    ]
    columns = distinct([*known, *(column for column in noted if None not in column)])
    if len(devices) == 1:
        return columns
    trained = {**names_of(known), **kept().trained[tuple(devices)]}
    rule = Scopes([scopes] if scopes else trained)
    taken = {name for names in names_of(columns) for name in names}
    local = {var.op.name for var in tf1.local_variables()}
    by_name_on_0: Dict[str, Dict[int, List[Any]]] = defaultdict(lambda: defaultdict(list))
    for name, var in variable_by_name.items():
        tower, names_on_0 = rule.find(name)
        if name not in taken and not (tower == 0 and name in local):
            existing = [on_0 for on_0 in names_on_0 if on_0 in variable_by_name]
            by_name_on_0[(existing or names_on_0)[0]][tower].append(var)
    for by_tower in by_name_on_0.values():
        # Where a tower has several of a name, nobody can tell which one is the copy.
        if len(by_tower) == len(devices) and all(len(same) == 1 for same in by_tower.values()):
            columns.append(tuple(by_tower[tower][0] for tower in range(len(devices))))
    return columns


class Belongings(NamedTuple):
    """The columns of a graph on K devices, by whose they are.

    Attributes:
        model: what has to be equal: what updates write, variables in the collections
            ``TRAINABLE_VARIABLES``, ``MODEL_VARIABLES``, ``MOVING_AVERAGE_VARIABLES``, and averages
            of layers.
        own: each tower's own: what the graph computes anew, such as the state of an LSTM, and what
            has another shape on each tower.
        unsaid: what gradients only read: a frozen layer, or a share of the data? Nobody can tell.
        alone: names of variables of the model that some towers' gradients read, without a copy.
    """

    model: List[Column]
    own: List[Column]
    unsaid: List[Column]
    alone: List[str]


def belongings(
    known: Sequence[Column], devices: Sequence[Any], scopes: Optional[Sequence[str]] = None
) -> Belongings:
    """Return the columns of the current graph, by whose they are."""
    keys = tf1.GraphKeys
    collections = keys.TRAINABLE_VARIABLES, keys.MODEL_VARIABLES, keys.MOVING_AVERAGE_VARIABLES
    in_model = {var.op.name for key in collections for var in tf1.get_collection(key)}
    written = {**names_of(known), **kept().written[tuple(devices)]}
    found = Belongings([], [], [], [])
    columns = columns_of(known, devices, scopes)
    uses = uses_by_variable(outer_graph().get_operations())
    for column in columns:
        name = column[0].op.name
        is_alike = all(var.shape.is_compatible_with(column[0].shape) for var in column)
        is_average = name.split("/")[-1] in _AVERAGES
        if is_average or name in in_model or next(iter(names_of([column]))) in written:
            found.model.append(column)
        elif not is_alike or any(is_computed(var, uses) for var in column):
            found.own.append(column)
        elif any(var.op.name in kept().read for var in column):
            found.unsaid.append(column)
    copied = {var.op.name for column in [*columns, *columns_elsewhere(devices)] for var in column}
    alone = (name for name in kept().read if name in in_model and name not in copied)
    found.alone.extend(sorted(alone))
    return found


def columns_elsewhere(devices: Sequence[Any]) -> List[Column]:
    """Return the columns of updates on other devices than these; their own tower 0 comes first."""
    others = [there for there in kept().trained if there != tuple(devices)]
    return list(itertools.chain(*(columns_of((), there) for there in others)))
