"""Names of towers' variables, as tensorpack's gradient processors and wrappers see them.

::

    AccumGrad(ScaleGradient(Adam))        ScaleGradient sees             Adam and its slots see
    tower 0                               hidden/W                       hidden/W
    tower 1                               hidden/W, a renamed view       tower1/hidden/W

Processors, and functions of ``PostProcessOptimizer``, choose variables by name: they freeze ``hidden/.*``, say. Of the
towers' names they would freeze tower 0's only, and the towers would diverge. So they get views. The class of a view is
derived from its variable's, so that TensorFlow takes it for a variable. That class's constructor would add a variable
to the graph, so a view is made without it, and has all attributes of the variable.
"""

from __future__ import annotations

import contextlib
import types
from functools import lru_cache
from typing import Any, Callable, Dict, Iterator, List, Sequence

from tensorpack.tfutils.optimizer import PostProcessOptimizer, ProxyOptimizer

from ...errors import HierAllreduceError
from ...graph import where
from ...graph.matrix import is_sparse
from ...graph.tf import tf1
from ...training import Pairs, held_by, patched


def check_names(variables: Sequence[Any]) -> None:
    """Raise a HierAllreduceError if one of tower 0's variables has a name that tensorpack gives to another tower's."""
    for var in variables:
        if var.op.name.startswith("tower"):
            raise HierAllreduceError(
                f"tower 0, {var.op.name!r}: tensorpack takes names that begin with 'tower' for other towers' copies,"
                " and could not copy this one to them; rename the scope"
            )


def with_missing_pairs(rows: Sequence[Pairs]) -> List[Pairs]:
    """Add (None, variable) for each variable of a tower that has a gradient only on other towers.

    tensorpack leaves out variables without a gradient, tower by tower, so that the K rows would not match.
    """
    prefixes = [f"tower{tower}/" if tower else "" for tower in range(len(rows))]
    towers = [
        {var.op.name[len(prefix) if var.op.name.startswith(prefix) else 0 :]: (grad, var) for grad, var in row}
        for prefix, row in zip(prefixes, rows)
    ]
    if all(tower.keys() == towers[0].keys() for tower in towers):
        return list(rows)
    trainable = {var.op.name: (None, var) for var in tf1.trainable_variables()}
    names = list(dict.fromkeys(name for tower in towers for name in tower))
    completed = [
        [tower.get(name, trainable.get(prefix + name)) for name in names] for prefix, tower in zip(prefixes, towers)
    ]
    return [[pair for pair in row if pair] for row in completed]


def inside_wrappers(optimizer: Any) -> Any:
    """Return the optimizer inside tensorpack's wrappers: gradient processors, AccumGrad."""
    while isinstance(optimizer, ProxyOptimizer):
        optimizer = optimizer._opt
    return optimizer


@contextlib.contextmanager
def under_tower_0s_names(optimizer: Any, rows: Sequence[Pairs], devices: Sequence[Any]) -> Iterator[None]:
    """Show tensorpack's wrappers the variables of every tower under tower 0's names, inside the context.

    The optimizers inside the wrappers get the towers' variables, with slots for each. Asked for the slot of a view,
    which they would look up by name, they return the slot of the tower's variable.

    Args:
        optimizer: perhaps wrapped.
        rows: K rows of N (gradient, variable) pairs.
        devices: K devices, for messages.
    """
    views: Dict[int, Any] = {}  # by id(variable)
    variables: Dict[int, Any] = {}  # by id(view)
    labels: Dict[int, str] = {}  # by id(view), for messages
    names = [var.op.name for _, var in rows[0]]
    for tower, row in enumerate(rows):
        for n, ((_, var), (_, first)) in enumerate(zip(row, rows[0])):
            view = _renamed(var, first) if tower else var
            views[id(var)], variables[id(view)] = view, var
            labels[id(view)] = where(tower, devices, n, names)
    with contextlib.ExitStack() as patches:
        for inner in held_by(optimizer):
            patches.enter_context(patched(inner, "get_slot", _exchanging(inner.get_slot, variables)))
            if hasattr(inner, "_gradprocs"):
                around = _Processors(inner._gradprocs, views, variables, labels)
                patches.enter_context(patched(inner, "_gradprocs", [around]))
            if isinstance(inner, PostProcessOptimizer):
                patches.enter_context(patched(inner, "_func", _exchanging(inner._func, views)))
        yield


def _renamed(var: Any, named_like: Any) -> Any:
    """Return a view of ``var`` with the ``name`` and ``op`` of the variable ``named_like``."""
    view = object.__new__(_renamed_class(var.__class__))
    vars(view).update(vars(var), _named_like=named_like)
    return view


@lru_cache(maxsize=None)
def _renamed_class(kind: Any) -> Any:
    return types.new_class(f"Renamed{kind.__name__}", (_NamedLikeAnother, kind))


class _NamedLikeAnother:
    """Takes its name from another variable."""

    _named_like: Any
    op = property(lambda self: self._named_like.op)
    name = property(lambda self: self._named_like.name)


def _exchanging(function: Callable[..., Any], others: Dict[int, Any]) -> Callable[..., Any]:
    """Return ``function``, called with ``others[id(var)]`` instead of its first argument if there is one."""
    return lambda var, *args, **kwargs: function(others.get(id(var), var), *args, **kwargs)


class _Processors:
    """Gradient processors that get views of variables; it explains the failure of one with sparse gradients."""

    def __init__(
        self, processors: Sequence[Any], views: Dict[int, Any], variables: Dict[int, Any], labels: Dict[int, str]
    ):
        self._processors, self._views, self._variables, self._labels = processors, views, variables, labels

    def process(self, pairs: Pairs) -> Pairs:
        pairs = [(grad, self._views.get(id(var), var)) for grad, var in pairs]
        for processor in self._processors:
            try:
                pairs = list(processor.process(pairs))
            except (TypeError, ValueError, AttributeError) as error:
                sparse = [self._labels.get(id(var), var.op.name) for grad, var in pairs if is_sparse(grad)]
                if not sparse:
                    raise
                raise HierAllreduceError(
                    f"{type(processor).__name__} fails with sparse gradients, at {'; '.join(sparse)}: {error}. If it"
                    ' needs dense ones, use strategy=Strategy(sparse="dense")'
                ) from error
        return [(grad, self._variables.get(id(var), var)) for grad, var in pairs]
