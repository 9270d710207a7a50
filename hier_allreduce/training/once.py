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

from ..compat import tf1
from ..errors import HierAllreduceError
from ..graph import broadcast
from ..graph.names import where
from ..graphs import needed_by
from .reads import Reads, uses_of, writers_of
from .replicas import replicas_by_name
from .towers import ReplicatedVariables, Towers, check_slots, ops_of_update, warn_of_moved_updates


def update_once(
    optimizer: Any, towers: Towers, arguments: Optional[Dict[str, Any]] = None
) -> Tuple[Any, ReplicatedVariables]:
    """Reduce to tower 0, call the optimizer there, and copy what it wrote to the other towers.

    Returns the op, and the replicas: the variables.

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
    grads = towers.reduce_on(0)
    reads = towers.reads([grads])
    # Arguments may list any tower's variables, because a program knows all of them.
    own_by_id = {id(var): column[0] for column in zip(*variables) for var in column}
    given = {key: _on_tower_0(value, own_by_id) for key, value in (arguments or {}).items()}
    with tf1.device(towers.devices[0]), towers.scope(0), ops_of_update() as added:
        pairs = list(zip(grads, variables[0]))
        updated = optimizer.apply_gradients(pairs, **given)
    optimizer_class = type(optimizer).__name__
    if updated is None:
        raise HierAllreduceError(
            f"{optimizer_class}.apply_gradients returned None: it must return the op of its update"
        )
    ends = tf.nest.flatten(updated)
    # An op that no step runs, such as a reset, is left alone, because the user runs it.
    added &= needed_by(getattr(end, "op", end) for end in ends)
    # No update on one device uses another tower's variable, because there is none.
    for tower, variables_there in enumerate(variables[1:], 1):
        for var in variables_there:
            if uses_of(var, added):
                raise HierAllreduceError(
                    f"{optimizer_class}: the update uses {var.op.name!r} of"
                    f" {where(tower, towers.devices)}, and runs once, on tower 0. Use the variables"
                    " that apply_gradients gets"
                )
    warn_of_moved_updates(optimizer, variables[0], added)
    # Replicas are found by name too, because an optimizer may write averages of its own.
    replicas = replicas_by_name(variables, towers.devices)
    reads.hold_writes(replicas[0], added)
    copied = _copy_new_values(replicas, towers, ends, added, reads)
    return tf.group(*ends, *copied), variables


def _copy_new_values(
    replicas: ReplicatedVariables,
    towers: Towers,
    ends: Sequence[Any],
    added: Set[Any],
    reads: Reads,
) -> List[Any]:
    """Return ops that copy each variable that ``added`` ops wrote, once the last has run."""
    # One tower has the new values already.
    if len(towers.devices) == 1:
        return []
    written = [column for column in zip(*replicas) if writers_of(column[0], added)]
    # Each value waits for its own writes only, so that the first copies start early.
    new_values = []
    for column in written:
        new_values.append(reads.new_value(column[0], towers.devices[0], added, ends))
    like = towers.options.strategy
    copied = broadcast(new_values, towers.devices, like=like) if new_values else []
    owners = dict.fromkeys(range(len(written)), 0)
    return reads.assign_copies(written, owners, copied, towers.devices)


def _on_tower_0(argument: Any, own_by_id: Dict[int, Any]) -> Any:
    """Return an argument, or a container of them, with tower 0's variables for any tower's.

    Args:
        argument: one of the optimizer's ``apply_gradients``, or what it holds.
        own_by_id: tower 0's replicas of all variables, by the ids of these.
    """
    if isinstance(argument, dict):
        items = argument.items()
        return {_on_tower_0(key, own_by_id): _on_tower_0(held, own_by_id) for key, held in items}
    # An iterator can be read once, so what it gives becomes a list.
    if isinstance(argument, (abc.Iterator, abc.KeysView, abc.ValuesView, abc.ItemsView)):
        argument = list(argument)
    if isinstance(argument, (list, tuple, set, frozenset)):
        make = getattr(argument, "_make", type(argument))  # of a namedtuple
        return make([_on_tower_0(member, own_by_id) for member in argument])
    return own_by_id.get(id(argument), argument)
