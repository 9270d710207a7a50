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
from functools import partial
from itertools import chain
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

import tensorflow as tf

from ..compat import forget_colocation, is_resource, outer_graph, tf1
from ..errors import HierAllreduceError
from ..formatting import warn
from ..graph import broadcast
from ..graph.names import where
from ..graph.rows import VAR_LIST_ADVICE, checked_pairs
from .equality import flags_of, watch
from .owned import apply_once, apply_sharded, on_tower_0
from .reads import Step, identity, ops_of_gradients, wait
from .replicas import by_names, columns_of, kept, names_of
from .replicated import apply_replicated, why_once, with_slices
from .sources import Sources
from .towers import GRADIENTS, Applied, Column, Towers

_APPLY = {"replicated": apply_replicated, "once": apply_once, "sharded": apply_sharded}


def checked_towers(towers: Towers) -> Towers:
    """Return towers whose rows are tuples of N (gradient, variable) pairs.

    Raises:
        HierAllreduceError: as :func:`.columns.checked_pairs`; or a gradient does not fit its
            variable; or towers share that, or pair it with others than an earlier update does, or
            that one has other devices.
    """
    towers = towers._replace(rows=checked_pairs(towers.rows, towers.devices))
    devices = kept().devices or tuple(towers.devices)
    if devices != tuple(towers.devices):
        raise HierAllreduceError(
            f"devices={list(towers.devices)}: an earlier apply_gradients in this graph is for"
            f" {list(devices)}, and a step has one set of towers; give all optimizers of a graph"
            " the same devices"
        )
    for tower, pairs in enumerate(towers.rows):
        # What is no gradient is refused before it is added up.
        tensors = [grad if isinstance(grad, GRADIENTS) else None for grad, _ in pairs]
        towers.check_fit(tower, tensors, "the rows have")
    # Copies are known by their place: another order would mix up two variables, and one that towers
    # share would be updated twice.
    place_by_variable: Dict[Any, Tuple[int, Sequence[str]]] = {}
    for column in (*kept().columns.values(), *towers.columns):
        here = names_of(column)
        for tower, var in enumerate(column):
            first, names = place_by_variable.setdefault(identity(var.op), (tower, here))
            if (first, names) != (tower, here):
                raise HierAllreduceError(
                    f"{where(tower, devices)} ({var.op.name!r}): its copies here are"
                    f" {', '.join(here)}, and elsewhere in the rows, or in an earlier"
                    f" apply_gradients, it is that of {where(first, devices)} among"
                    f" {', '.join(names)}; give every tower a copy, and list the variables in one"
                    f" order on every tower; {VAR_LIST_ADVICE}"
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
    before = {what: copy.copy(noted) for what, noted in notes.items()}
    train_ops = tf1.get_collection_ref(tf1.GraphKeys.TRAIN_OP)
    earlier_train_ops = list(train_ops)
    try:
        yield
    except BaseException:
        notes.update(before)
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
        layout = towers.lay_out()
        memory, scopes = kept(), towers.options.scopes
        memory.devices = tuple(towers.devices)
        memory.columns.update(by_names(towers.columns))
        told_apart = [tuple(scopes)] if scopes else by_names(towers.columns)
        memory.scopes.update(dict.fromkeys(told_apart, bool(scopes)))
        sources = Sources(type(optimizer).__name__, towers)
        memory.read.update(sources.read)
        applied = _APPLY[update](optimizer, towers, layout, on_tower_0(arguments))
        op = _complete(applied, towers, sources, name)
    # An op of a branch is no step that a program could run.
    if op.graph is outer_graph() and op._get_control_flow_context() is None:
        tf1.add_to_collection(tf1.GraphKeys.TRAIN_OP, op)
    if towers.options.check_replicas_every == 0:
        kept().compares_hosts = False
    return op


def _complete(applied: Applied, towers: Towers, sources: Sources, name: Optional[str]) -> Any:
    """Check what an update used, copy what it wrote, and hold it to the state of the towers."""
    # Sums read no variable, but a transform may: weight decay does, for one.
    transformed = applied.reduced if towers.options.transform is not None else ()
    step = Step([*towers.grads, *transformed], applied.added, applied.ends)
    columns = columns_of()
    sources.check(applied.ends, step, columns)
    written = []
    for column in columns:
        if any(var.op in step.writers for var in column):
            written.append(column)
    kept().columns.update(by_names(written))

    # Writes wait for the step's reads, and new values go to the towers that did not write them.
    for var in chain(*written):
        step.hold_writes(var)
    copied = _copies(written, applied, towers, step)

    # The step begins once every tower has a gradient: that data ends does not spoil the towers.
    flags, graph = flags_of(written), tf1.get_default_graph()
    begins = ops_of_gradients(reversed(applied.reduced[0]))
    with tf.control_dependencies([op for op in begins if op.graph is graph][:1]):
        taken = [flag.take() for flag in flags]
    wait(chain(*step.first.values()), taken)
    watch(towers.columns)
    op = tf.group(*applied.ends, *copied, *taken)
    with tf.control_dependencies([op]):
        return tf.group(op, *(flag.give() for flag in flags), name=name or "train_op")


def _copies(written: Sequence[Column], applied: Applied, towers: Towers, step: Step) -> List[Any]:
    """Return ops that give what some towers wrote to the other ones."""
    devices = towers.devices
    gathered = {towers.columns[n][0].op for n in applied.roots}
    of_tower_0 = []
    for column in written:
        if column[0].op not in gathered and any(var.op not in step.writers for var in column):
            of_tower_0.append(column)
    _check_no_references(of_tower_0, devices)
    # What is copied, on which tower each column has its new value, and how that travels.
    ways: List[Tuple[Sequence[Column], Mapping[int, int], Callable[..., Any]]] = [
        (towers.columns, applied.roots, applied.copy),
    ]
    if of_tower_0:
        down = partial(broadcast, devices=devices, like=towers.options.strategy)
        ways.append((of_tower_0, dict.fromkeys(range(len(of_tower_0)), 0), down))
    assigned = []
    for columns, owners, copy_of in ways:
        # Each value waits for its own writes only, so that the first copies start early.
        values: List[Any] = [None] * len(columns)
        for n, owner in owners.items():
            values[n] = step.new_value(columns[n][owner], devices[owner])
        copied = copy_of(values)
        for n, owner in owners.items():
            for tower in set(range(len(devices))) - {owner}:
                var, value = columns[n][tower], copied[tower][n]
                assigned.append(step.assign(var, value, devices[tower]))
    return assigned
