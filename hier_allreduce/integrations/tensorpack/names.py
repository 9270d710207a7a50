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
from typing import Any, Callable, Dict, Iterator, List, Sequence

from tensorpack.tfutils.optimizer import PostProcessOptimizer

from ...graph.tf import tf1
from ...training import Pairs, held_by, patched


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


@contextlib.contextmanager
def under_tower_0s_names(optimizer: Any, rows: Sequence[Pairs]) -> Iterator[None]:
    """Show tensorpack's wrappers the variables of every tower under tower 0's names, inside the context.

    The optimizers inside the wrappers get the towers' variables, with slots for each. Asked for the slot of a view,
    which they would look up by name, they return the slot of the tower's variable.

    Args:
        optimizer: perhaps wrapped.
        rows: K rows of N (gradient, variable) pairs.
    """
    pairs = [(var, first) for row in rows[1:] for (_, var), (_, first) in zip(row, rows[0])]
    views = {id(var): _renamed(var, first) for var, first in pairs}
    variables = {id(view): var for view, (var, _) in zip(views.values(), pairs)}

    def with_views(process: Callable[[Pairs], Pairs]) -> Callable[[Pairs], Pairs]:
        def processed(grads_and_vars: Pairs) -> Pairs:
            seen = process([(grad, views.get(id(var), var)) for grad, var in grads_and_vars])
            return [(grad, variables.get(id(var), var)) for grad, var in seen]

        return processed

    with contextlib.ExitStack() as patches:
        for inner in held_by(optimizer):
            patches.enter_context(patched(inner, "get_slot", _exchanging(inner.get_slot, variables)))
            if hasattr(inner, "_gradprocs"):
                patches.enter_context(patched(inner, "_apply", with_views(inner._apply)))
            if isinstance(inner, PostProcessOptimizer):
                patches.enter_context(patched(inner, "_func", _exchanging(inner._func, views)))
        yield


def _renamed(var: Any, first: Any) -> Any:
    """Return a view of ``var`` with the ``name`` and ``op`` of tower 0's variable ``first``."""
    kind: Any = type(var)
    named = {"name": property(lambda view: first.name), "op": property(lambda view: first.op)}
    view: Any = object.__new__(type(f"Renamed{kind.__name__}", (kind,), named))
    vars(view).update(vars(var))
    return view


def _exchanging(function: Callable[..., Any], others: Dict[int, Any]) -> Callable[..., Any]:
    """Return ``function``, called with ``others[id(var)]`` instead of its first argument if there is one."""
    return lambda var, *args, **kwargs: function(others.get(id(var), var), *args, **kwargs)
