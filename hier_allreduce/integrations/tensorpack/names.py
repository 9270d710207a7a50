"""Names of towers' variables, as tensorpack's gradient processors and wrappers see them.

::

    AccumGrad(ScaleGradient(Adam))        ScaleGradient sees             Adam and its slots see
    tower 0                               hidden/W                       hidden/W
    tower 1                               hidden/W, a renamed view       tower1/hidden/W

Processors, and functions of ``PostProcessOptimizer``, choose variables by name: they freeze ``hidden/.*``, say. Of the
towers' names they would freeze tower 0's only, and the towers would diverge. So they get views.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, List, Sequence

from tensorpack.tfutils.optimizer import PostProcessOptimizer

from ...compat import tf1
from ...training.main_update import under_name_of
from ...training.update import Pairs
from ...training.wrapped import held_by, patched


def with_missing_pairs(rows: Sequence[Pairs]) -> List[Pairs]:
    """Add (None, variable) for each variable of a tower that has a gradient only on other towers.

    tensorpack leaves out variables without a gradient, tower by tower, so that the K rows would not match.
    """
    prefixes = [f"tower{tower}/" if tower else "" for tower in range(len(rows))]
    towers = [
        {
            var.op.name[len(prefix) if var.op.name.startswith(prefix) else 0 :]: (grad, var)
            for grad, var in row
        }
        for prefix, row in zip(prefixes, rows)
    ]
    trainable = {var.op.name: (None, var) for var in tf1.trainable_variables()}
    names = list(dict.fromkeys(name for tower in towers for name in tower))
    completed = [
        [tower.get(name, trainable.get(prefix + name)) for name in names]
        for prefix, tower in zip(prefixes, towers)
    ]
    return [[pair for pair in row if pair] for row in completed]


@contextlib.contextmanager
def under_tower_0s_names(optimizer: Any, rows: Sequence[Pairs]) -> Iterator[None]:
    """Show tensorpack's wrappers the variables of every tower under tower 0's names, inside the context.

    The optimizers inside the wrappers get the towers' variables, with slots for each. Asked for the slot of a view,
    which they would look up by name, they return the slot of the tower's variable.
    """
    views = {
        id(var): under_name_of(first, var)
        for row in rows[1:]
        for (_, var), (_, first) in zip(row, rows[0])
    }
    variables = {id(views[id(var)]): var for row in rows[1:] for _, var in row}

    def view_of(var: Any) -> Any:
        return views.get(id(var), var)

    def variable_of(view: Any) -> Any:
        return variables.get(id(view), view)

    def with_views(process: Callable[[Pairs], Pairs]) -> Callable[[Pairs], Pairs]:
        def processed(pairs: Pairs) -> Pairs:
            return [
                (grad, variable_of(view))
                for grad, view in process([(grad, view_of(var)) for grad, var in pairs])
            ]

        return processed

    inside = held_by(optimizer)
    processors = [inner for inner in inside if hasattr(inner, "_gradprocs")]
    functions = [inner for inner in inside if isinstance(inner, PostProcessOptimizer)]
    with contextlib.ExitStack() as patches:
        patches.enter_context(
            patched(inside, "get_slot", lambda get: lambda var, name: get(variable_of(var), name))
        )
        patches.enter_context(patched(processors, "_apply", with_views))
        patches.enter_context(
            patched(functions, "_func", lambda function: lambda var: function(view_of(var)))
        )
        yield
