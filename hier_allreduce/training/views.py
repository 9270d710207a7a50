"""Variables as the update of each tower sees them: with one device's names, and their own state.

An optimizer may choose by a variable's name, and may keep state under names that it makes up. On K
towers every update shall choose and keep alike. So the optimizer gets tower 1's variables as
*views* that have the names of tower 0's::

    tower 1's variable         tower1/norm/gamma
    the optimizer sees         tower0/norm/gamma        "no decay for norm/" holds on every tower
    its slot                   tower1/norm/gamma/Adam   a slot belongs to the variable, not the view
    its get_variable(…)        tower0/norm/gamma/adam_m  ─►   tower1/norm/gamma/adam_m
                               lamb/step                 ─►   tower1/lamb/step
    its beta powers            beta1_power               ─►   tower1/beta1_power
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections import abc
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set

import tensorflow as tf

from ..compat import tf1
from .replicas import all_variables
from .wrappers import patched

# methods of tf.compat.v1.train.Optimizer whose first argument is a variable with slots
_SLOT_METHODS = (
    "get_slot",
    "_zeros_slot",
    "_get_or_make_slot",
    "_get_or_make_slot_with_initializer",
)


def under_name_of(first: Any, var: Any) -> Any:
    """Return a view of ``var`` with the names of its copy ``first``, for slots and checkpoints too.

    A set or a list of variables that has ``first`` has the view too, because a choice by variables
    lists tower 0's at least. TensorFlow keys state by ``ref()``, which is that of ``var``.
    """
    kind: Any = type(var)
    # A constructor would add a variable to the graph. So the view gets the variable's attributes.
    view: Any = object.__new__(_view_class(kind))
    vars(view).update(vars(var), _named_like=first, _viewed=var)
    vars(view).update(_save_slice_info=first._save_slice_info)
    return view


def _as_list(value: Any) -> Any:
    """Return an argument of ``apply_gradients`` that several updates can read.

    A generator, which can be read once, and a view of a dict become lists.
    """
    lists = (abc.Iterator, abc.KeysView, abc.ValuesView, abc.ItemsView)
    return list(value) if isinstance(value, lists) else value


class _View:
    """What a view has of its own: the names of another variable, and the identity of its own."""

    _named_like: Any
    _viewed: Any

    @property
    def name(self) -> Any:
        return self._named_like.name

    @property
    def op(self) -> Any:
        return self._named_like.op

    @property
    def _shared_name(self) -> Any:
        return self._named_like._shared_name

    def ref(self) -> Any:
        return self._viewed.ref()

    def experimental_ref(self) -> Any:
        return self._viewed.experimental_ref()

    def __hash__(self) -> int:
        return hash(self._named_like)

    def __eq__(self, other: Any) -> Any:
        return self._named_like is getattr(other, "_named_like", other)

    def __ne__(self, other: Any) -> Any:
        return not self == other


@functools.lru_cache(maxsize=None)
def _view_class(kind: Any) -> Any:
    """Return a class of views of variables of a class, so that TensorFlow takes them for such."""
    return type(f"Renamed{kind.__name__}", (_View, kind), {})


class TowerViews:
    """Views of K×N variables, and the names of all that the K updates create.

    Args:
        variables: K rows of N variables.
        optimizers: an optimizer, and all optimizers that it wraps.
        arguments: more arguments of the optimizer's ``apply_gradients``.

    Attributes:
        rows: K rows of N variables as the optimizer sees them: tower 0's are the variables
            themselves.
        names_on_tower_0: of variables that other towers' updates created, by ``id(variable)``.
    """

    def __init__(
        self,
        variables: Sequence[Sequence[Any]],
        optimizers: Sequence[Any],
        arguments: Optional[Dict[str, Any]] = None,
    ):
        self.names_on_tower_0: Dict[int, str] = {}
        self.rows = [_views(row, variables[0]) for row in variables]
        self._own_names = [_own_names(row, variables[0]) for row in variables]
        self._numbers: Dict[int, int] = {}  # of each variable in its row
        for row in variables:
            self._numbers.update({id(var): number for number, var in enumerate(row)})
        self._local_towers = _local_towers(variables)
        self._optimizers = optimizers
        self._arguments = {name: _as_list(value) for name, value in (arguments or {}).items()}
        self._earlier = _names_now()
        self._asked_on_tower_0: Set[str] = set()
        # True while a variable is created under a name that is the tower's own
        self._keeps_names = False

    def arguments(self, tower: int) -> Dict[str, Any]:
        """Return the arguments of ``apply_gradients``, in which variables are ``tower``'s views."""
        return {name: self._argument(value, tower) for name, value in self._arguments.items()}

    def _argument(self, value: Any, tower: int) -> Any:
        """Return a value, or a container of values, in which variables are ``tower``'s views."""
        if isinstance(value, dict):
            keys = self._argument(list(value), tower)
            values = self._argument(list(value.values()), tower)
            return dict(zip(keys, values))
        if isinstance(value, (list, tuple, set, frozenset)):
            make = getattr(value, "_make", type(value))  # of a namedtuple
            return make([self._argument(item, tower) for item in value])
        number = self._numbers.get(id(value))
        return value if number is None else self.rows[tower][number]

    @contextlib.contextmanager
    def update_of(self, tower: int) -> Iterator[None]:
        """Open the context in which ``tower``'s update is built."""
        with contextlib.ExitStack() as contexts:
            if tower:
                self._enter_own_state(contexts, tower)
            get = functools.partial(self._get, tower)
            create = functools.partial(self._create, tower)
            contexts.enter_context(_getting(get))
            contexts.enter_context(tf.variable_creator_scope(create))
            yield

    def _enter_own_state(self, contexts: contextlib.ExitStack, tower: int) -> None:
        """Give the optimizers empty state for this tower; a slot belongs to a view's variable."""
        create_non_slot = functools.partial(self._create_non_slot, tower)

        def of_variable(method: Callable) -> Callable:
            def call(var: Any, *args: Any, **options: Any) -> Any:
                viewed = getattr(var, "_viewed", var)
                with self._keeping_names():
                    return method(viewed, *args, **options)

            return call

        def of_tower(method: Callable) -> Callable:
            def call(*args: Any, **options: Any) -> Any:
                with tf.variable_creator_scope(create_non_slot):
                    return method(*args, **options)

            return call

        for name in _SLOT_METHODS:
            contexts.enter_context(patched(self._optimizers, name, of_variable))
        # a wrapper may have no state, not even an empty one
        with_state = [each for each in self._optimizers if hasattr(each, "_non_slot_dict")]
        contexts.enter_context(patched(with_state, "_create_non_slot_variable", of_tower))
        contexts.enter_context(patched(with_state, "_non_slot_dict", lambda of_tower_0: {}))

    def _get(self, tower: int, getter: Callable, name: str, **options: Any) -> Any:
        """Get or create the variable for which an update asks by its name on tower 0.

        This is a custom getter.
        """
        if options.get("reuse") is True:  # a scope set to reuse shall not forbid new slots
            options["reuse"] = tf1.AUTO_REUSE
        if not tower:
            self._asked_on_tower_0.add(name)
        own = self._own_name(name, tower)
        with self._keeping_names():
            var = getter(name=own, **options)
        if own != name:
            self.names_on_tower_0[id(var)] = name.rstrip("/")
        return var

    def _create(self, tower: int, create: Callable, **options: Any) -> Any:
        """Create a variable for which no ``get_variable`` asks: a variable creator."""
        name = options.get("name")
        if name and not self._keeps_names:
            options["name"] = _renamed(name, self._own_names[tower]) or name
        return create(**options)

    def _create_non_slot(self, tower: int, create: Callable, **options: Any) -> Any:
        """Create a variable of the optimizer that is no slot, such as Adam's beta powers."""
        scope = f"tower{tower}/"
        options["name"] = scope + options["name"]
        if tower in self._local_towers:
            options["collections"] = [tf1.GraphKeys.LOCAL_VARIABLES]
        var = create(**options)
        self.names_on_tower_0[id(var)] = var.op.name.replace(scope, "", 1)
        return var

    def _own_name(self, name: str, tower: int) -> str:
        """Return ``tower``'s name for a variable that is called ``name`` on tower 0."""
        if not tower or self._keeps_names:
            return name
        own = _renamed(name, self._own_names[tower])
        if own is None and name in self._asked_on_tower_0:
            own = f"tower{tower}/{name}"
        if own is None or (name in self._earlier and own not in self._earlier):
            return name  # all towers share a variable that was there before
        unnumbered = re.sub(r"_\d+(?=/?$)", "", own)
        is_numbered_anew = name not in self._asked_on_tower_0 and unnumbered != own
        return _free(unnumbered) if is_numbered_anew else own

    @contextlib.contextmanager
    def _keeping_names(self) -> Iterator[None]:
        before = self._keeps_names
        self._keeps_names = True
        try:
            yield
        finally:
            self._keeps_names = before


