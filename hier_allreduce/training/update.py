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

import contextlib
import copy
from itertools import chain
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence

import tensorflow as tf

from ..compat import forget_colocation, is_resource, outer_graph, tensor_of, tf1
from ..errors import HierAllreduceError
from ..formatting import warn
from ..graph import broadcast
from ..graph.names import where
from ..graph.rows import VAR_LIST_ADVICE, checked_pairs
from .equality import flags_of, watch
from .owned import apply_once, apply_sharded, on_tower_0
from .reads import (
    Reads,
    Uses,
    first_uses,
    identity,
    ops_of_gradients,
    uses_by_variable,
    wait,
    writers_of,
)
from .replicas import by_names, columns_of, kept, names_of
from .replicated import apply_replicated, why_once, with_slices
from .sources import Sources
from .towers import GRADIENTS, Applied, Column, Towers, added_ops


def checked_towers(towers: Towers) -> Towers:
    """Return towers whose rows are tuples of N (gradient, variable) pairs.

    Raises:
        HierAllreduceError: as :func:`.columns.checked_pairs`; or a variable is eager or a
            partitioned one; or a gradient does not fit it; or towers share it, or pair it with
            others than an earlier update does.
    """
    towers = towers._replace(rows=checked_pairs(towers.rows, towers.devices))
    for tower, pairs in enumerate(towers.rows):
        for n, (_, var) in enumerate(pairs):
            if not hasattr(var, "op"):
                raise HierAllreduceError(
                    f"{where(tower, towers.devices, n)}: {var.name!r} is an eager or a partitioned"
                    " variable; create it in the towers' graph, and list the pieces of a"
                    " partitioned one"
                )
        # What is no gradient is refused before it is added up.
        tensors = [grad if isinstance(grad, GRADIENTS) else None for grad, _ in pairs]
        towers.check_fit(tower, tensors, "the rows have")
    # Copies are known by their place: another order would mix up two variables, and one that towers
    # share would be updated twice.
    place_by_variable: Dict[Any, Any] = {}
    for column in kept().columns[tuple(towers.devices)].values():
        for tower, var in enumerate(column):
            place_by_variable[identity(tensor_of(var).op)] = tower, names_of(column)
    for n, column in enumerate(towers.columns):
        for tower, var in enumerate(column):
            here = tower, names_of(column)
            first, names = place_by_variable.setdefault(identity(tensor_of(var).op), here)
            if (first, names) != here:
                raise HierAllreduceError(
                    f"{towers.place(tower, n)}: its copies here are {', '.join(here[1])}, and"
                    f" elsewhere in the rows, or in an earlier apply_gradients, it is that of"
                    f" {where(first, towers.devices)} among {', '.join(names)}; give every tower a"
                    f" copy, and list the variables in one order on every tower; {VAR_LIST_ADVICE}"
                )
    return towers


def _check_no_references(columns: Iterable[Column], devices: Sequence[Any]) -> None:
    """Raise a HierAllreduceError if a variable that is written is a reference variable."""
    for column in columns:
        for tower, var in enumerate(column):
            if not is_resource(var):
                raise HierAllreduceError(
                    f"{where(tower, devices)} ({var.op.name!r}): a reference variable, which an"
                    " update may overwrite while a gradient still reads it; create it with"
                    " use_resource=True, or call tf.compat.v1.enable_resource_variables() first"
                )


@contextlib.contextmanager
def _undone_if_it_fails() -> Iterator[None]:
    """Undo what a failed update noted of variables, so that the next call is as the first."""
    notes = vars(kept())
    before: Dict[str, Dict[Any, Any]] = {}
    for what in ("scopes", "columns", "read", "owners"):
        before[what] = {key: copy.copy(noted) for key, noted in notes[what].items()}
    train_ops = tf1.get_collection_ref(tf1.GraphKeys.TRAIN_OP)
    earlier_train_ops = list(train_ops)
    try:
        yield
    except BaseException:
        for what, noted in before.items():
            notes[what].clear()
            notes[what].update(noted)
        raise
    finally:
        # TensorFlow's optimizers add their own op, which is a part of the step.
        train_ops[:] = earlier_train_ops


