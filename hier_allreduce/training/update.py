"""The update of K towers, for every front end: each tower updates its variables, with one optimizer object.

::

    K×N pairs, reduced ─► check ─► optimizer.apply_gradients, K times ─► check ─► Updated
                                   once-a-step work in the last one
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, ContextManager, Dict, List, NamedTuple, Sequence, Tuple

import tensorflow as tf

from ..errors import HierAllreduceError
from ..graph import VAR_LIST_ADVICE, check_average, where
from ..graph.matrix import static_shape
from ..graph.tf import is_resource, tf1
from .effects import unequal_ops, written_by
from .replicas import Copies, match_created
from .wrapped import check_unshared, held_by, one_loss_scale, without_finish

Pairs = Sequence[Tuple[Any, Any]]  # N (gradient, variable) pairs of one tower

_AT_MAINS = "or use update='main' (not with a wrapper, unless it is tensorpack's), which updates each variable once"


class Updated(NamedTuple):
    """An update of K towers."""

    op: Any
    trained: Copies  # K×N variables that it updates
    created: Copies  # K×M variables that it created, and that are copies of each other

    @property
    def rows(self) -> Copies:
        """The K×(N+M) variables that are copies of each other."""
        return [[*trained, *created] for trained, created in zip(self.trained, self.created)]


def check_options(average: Any, update: Any, **counts: Any) -> None:
    """Raise a HierAllreduceError if an option of ``TowerOptimizer`` or ``HierarchicalTrainer`` is invalid."""
    check_average(average)
    if update not in ("replicated", "main"):
        raise HierAllreduceError(f"update={update!r} is unknown; there are 'replicated', 'main'")
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise HierAllreduceError(f"{name}={value!r}: expected a number of steps, or 0")


def check_variables(rows: Sequence[Pairs], devices: Sequence[Any]) -> None:
    """Check that every tower has resource variables that no other has, with gradients of their shapes."""
    tower_of: Dict[int, int] = {}  # of each id(variable)
    for tower, row in enumerate(rows):
        names = [var.op.name for _, var in row]
        for n, (grad, var) in enumerate(row):
            first = tower_of.setdefault(id(var), tower)
            if first != tower:
                raise HierAllreduceError(
                    f"{where(tower, devices, n, names)}: the same variable is in the row of {where(first, devices)};"
                    f" give every tower a copy; {VAR_LIST_ADVICE}"
                )
            if not is_resource(var):
                raise HierAllreduceError(
                    f"{where(tower, devices, n, names)}: a reference variable, which an update may overwrite while a"
                    " gradient still reads it; create it with use_resource=True, or call"
                    " tf.compat.v1.enable_resource_variables() first"
                )
            if isinstance(grad, (tf.Tensor, tf.IndexedSlices)) and not static_shape(grad).is_compatible_with(var.shape):
                raise HierAllreduceError(
                    f"{where(tower, devices, n, names)}: a gradient {static_shape(grad)} for a variable {var.shape}"
                )


def update_towers(
    optimizer: Any,
    rows: Sequence[Pairs],
    devices: Sequence[Any],
    scope: Callable[[int], ContextManager] = lambda tower: contextlib.nullcontext(),
) -> Updated:
    """Update the variables of each tower on its device.

    The towers share ``optimizer``. It, or an optimizer that it wraps, may have work to do once a step, after the
    updates: Adam advances its beta powers. Only the last tower's update does that work, and it waits for the other
    updates, which read what the work changes. A loss scale is adapted once, too, from the first tower's gradients.

    Args:
        optimizer: a tf.compat.v1.train.Optimizer, perhaps a wrapper.
        rows: K rows of N pairs, after the all-reduce.
        devices: K devices.
        scope: returns the context of a tower's update; it takes the tower's number.

    Raises:
        HierAllreduceError: an earlier update has the same optimizer with once-a-step work. Or, found only once the ops
            are there: updates of several towers write one variable, the last one does more than the others, or one
            draws random numbers or calls Python. Then the graph keeps the ops: build the model in a new graph.
    """
    once_a_step = [inner for inner in held_by(optimizer) if type(inner)._finish is not tf1.train.Optimizer._finish]
    if len(devices) > 1:
        check_unshared(once_a_step)
    graph = tf1.get_default_graph()
    ops: List[Any] = []
    created, added = [], []
    with one_loss_scale(optimizer):
        for tower, (row, device) in enumerate(zip(rows, devices)):
            last = tower == len(devices) - 1
            wait = tf.control_dependencies(ops if once_a_step and last else [])
            before = len(graph.get_operations())
            known = set(map(id, all_variables()))
            with tf1.device(device), scope(tower), wait, without_finish([] if last else once_a_step):
                ops.append(optimizer.apply_gradients(row, name=f"apply_grad_{tower}"))
            created.append([var for var in all_variables() if id(var) not in known])
            added.append(graph.get_operations()[before:])
    if len(devices) > 1:
        _check_updates(type(optimizer).__name__, rows, devices, added)
    trained = [[var for _, var in row] for row in rows]
    return Updated(tf.group(*ops), trained, match_created(trained, created))


def all_variables() -> List[Any]:
    """Return the global and the local variables of the current graph, each once."""
    return list({id(var): var for var in tf1.global_variables() + tf1.local_variables()}.values())


def _check_updates(kind: str, rows: Sequence[Pairs], devices: Sequence[Any], added: Sequence[Sequence[Any]]) -> None:
    """Check that K updates, with K lists of ``added`` ops, change the towers alike and no variable twice."""
    for phrase in unequal_ops(added[0]):
        raise HierAllreduceError(
            f"{kind}: the update of {where(0, devices)} {phrase}, which no two towers would do alike, and they would"
            f" diverge. Do this once, before the all-reduce, {_AT_MAINS}"
        )
    writes = [written_by(of_tower) for of_tower in added]
    writer: Dict[str, int] = {}
    for tower, counts in enumerate(writes):
        for name in counts:
            if writer.setdefault(name, tower) != tower:
                raise HierAllreduceError(
                    f"{kind}: the updates of {where(writer[name], devices)} and of {where(tower, devices)} both write"
                    f" {name!r}, which would change more than once a step. Create one for each tower, {_AT_MAINS}"
                )
        for (_, var), (_, first) in zip(rows[tower], rows[0]):
            count, on_tower_0 = counts[var.op.name], writes[0][first.op.name]
            if count != on_tower_0:
                raise HierAllreduceError(
                    f"{kind}: the update of {where(tower, devices)} writes {var.op.name!r} {count} times, that of"
                    f" tower 0 writes {first.op.name!r} {on_tower_0} times: its _finish() is called once a step, in the"
                    f" last tower. Do this elsewhere, {_AT_MAINS}"
                )
