"""``update="replicated"``: every tower updates its own variables with one shared optimizer."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any, Callable, ContextManager, Dict, List, Sequence

import tensorflow as tf

from ..errors import HierAllreduceError
from ..graph import is_resource, tf1, where
from .updates import Updated
from .variable_writes import written_by
from .variables import Pairs, recording_created
from .wrapped_optimizers import one_loss_scale, optimizers_with_finish, without_finish

_ADVICE = "or use update='main' (not with a wrapper, unless it is tensorpack's), which updates each variable once"


def update_replicated(
    optimizer: Any,
    rows: Sequence[Pairs],
    devices: Sequence[Any],
    scope: Callable[[int], ContextManager] = lambda tower: contextlib.nullcontext(),
) -> Updated:
    """Update the variables of each tower on its device.

    The towers share ``optimizer``. It, or an optimizer that it wraps, may have work to do once a step, after the
    updates: Adam advances its beta powers. Only the last tower's update does that work, and it waits for the other
    updates, which read what the work changes. A loss scale is adapted once, too, from the first tower's
    gradients.

    Args:
        optimizer: applies the gradients; may be a wrapper.
        rows: K rows of N pairs, after the all-reduce.
        devices: K devices.
        scope: takes a tower's number; its context surrounds whatever that tower's update creates.

    Returns:
        K ops, and K lists of the variables that they created.

    Raises:
        HierAllreduceError: updates of several towers write one variable, or the last tower's does more than the
            others'.
    """
    once_a_step = optimizers_with_finish(optimizer)
    graph, updated = tf1.get_default_graph(), Updated([], [])
    writes: List[Counter] = []
    with one_loss_scale(optimizer):
        for tower, (row, device) in enumerate(zip(rows, devices)):
            last = tower == len(devices) - 1
            wait = tf.control_dependencies(updated.ops if once_a_step and last else [])
            finish = contextlib.nullcontext() if last else without_finish(once_a_step)
            before = len(graph.get_operations())
            with tf1.device(device), scope(tower), wait, finish, recording_created() as created:
                updated.ops.append(optimizer.apply_gradients(row, name=f"apply_grad_{tower}"))
            updated.created.append(created)
            writes.append(written_by(graph.get_operations()[before:]))
    kind = type(optimizer).__name__
    _refuse_shared_writes(kind, devices, writes)
    _refuse_unequal_writes(kind, rows, devices, writes)
    return updated


def _refuse_shared_writes(kind: str, devices: Sequence[Any], writes: Sequence[Counter]) -> None:
    """Check that no two of the K updates write the same variable; ``writes`` are K counts by name."""
    writer: Dict[str, int] = {}
    for tower, counts in enumerate(writes):
        for name in counts:
            if writer.setdefault(name, tower) != tower:
                raise HierAllreduceError(
                    f"{kind}: the updates of {where(writer[name], devices)} and of {where(tower, devices)} both write"
                    f" {name!r}, which would change more than once a step. Give every tower its own, {_ADVICE}"
                )


def _refuse_unequal_writes(kind: str, rows: Sequence[Pairs], devices: Sequence[Any], writes: Sequence[Counter]) -> None:
    """Check that each of the K updates writes its variables as often as tower 0's does."""
    for tower, counts in enumerate(writes):
        for (_, var), (_, first) in zip(rows[tower], rows[0]):
            count, on_tower_0 = counts[_op_name(var)], writes[0][_op_name(first)]
            if count != on_tower_0:
                raise HierAllreduceError(
                    f"{kind}: the update of {where(tower, devices)} writes {var.op.name!r} {count} times, that of"
                    f" tower 0 writes {first.op.name!r} {on_tower_0} times: its _finish() is called once a step, in the"
                    f" last tower. Do this elsewhere, {_ADVICE}"
                )


def _op_name(var: Any) -> str:
    """Return the name of the op that stands for a variable in the graph."""
    return str(var.handle.op.name if is_resource(var) else var.op.name)