def update_towers(
    optimizer: Any, towers: Towers, arguments: Dict[str, Any], name: Optional[str] = "train_op"
) -> Any:
    """Return the op that reduces the towers' gradients, updates their variables, and counts a step.

    An optimizer that is not known to do the same on each tower is called once, whatever the options
    say, and a warning says why.

    Args:
        optimizer: a ``tf.compat.v1.train.Optimizer``.
        towers: their gradients and variables; they are checked here, for every update.
        arguments: those of the optimizer's ``apply_gradients`` beside the pairs. Its
            ``global_step`` is one more after the update. Variables of any tower stand for those of
            tower 0.
        name: of the op.

    Raises:
        HierAllreduceError: as :func:`checked_towers`, and as the function of each update; or it
            writes a reference variable, or what has no known copies; or it uses what belongs to
            some towers only.
    """
    towers = with_slices(optimizer, checked_towers(towers))
    update = towers.options.update
    if len(towers.devices) > 1:
        _check_no_references(towers.columns, towers.devices)
    else:  # one tower has nothing to keep equal
        update = "once"
    reason = "" if update == "once" else why_once(optimizer, towers)
    if reason:
        warn(
            f"{reason}: tower 0 updates, and its new values are copied to the others; with"
            " update='once' you say so, and get no warning"
        )
    # TensorFlow's own optimizers take no argument but the step, and refuse another one themselves.
    if reason or arguments.keys() - {"global_step"}:
        update = "once"
    towers = towers._replace(update=update)
    # Towers have devices of their own, whatever the program colocates this call with.
    with forget_colocation(), _undone_if_it_fails():
        memory, there = kept(), tuple(towers.devices)
        memory.columns[there].update(by_names(towers.columns))
        scopes = towers.options.scopes
        told_apart = [tuple(scopes)] if scopes else by_names(towers.columns)
        memory.scopes[there].update(dict.fromkeys(told_apart))
        sources = Sources(towers)
        memory.read[there].update(sources.read())
        applied = _applied(optimizer, towers, on_tower_0(arguments, towers.devices))
        op = _complete(type(optimizer).__name__, applied, towers, sources, name)
    # An op of a branch is no step that a program could run.
    if op.graph is outer_graph() and op._get_control_flow_context() is None:
        tf1.add_to_collection(tf1.GraphKeys.TRAIN_OP, op)
    if towers.options.check_replicas_every == 0:
        kept().compares_hosts = False
    return op


def _applied(optimizer: Any, towers: Towers, arguments: Dict[str, Any]) -> Applied:
    """Reduce, call the optimizer on the owners of variables, and count the step."""
    # Once, the optimizer itself counts, as on one device.
    if towers.update == "once":
        return apply_once(optimizer, towers, arguments)
    apply = apply_sharded if towers.update == "sharded" else apply_replicated
    applied = apply(optimizer, towers)
    if "global_step" not in arguments:
        return applied
    with added_ops() as added, tf.control_dependencies(applied.ends):
        counted = tf1.assign_add(arguments["global_step"], 1).op
    return applied._replace(ends=[*applied.ends, counted], added=applied.added | added)


def _complete(
    optimizer: str, applied: Applied, towers: Towers, sources: Sources, name: Optional[str]
) -> Any:
    """Check what an update used, copy what it wrote, and hold it to the state of the towers."""
    devices, memory = towers.devices, kept()
    uses = uses_by_variable(applied.added)
    memory.columns[tuple(devices)].update(by_names(applied.state))
    columns = columns_of(devices)
    sources.check(applied.ends, uses, columns, optimizer)
    new = {id(var) for var in chain(*columns) if writers_of(var, uses)}
    written = [column for column in columns if not new.isdisjoint(map(id, column))]
    memory.columns[tuple(devices)].update(by_names(written))

    # Writes wait for the step's reads, and new values go to the towers that did not write them.
    reads = towers.reads(applied.reduced)
    by_update = [var for var in chain(*written) if id(var) in new]
    reads.hold_writes(by_update, applied.added, uses)
    partly = [column for column in written if not new.issuperset(map(id, column))]
    copied = _copies(partly, applied, towers, reads, uses)

    # The step begins once every tower has a gradient: that data ends does not spoil the towers.
    flags = flags_of(written, devices)
    graph = tf1.get_default_graph()
    begins = ops_of_gradients(reversed(applied.reduced[0]))
    with tf.control_dependencies([op for op in begins if op.graph is graph][:1]):
        taken = [flag.take() for flag in flags]
    wait(first_uses(applied.added), taken)
    watch(towers.columns)
    op = tf.group(*applied.ends, *copied, *taken)
    with tf.control_dependencies([op]):
        given = [flag.give() for flag in flags if flag.devices == tuple(devices)]
        return tf.group(op, *given, name=name)


def _copies(
    partly: Sequence[Column], applied: Applied, towers: Towers, reads: Reads, uses: Uses
) -> List[Any]:
    """Return ops that give what some towers wrote to the other ones."""
    devices, roots = towers.devices, applied.roots
    assigned = []
    # Each value waits for its own writes only, so that the first copies start early.
    if applied.copy is not None:
        values: List[Any] = [None] * len(towers.columns)
        for n, root in roots.items():
            var = towers.columns[n][root]
            values[n] = reads.new_value(var, devices[root], uses, applied.ends)
        assigned += reads.assign_copies(towers.columns, roots, applied.copy(values), devices)
    gathered = {id(towers.columns[n][0]) for n in roots}
    others = [column for column in partly if id(column[0]) not in gathered]
    _check_no_references(others, devices)
    if others:
        values = [reads.new_value(var, devices[0], uses, applied.ends) for var, *_ in others]
        copied = broadcast(values, devices, like=towers.options.strategy)
        owners = dict.fromkeys(range(len(others)), 0)
        assigned += reads.assign_copies(others, owners, copied, devices)
    return assigned
