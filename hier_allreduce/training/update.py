"""The update of K towers, for every front end: which of the three it is, and what it may get.

::

    "replicated"    every tower updates its variables         TensorFlow's own optimizers
    "sharded"       each variable is updated on its root      the same
    "once"          tower 0 updates its variables             any optimizer

Numbers are those of one device with each of them. They differ in speed and memory.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import tensorflow as tf

from ..compat import in_current_graph, is_resource, tensor_of, tf1
from ..errors import HierAllreduceError
from ..graph.columns import fits, static_shape
from ..graph.names import where
from ..graph.record import log_once
from ..graph.rows import VAR_LIST_ADVICE, checked_pairs
from .once import update_once
from .replicas import note_replicas
from .replicated import update_replicated, why_not_replicated, why_once, with_rows
from .sharded import update_sharded
from .towers import ReplicatedVariables, Towers


def check_optimizer(optimizer: Any) -> None:
    """Raise a HierAllreduceError if ``optimizer`` is for the workers of parameter servers."""
    if isinstance(optimizer, tf1.train.SyncReplicasOptimizer):
        raise HierAllreduceError(
            f"{type(optimizer).__name__} collects gradients of parameter servers' workers; towers'"
            " gradients are added up already: use the optimizer inside it"
        )


def checked_towers(towers: Towers, earlier: Sequence[Sequence[Any]] = ()) -> Towers:
    """Return towers whose rows are tuples of N (gradient, variable) pairs.

    Raises:
        HierAllreduceError: as :func:`.columns.checked_pairs`; or a variable is of another graph; or
            towers share one, or pair it with others than ``earlier`` replicas do; or it does not
            fit its gradient.
    """
    devices = towers.devices
    rows = checked_pairs(towers.rows, devices)
    towers = towers._replace(rows=rows)
    _check_graph(towers)
    tower_by_id: Dict[int, int] = {}
    column_by_id: Dict[int, Any] = {}
    for column in zip(*earlier):
        column_by_id.update({id(var): column for var in column})
    for tower, pairs in enumerate(rows):
        for n, (grad, var) in enumerate(pairs):
            on_tower_0 = rows[0][n][1]
            fault = ""
            # TensorFlow would refuse this too, but its error would name no tower. What is no
            # gradient is refused before it is added up.
            if isinstance(grad, (tf.Tensor, tf.IndexedSlices)) and not fits(grad, var):
                fault = (
                    f"a gradient of {grad.dtype.name} {static_shape(grad)} for {var.dtype.name}"
                    f" {var.shape}; pair each gradient with its variable, and cast it to the"
                    " variable's dtype"
                )
            # Each tower updates its variables, so that a shared one would be updated twice.
            if tower_by_id.setdefault(id(var), tower) != tower:
                fault = (
                    f"the same variable is in the row of {where(tower_by_id[id(var)], devices)};"
                    f" give every tower a copy; {VAR_LIST_ADVICE}"
                )
            # Replicas are known by their place, so that another order would mix up two variables.
            known = column_by_id.get(id(var)) or column_by_id.get(id(on_tower_0))
            if known and not fault and (known[0] is not on_tower_0 or known[tower] is not var):
                fault = (
                    f"it is listed as a copy of {on_tower_0.op.name!r}, but in an earlier"
                    f" apply_gradients {known[tower].op.name!r} was the copy of"
                    f" {known[0].op.name!r}; list the variables in one order on every tower"
                )
            if fault:
                raise HierAllreduceError(f"{towers.place(tower, n)}: {fault}")
    return towers


def _check_graph(towers: Towers) -> None:
    """Raise a HierAllreduceError if a variable is one of another graph, or of eager code."""
    for tower, variables in enumerate(towers.variables):
        for n, var in enumerate(variables):
            if not is_resource(var) and not hasattr(var, "op"):
                raise HierAllreduceError(
                    f"{where(tower, towers.devices, n)}: expected a variable, not the"
                    f" {type(var).__name__} {var.name!r}; of a partitioned variable pair each"
                    " piece with its gradient"
                )
            # No name of an op is read, because an eager variable has none.
            if not in_current_graph(tensor_of(var)):
                raise HierAllreduceError(
                    f"{where(tower, towers.devices, n)}: {var.name!r} does not belong to the graph"
                    " that is being built; create the variables inside `with graph.as_default():`,"
                    " where the towers are"
                )


def _check_no_references(towers: Towers) -> None:
    """Raise a HierAllreduceError if a variable is a reference variable."""
    for tower, variables in enumerate(towers.variables):
        for n, var in enumerate(variables):
            if not is_resource(var):
                raise HierAllreduceError(
                    f"{towers.place(tower, n)}: a reference variable, which an update may overwrite"
                    " while a gradient still reads it; create it with use_resource=True, or call"
                    " tf.compat.v1.enable_resource_variables() first"
                )


def _chosen_update(optimizer: Any, towers: Towers) -> Tuple[str, str]:
    """Return which of the three it is, and why it is once although another one is asked for."""
    update = towers.options.update
    # One tower needs none but once, because it has nothing to keep equal.
    if update == "once" or len(towers.devices) == 1:
        return "once", ""
    reason = why_once(optimizer, towers)
    if update == "replicated":
        reason = reason or why_not_replicated(optimizer, towers)
    return "once" if reason else update, reason


def update_towers(
    optimizer: Any,
    towers: Towers,
    arguments: Optional[Dict[str, Any]] = None,
    earlier: Sequence[Sequence[Any]] = (),
    name: str = "train_op",
    check: Callable[[], Any] = tf.no_op,
) -> Tuple[Any, ReplicatedVariables]:
    """Reduce the towers' gradients, update their variables, and count the step.

    An optimizer that is not known to do the same on each tower is called once, whatever the options
    say, and a line in the log says why.

    Returns the op, and the replicas that it keeps equal: K rows of variables and of their state.

    Args:
        optimizer: a ``tf.compat.v1.train.Optimizer``.
        towers: their gradients and variables; they are checked here, for every update.
        arguments: those of the optimizer's ``apply_gradients`` beside the pairs. Its
            ``global_step`` is one more after the update.
        earlier: K rows of the replicas of earlier updates in this graph.
        name: of the op.
        check: returns one more op of the step.

    Raises:
        HierAllreduceError: as :func:`checked_towers`, and as the function of each update; or a
            reference variable; or the optimizer has powers of beta from an earlier update.
    """
    towers = with_rows(optimizer, checked_towers(towers, earlier))

    update, reason = _chosen_update(optimizer, towers)
    towers = towers._replace(update=update)
    # A front end may let reference variables be, but not where new values of them are copied.
    are_copied = update != "replicated" and len(towers.devices) > 1
    if are_copied or not towers.may_have_references:
        _check_no_references(towers)
    if reason:
        log_once(
            f"{reason}: tower 0 updates, and its new values are copied to the others"
            " (update='once')"
        )

    # Update, and count the step. Once, the optimizer itself counts, as on one device.
    arguments = arguments or {}
    train_ops = tf1.get_collection_ref(tf1.GraphKeys.TRAIN_OP)
    earlier_train_ops = list(train_ops)
    if update == "once":
        op, replicas = update_once(optimizer, towers, arguments)
    else:
        build = update_sharded if update == "sharded" else update_replicated
        op, replicas = build(optimizer, towers)
        if "global_step" in arguments:
            with tf.control_dependencies([op]):
                op = tf1.assign_add(arguments["global_step"], 1).op
    # TensorFlow's optimizers add their own op, which is a part of the step.
    op = tf.group(op, check(), name=name)
    train_ops[:] = [*earlier_train_ops, op]
    # A later update, or init_op, finds more replicas by the names of these.
    note_replicas(replicas, towers.devices)
    return op, replicas
