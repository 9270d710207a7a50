"""``update="once"``: the optimizer is called once, on tower 0, and its results are copied.

::

    K×N gradients ─► sums on roots ─► tower 0: apply_gradients ─► new values, down a tree

The optimizer sees what it sees on one device: tower 0's variables, one gradient for each, the
global step, all arguments. Whatever state it has exists once, under the names of one device.

Source: Chainer's MultiprocessParallelUpdater, which reduces to the main GPU, updates there, and
broadcasts the parameters.
"""

from __future__ import annotations

from collections import abc
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import tensorflow as tf

from ..compat import slots_in_any_scope, tf1
from ..errors import HierAllreduceError
from ..graph import copy_from_tower_0
from ..graph.names import where
from .reads import Reads, last_writes, ops_before, uses_of, writers_of
from .replicas import copies_by_name
from .towers import ReplicatedVariables, Towers, check_slots, warn_of_moved_updates


def update_once(
    optimizer: Any, towers: Towers, arguments: Optional[Dict[str, Any]] = None
) -> Tuple[Any, ReplicatedVariables]:
    """Reduce to tower 0, call the optimizer there, and copy what it wrote to the other towers.

    Returns the op, and the copies: the variables.

    Args:
        optimizer: any.
        towers: their gradients and variables.
        arguments: more arguments of its ``apply_gradients``, also ``global_step``.

    Raises:
        HierAllreduceError: found once the ops are there: ``apply_gradients`` returned nothing, or
            uses variables of another tower.
    """
    variables = towers.variables
    check_slots(optimizer, dict(enumerate(variables[0])), 0, towers.devices)
    reads = Reads(towers.grads)
    grads = towers.reduce_on(0)
    graph = tf1.get_default_graph()
    made_before = len(graph.get_operations())
    given = {name: _on_tower_0(value, variables) for name, value in (arguments or {}).items()}
    with tf1.device(towers.devices[0]), towers.scope(0), slots_in_any_scope():
        pairs = list(zip(grads, variables[0]))
        updated = optimizer.apply_gradients(pairs, **given)
    kind = type(optimizer).__name__
    if updated is None:
        raise HierAllreduceError(
            f"{kind}.apply_gradients returned None: it must return the op of its update"
        )
    ends = tf.nest.flatten(updated)
    # an op that the optimizer made and that no step runs, such as a reset, is the user's to run
    in_step = ops_before(getattr(end, "op", end) for end in ends)
    added = in_step.intersection(graph.get_operations()[made_before:])
    _check_uses_tower_0(kind, towers, added)
    warn_of_moved_updates(optimizer, variables[0], added)
    copies = copies_by_name(variables, towers.devices)
    reads.hold_writes(copies[0], added)
    copied = _copy_new_values(copies, towers, ends, added, reads)
    return tf.group(*ends, *copied), variables


def _copy_new_values(
    copies: ReplicatedVariables,
    towers: Towers,
    ends: Sequence[Any],
    added: Set[Any],
    reads: Reads,
) -> List[Any]:
    """Return ops that copy each variable that ``added`` ops wrote, as soon as the last has run."""
    if len(towers.devices) == 1:
        return []
    written = [column for column in zip(*copies) if writers_of(column[0], added)]
    values = []
    for column in written:
        after = last_writes(column[0], added) or ends
        with tf.control_dependencies(after), tf1.device(towers.devices[0]):
            values.append(column[0].read_value())
    rows = copy_from_tower_0(values, towers.devices) if values else []
    ops = []
    for tower, row in enumerate(rows):
        for column, value in zip(written, row) if tower else ():
            var = column[tower]
            with tf1.device(towers.devices[tower]), tf.control_dependencies(reads.of(var)):
                ops.append(var.assign(value, read_value=False))
    return ops


def _on_tower_0(value: Any, variables: ReplicatedVariables) -> Any:
    """Return an argument, or a container of them, with tower 0's variables for any tower's."""
    of_tower_0 = {id(var): column[0] for column in zip(*variables) for var in column}

    def replaced(item: Any) -> Any:
        if isinstance(item, dict):
            return {replaced(key): replaced(inner) for key, inner in item.items()}
        if isinstance(item, (abc.Iterator, abc.KeysView, abc.ValuesView, abc.ItemsView)):
            item = list(item)
        if isinstance(item, (list, tuple, set, frozenset)):
            make = getattr(item, "_make", type(item))  # of a namedtuple
            return make([replaced(inner) for inner in item])
        return of_tower_0.get(id(item), item)

    return replaced(value)


def _check_uses_tower_0(kind: str, towers: Towers, added: Set[Any]) -> None:
    """Check that an update uses no variable of another tower; one device has none."""
    for tower, row in enumerate(towers.variables):
        for var in row if tower else ():
            if uses_of(var, added):
                raise HierAllreduceError(
                    f"{kind}: the update uses {var.op.name!r} of {where(tower, towers.devices)},"
                    " and runs once, on tower 0. Use the variables that apply_gradients gets"
                )
