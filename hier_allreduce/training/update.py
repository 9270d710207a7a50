"""The update of K towers, for every front end: which of the three it is, and how towers stay equal.

::

    replicated   all_reduce ────────────────────────────► K × apply_gradients   every tower owns
    sharded      reduce_scatter ─► apply_gradients ─► all_gather                a root owns each
    once         reduce to 0 ────► apply_gradients ─► broadcast                 tower 0 owns all

Afterwards, for all three: what the update's ops wrote, and other towers have a copy of, is copied
to them: the step, averages, masks. Each write waits for the reads of its variable in this step.

Numbers are those of one device with each of them. They differ in speed and memory. "once" takes any
optimizer, the others TensorFlow's own.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import tensorflow as tf

from ..compat import forget_colocation, in_current_graph, is_resource, tensor_of, tf1
from ..errors import HierAllreduceError
from ..formatting import warn
from ..graph import broadcast
from ..graph.columns import fits, static_shape
from ..graph.names import where
from ..graph.rows import VAR_LIST_ADVICE, checked_pairs
from ..graphs import memory_of
from .equality import flags_of, watch
from .owned import apply_once, apply_sharded
from .reads import Reads, Uses, first_uses, ops_of_gradients, uses_by_variable, wait, writers_of
from .replicas import columns_of, distinct, kept, names_of
from .replicated import apply_replicated, why_once, with_rows
from .sources import Sources
from .towers import Applied, Column, Towers, added_ops, identity, warn_of_moved_updates


def check_optimizer(optimizer: Any) -> None:
    """Raise a HierAllreduceError if ``optimizer`` is for the workers of parameter servers."""
    if isinstance(optimizer, tf1.train.SyncReplicasOptimizer):
        raise HierAllreduceError(
            f"{type(optimizer).__name__} collects gradients of parameter servers' workers; towers'"
            " gradients are added up already: use the optimizer inside it"
        )


def checked_towers(towers: Towers, earlier: Sequence[Column] = ()) -> Towers:
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
    tower_by_id: Dict[Any, int] = {}
    column_by_id: Dict[int, Any] = {}
    for column in earlier:
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
            same = identity(var)
            if tower_by_id.setdefault(same, tower) != tower:
                fault = (
                    f"the same variable is in the row of {where(tower_by_id[same], devices)};"
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


def _check_no_references(columns: Sequence[Column], devices: Sequence[Any]) -> None:
    """Raise a HierAllreduceError if a variable that is written is a reference variable."""
    for column in columns:
        for tower, var in enumerate(column):
            if not is_resource(var):
                raise HierAllreduceError(
                    f"{where(tower, devices)} ({var.op.name!r}): a reference variable, which an"
                    " update may overwrite while a gradient still reads it; create it with"
                    " use_resource=True, or call tf.compat.v1.enable_resource_variables() first"
                )


def _chosen_update(optimizer: Any, towers: Towers) -> str:
    """Return which of the three it is; a warning says why, if another one is asked for."""
    update = towers.options.update
    # One tower needs none but once, because it has nothing to keep equal.
    if update == "once" or len(towers.devices) == 1:
        return "once"
    reason = why_once(optimizer, towers)
    if reason:
        warn(
            f"{reason}: tower 0 updates, and its new values are copied to the others; with"
            " update='once' you say so, and get no warning"
        )
    return "once" if reason else update


def update_towers(
    optimizer: Any,
    towers: Towers,
    arguments: Optional[Dict[str, Any]] = None,
    earlier: Sequence[Column] = (),
    name: str = "train_op",
) -> Tuple[Any, List[Column]]:
    """Reduce the towers' gradients, update their variables, and count the step.

    An optimizer that is not known to do the same on each tower is called once, whatever the options
    say, and a warning says why.

    Returns the op, and the columns that it keeps equal: all that the update writes.

    Args:
        optimizer: a ``tf.compat.v1.train.Optimizer``.
        towers: their gradients and variables; they are checked here, for every update.
        arguments: those of the optimizer's ``apply_gradients`` beside the pairs. Its
            ``global_step`` is one more after the update.
        earlier: the columns of earlier updates in this graph.
        name: of the op.

    Raises:
        HierAllreduceError: as :func:`checked_towers`, and as the function of each update; or it
            writes a reference variable, or what has no known copies; or it uses what belongs to
            some towers only.
    """
    towers = with_rows(optimizer, checked_towers(towers, earlier))
    # Towers have devices of their own, whatever the program colocates this call with.
    with forget_colocation():
        update = _chosen_update(optimizer, towers)
        towers = towers._replace(update=update)
        # A front end may let reference variables be, but not where new values of them are copied.
        are_copied = update != "replicated" and len(towers.devices) > 1
        if are_copied or not towers.may_have_references:
            _check_no_references(towers.columns, towers.devices)
        train_ops = tf1.get_collection_ref(tf1.GraphKeys.TRAIN_OP)
        earlier_train_ops = list(train_ops)
        sources = Sources(towers)
        applied = _applied(optimizer, towers, arguments or {})
        op, columns = _complete(type(optimizer).__name__, applied, towers, sources, name)
        # TensorFlow's optimizers add their own op, which is a part of the step.
        train_ops[:] = [*earlier_train_ops, op]
    if towers.options.check_replicas_every == 0:
        memory_of(tf1.get_default_graph()).compares_hosts = False
    return op, columns


def _applied(optimizer: Any, towers: Towers, arguments: Dict[str, Any]) -> Applied:
    """Reduce, call the optimizer on the owners of variables, and count the step."""
    # Once, the optimizer itself counts, as on one device.
    if towers.update == "once":
        return apply_once(optimizer, towers, arguments)
    apply = apply_sharded if towers.update == "sharded" else apply_replicated
    applied = apply(optimizer, towers)
    if "global_step" not in arguments:
        return applied
    step = arguments["global_step"]
    for column in columns_of(towers.columns, towers.devices, towers.options.scopes):
        if any(var is step for var in column):
            step = column[0]
    with added_ops() as added, tf.control_dependencies(applied.ends):
        counted = tf1.assign_add(step, 1).op
    return applied._replace(ends=[*applied.ends, counted], added=applied.added | added)


def _complete(
    optimizer: str, applied: Applied, towers: Towers, sources: Sources, name: str
) -> Tuple[Any, List[Column]]:
    """Check what an update used, copy what it wrote, and hold it to the state of the towers.

    Returns the op of the step, and the columns that it writes.
    """
    devices, trained = towers.devices, towers.columns
    uses = uses_by_variable(applied.added)
    columns = columns_of([*trained, *applied.state], devices, towers.options.scopes)
    noted = kept()
    noted.read.update(sources.read_by_some())
    if len(devices) > 1:
        sources.check(applied.ends, uses, columns, optimizer)
    warn_of_moved_updates(optimizer, [var for column in trained for var in column], uses)
    written = [column for column in columns if any(writers_of(var, uses) for var in column)]

    # Writes wait for the step's reads, and new values go to the towers that did not write them.
    reads = towers.reads(applied.reduced)
    by_update = [var for column in written for var in column if writers_of(var, uses)]
    reads.hold_writes(by_update, applied.added, uses)
    copied = _copies(written, applied, towers, reads, uses)

    # The step begins once every tower has a gradient: that data ends does not spoil the towers.
    noted.trained[tuple(devices)].update(names_of(trained))
    noted.written[tuple(devices)].update(names_of([*trained, *applied.state, *written]))
    flags = flags_of(written, devices)
    graph = tf1.get_default_graph()
    begins = ops_of_gradients(reversed(applied.reduced[0]))
    with tf.control_dependencies([op for op in begins if op.graph is graph][:1]):
        taken = [flag.take() for flag in flags]
    wait(first_uses(applied.added), taken)
    watch(trained)
    op = tf.group(*applied.ends, *copied, *taken)
    with tf.control_dependencies([op]):
        given = [flag.give() for flag in flags if flag.devices == tuple(devices)]
        return tf.group(op, *given, name=name), distinct([*trained, *applied.state, *written])


def _copies(
    written: Sequence[Column], applied: Applied, towers: Towers, reads: Reads, uses: Uses
) -> List[Any]:
    """Return ops that give what an update wrote to the towers that did not write it."""
    devices = towers.devices
    gathered: Dict[int, int] = applied.roots or {}
    rows = {id(towers.columns[n][0]) for n in gathered}
    partly = [
        column
        for column in written
        if id(column[0]) not in rows and not all(writers_of(var, uses) for var in column)
    ]
    _check_no_references(partly, devices)
    assigned = []
    # Each value waits for its own writes only, so that the first copies start early.
    if applied.copy is not None:
        values: List[Any] = [None] * len(towers.columns)
        for n, root in gathered.items():
            var = towers.columns[n][root]
            values[n] = reads.new_value(var, devices[root], uses, applied.ends)
        assigned += reads.assign_copies(towers.columns, gathered, applied.copy(values), devices)
    if partly:
        values = [reads.new_value(column[0], devices[0], uses, applied.ends) for column in partly]
        owners = dict.fromkeys(range(len(partly)), 0)
        copied = broadcast(values, devices, like=towers.options.strategy)
        assigned += reads.assign_copies(partly, owners, copied, devices)
    return assigned