def _views(row: Sequence[Any], first_row: Sequence[Any]) -> List[Any]:
    """Return a tower's variables as its optimizer sees them."""
    pairs = zip(row, first_row)
    return [var if var is first else under_name_of(first, var) for var, first in pairs]


def _local_towers(rows: Sequence[Sequence[Any]]) -> Set[int]:
    """Return the towers whose variables are local, as tensorpack makes them: they are not saved."""
    local = set(map(id, tf1.local_variables()))
    towers = set()
    for tower, row in enumerate(rows):
        if not local.isdisjoint(map(id, row)):
            towers.add(tower)
    return towers


def _own_names(row: Sequence[Any], first_row: Sequence[Any]) -> Dict[str, str]:
    """Return a tower's name for each variable, by tower 0's name and by the tower's own one."""
    names = {var.op.name: str(var.op.name) for var in row}
    for var, first in zip(row, first_row):
        names[first.op.name] = str(var.op.name)
    return names


def _renamed(name: str, own_names: Dict[str, str]) -> Optional[str]:
    """Return a name with a tower's own variable's name in it; None if it has no variable's."""
    levels = name.split("/")
    for start in range(len(levels)):
        for end in range(len(levels), start, -1):
            own = own_names.get("/".join(levels[start:end]))
            if own is not None:
                renamed = [*levels[:start], own, *levels[end:]]
                return "/".join(renamed)
    return None


def _free(name: str) -> str:
    """Return ``name``, numbered as TensorFlow numbers slots if a variable is called so already."""
    taken = _names_now()
    end = "/" if name.endswith("/") else ""
    base = name.rstrip("/")
    free = base
    numbers = itertools.count(1)
    while free in taken:
        free = f"{base}_{next(numbers)}"
    return free + end


def _names_now() -> Set[str]:
    return {var.op.name for var in all_variables()}


@contextlib.contextmanager
def _getting(get: Callable) -> Iterator[None]:
    """Open a context in which ``get`` is the custom getter of the current variable scope.

    The scope is not opened again, because TensorFlow would then number its slots from the start.
    """
    scope = tf1.get_variable_scope()
    outer = scope.custom_getter

    def composed(getter: Callable, name: str, **options: Any) -> Any:
        inner = functools.partial(outer, getter) if outer else getter
        return get(inner, name, **options)

    scope.set_custom_getter(composed)
    try:
        yield
    finally:
        scope.set_custom_getter(outer)
