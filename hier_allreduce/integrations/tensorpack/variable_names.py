"""Names of towers' variables, as tensorpack's gradient processors and wrappers see them.

::

    AccumGrad(ScaleGradient(Adam))        ScaleGradient sees             Adam and its slots see
    tower 0                               hidden/W                       hidden/W
    tower 1                               hidden/W, a renamed view       tower1/hidden/W
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Sequence

from tensorpack.tfutils.optimizer import PostProcessOptimizer, ProxyOptimizer

from ...errors import HierAllreduceError
from ...graph import is_sparse, tf1, where
from ...training import Pairs, held_by, patched
from .renamed_variable import renamed


def refuse_tower_names(variables: Sequence[Any]) -> None:
    """Check that none of tower 0's variables has a name that tensorpack gives to another tower's.

    Raises:
        HierAllreduceError: one has; the message names it.
    """
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

    Gradient processors, and the functions that ``PostProcessOptimizer`` calls, get renamed views. The optimizers inside
    get the towers' own variables, with slots of their own. Asked for the slot of a view, which they would look up by
    name, they return the slot of the tower's variable.

    Args:
        optimizer: perhaps wrapped.
        rows: K rows of N (gradient, variable) pairs.
        devices: K devices.
    """
    views: Dict[int, Any] = {}  # by id(variable)
    variables: Dict[int, Any] = {}  # by id(view)
    places: Dict[int, str] = {}  # by id(view), for messages
    names = [var.op.name for _, var in rows[0]]
    for tower, row in enumerate(rows):
        for n, ((_, var), (_, first)) in enumerate(zip(row, rows[0])):
            view = renamed(var, first) if tower else var
            views[id(var)], variables[id(view)] = view, var
            places[id(view)] = where(tower, devices, n, names)
    with contextlib.ExitStack() as patches:
        for inner in held_by(optimizer):
            patches.enter_context(patched(inner, "get_slot", _exchanging(inner.get_slot, variables)))
            if hasattr(inner, "_gradprocs"):
                explained = [_ExplainsSparse(processor, places) for processor in inner._gradprocs]
                processors = [_Exchange(views), *explained, _Exchange(variables)]
                patches.enter_context(patched(inner, "_gradprocs", processors))
            if isinstance(inner, PostProcessOptimizer):
                patches.enter_context(patched(inner, "_func", _exchanging(inner._func, views)))
        yield


def _exchanging(function: Callable[..., Any], others: Dict[int, Any]) -> Callable[..., Any]:
    """Return ``function``, called with ``others[id(var)]`` instead of its first argument if there is one."""

    def call(var: Any, *args: Any, **kwargs: Any) -> Any:
        return function(others.get(id(var), var), *args, **kwargs)

    return call


class _Exchange:
    """A gradient processor that replaces each variable by ``others[id(variable)]``, if there is one."""

    def __init__(self, others: Dict[int, Any]):
        self._others = others

    def process(self, pairs: Pairs) -> Pairs:
        return [(grad, self._others.get(id(var), var)) for grad, var in pairs]


class _ExplainsSparse:
    """A gradient processor that explains the failure of another one that cannot take sparse gradients.

    Args:
        processor: tensorpack's, or a user's.
        places: by ``id(variable)``, for the message.
    """

    def __init__(self, processor: Any, places: Dict[int, str]):
        self._processor, self._places = processor, places

    def process(self, pairs: Pairs) -> Pairs:
        try:
            return list(self._processor.process(pairs))
        except (TypeError, ValueError, AttributeError) as error:
            sparse = [self._places.get(id(var), var.op.name) for grad, var in pairs if is_sparse(grad)]
            if not sparse:
                raise
            raise HierAllreduceError(
                f"{type(self._processor).__name__} fails with sparse gradients, at {'; '.join(sparse)}: {error}. If it"
                ' needs dense ones, use strategy=Strategy(sparse="dense")'
            ) from error
