"""What happens around the all-reduce: who updates the variables.

::

    update="replicated"                          update="main"
    every tower gets the reduced gradients       each variable's main gets its reduced gradient,
    and updates its own variables                updates it there once, and copies the new value to the others

With mains chosen by bytes the second keeps every optimizer slot once, spread over the devices, instead of K times.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
from collections import Counter
from typing import (
    Any,
    Callable,
    Container,
    ContextManager,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import tensorflow as tf

from ..errors import StrategyError, VariableError
from ..graph import (
    check_matrix,
    copy_from_mains,
    is_resource,
    reduce_to_mains,
    static_shape,
    tf1,
    variable_names,
    where,
)
from ..planning import Strategy
from .variable_writes import written_by

Pairs = Sequence[Tuple[Any, Any]]  # N (gradient, variable) pairs of one tower

UPDATES = ("replicated", "main")
_FINISH = inspect.signature(tf1.train.Optimizer._finish).parameters
# where TensorFlow's mixed precision wrappers keep their loss scale, and what adapts it; the second is tf.contrib's
_LOSS_SCALES = (("_loss_scale", "update"), ("_loss_scale_manager", "update_loss_scale"))


def check_update(update: str, strategy: Strategy) -> str:
    """``update`` if it is one, and goes with the strategy.

    Raises:
        StrategyError: it is none, or the strategy cuts variables that must have one main each.
    """
    if update not in UPDATES:
        raise StrategyError(f"update={update!r} is unknown; there are {', '.join(map(repr, UPDATES))}")
    if update == "main" and (strategy.splits > 1 or strategy.split_above):
        raise StrategyError(
            f"splits={strategy.splits}, split_above={strategy.split_above}: this strategy cuts gradients over several"
            " mains, but with update='main' each variable has one; leave both at 0"
        )
    if update == "main" and strategy.whole is False:
        raise StrategyError(
            "whole=False cuts gradients over several mains, but with update='main' each variable has one; leave it out"
        )
    return update


def held_by(optimizer: Any) -> List[Any]:
    """``optimizer`` and, if it is a wrapper, those that it holds, from outside to inside."""
    found = [optimizer]
    for one in found:
        waiting = list(vars(one).values())
        while waiting:
            held = waiting.pop(0)
            if isinstance(held, Mapping):
                waiting = [*held.values(), *waiting]
            elif isinstance(held, (list, tuple)):
                waiting = [*held, *waiting]
            elif isinstance(held, tf1.train.Optimizer) and all(held is not known for known in found):
                found.append(held)
    return found


def refuse_unfit(optimizer: Any) -> None:
    """Check that towers can be updated by ``optimizer``.

    Raises:
        VariableError: it, or one that it holds, is tensorpack's ``AccumGradOptimizer``, or made for ``tf.distribute``.
    """
    _refuse_accumulation(optimizer)
    _refuse_other_interface(optimizer)


def _refuse_accumulation(optimizer: Any) -> None:
    """Refuse tensorpack's own accumulation of gradients: it looks at its counter while the same step advances it.

    Each tower has a counter, so that now and then some towers apply what others do not.
    """
    theirs = ("tensorpack.tfutils.optimizer", "AccumGradOptimizer")
    for one in held_by(optimizer):
        if any((kind.__module__, kind.__name__) == theirs for kind in type(one).__mro__):
            raise VariableError(
                f"{type(one).__name__} reads its counter while the same step advances it, so the towers would part;"
                " give hier_allreduce.integrations.tensorpack.OrderedAccumGrad(optimizer, niter) in its place"
            )


def _refuse_other_interface(optimizer: Any) -> None:
    """Refuse optimizers that are made for ``tf.distribute``, of ``tf.contrib.optimizer_v2``."""
    for one in held_by(optimizer):
        if len(inspect.signature(type(one)._finish).parameters) != len(_FINISH):
            raise VariableError(
                f"{type(one).__module__}.{type(one).__name__} is made for tf.distribute; take an optimizer of"
                " tf.compat.v1.train"
            )


def sum_advice(optimizer: Any, towers: int) -> str:
    """What to change in an optimizer that is given the sum over K towers where it was tuned for their mean.

    Of a wrapper, what to change in the optimizer inside.

    Source of the corrections: Chainer's MultiprocessParallelUpdater, which makes them itself.
    """
    kind = type(held_by(optimizer)[-1]).__name__
    epsilon = {"AdamOptimizer": towers, "AdagradOptimizer": towers, "RMSPropOptimizer": towers}
    epsilon["AdadeltaOptimizer"] = towers**2
    change = f"multiply its epsilon by {epsilon[kind]}" if kind in epsilon else f"divide its learning rate by {towers}"
    return f"{kind} is given the sum over {towers} towers: {change}, or use average=True"


# ---- every tower for itself ------------------------------------------------------------------------


class Updated(NamedTuple):
    """The ops that update variables, one for each tower or one at the mains, and what each of them has created."""

    ops: List[Any]
    created: List[List[Any]]


def update_replicated(
    optimizer: Any,
    rows: Sequence[Pairs],
    devices: Sequence[Any],
    scope: Callable[[int], ContextManager] = lambda tower: contextlib.nullcontext(),
) -> Updated:
    """One update for each tower on its device.

    The towers share ``optimizer``. Where it, or one that it holds, has work to do once a step, after the updates (Adam
    advances its beta powers), only the last tower's update does it, and waits for the others, which read what it
    changes. A loss scale is adapted once, too, by what the first tower's gradients are.

    Args:
        optimizer: what applies gradients; perhaps a wrapper.
        rows: K rows of N pairs, after the all-reduce.
        devices: K devices.
        scope: entered for each tower's number, around what its update creates.

    Raises:
        VariableError: several towers' updates write one variable, or the last one's does more than the others'.
    """
    once_a_step = [one for one in held_by(optimizer) if type(one)._finish is not tf1.train.Optimizer._finish]
    graph, found = tf1.get_default_graph(), Updated([], [])
    written: List[Counter] = []
    with _one_loss_scale(optimizer):
        for tower, (row, device) in enumerate(zip(rows, devices)):
            last = tower == len(devices) - 1
            wait = tf.control_dependencies(found.ops if once_a_step and last else [])
            finish = contextlib.nullcontext() if last else _without_finish(once_a_step)
            before = len(graph.get_operations())
            with tf1.device(device), scope(tower), wait, finish, _noting_created() as created:
                found.ops.append(optimizer.apply_gradients(row, name=f"apply_grad_{tower}"))
            found.created.append(created)
            written.append(written_by(graph.get_operations()[before:]))
    _refuse_unlike_updates(optimizer, rows, devices, written)
    return found


def all_variables() -> List[Any]:
    """The global and the local variables of the graph that is being built, each once."""
    return list({id(var): var for var in tf1.global_variables() + tf1.local_variables()}.values())


@contextlib.contextmanager
def _noting_created() -> Iterator[List[Any]]:
    """A list that has the variables which are created while this lasts, afterwards."""
    created: List[Any] = []
    known = {id(var) for var in all_variables()}
    yield created
    created += [var for var in all_variables() if id(var) not in known]


def _refuse_unlike_updates(
    optimizer: Any, rows: Sequence[Pairs], devices: Sequence[Any], written: Sequence[Counter]
) -> None:
    kind = type(optimizer).__name__
    advice = "or use update='main' (not with a wrapper, unless it is tensorpack's), which updates each variable once"
    writer: Dict[str, int] = {}
    for tower, counts in enumerate(written):
        for name in counts:
            if writer.setdefault(name, tower) != tower:
                raise VariableError(
                    f"{kind}: the updates of {where(writer[name], devices)} and of {where(tower, devices)} both write"
                    f" {name!r}, which would change more than once a step. Let every tower have its own, {advice}"
                )
        for (_, var), (_, first) in zip(rows[tower], rows[0]):
            often, on_tower_0 = counts[_handle(var)], written[0][_handle(first)]
            if often != on_tower_0:
                raise VariableError(
                    f"{kind}: the update of {where(tower, devices)} writes {var.op.name!r} {often} times, that of"
                    f" tower 0 writes {first.op.name!r} {on_tower_0} times: its _finish() is called once a step, in the"
                    f" last tower. Do this elsewhere, {advice}"
                )


def _handle(var: Any) -> str:
    return str(var.handle.op.name if is_resource(var) else var.op.name)


@contextlib.contextmanager
def _without_finish(optimizers: Sequence[Any]) -> Iterator[None]:
    """While this lasts, updates do not end with these optimizers' ``_finish``."""
    for one in optimizers:
        one._finish = _nothing_more
    try:
        yield
    finally:
        for one in optimizers:
            del one._finish  # the method of its class is there again


def _nothing_more(update_ops: Any, name_scope: Any) -> Any:
    return tf.group(*update_ops, name=name_scope)


@contextlib.contextmanager
def _one_loss_scale(optimizer: Any) -> Iterator[None]:
    """While this lasts, TensorFlow's mixed precision wrappers adapt their loss scale for the first tower only.

    The other towers, whose gradients are the same, are told what it was told: whether to apply them.
    """
    with contextlib.ExitStack() as then:
        for one in held_by(optimizer):
            for attribute, method in _LOSS_SCALES:
                scale = getattr(one, attribute, None)
                if type(scale).__module__.startswith("tensorflow") and method not in vars(scale):
                    setattr(scale, method, _first_result(getattr(scale, method)))
                    then.callback(delattr, scale, method)  # the method of its class is there again
        yield


def _first_result(function: Callable[..., Any]) -> Callable[..., Any]:
    results: List[Any] = []

    def again(*args: Any, **kwargs: Any) -> Any:
        if not results:
            results.append(function(*args, **kwargs))
        return results[0]

    return again


# ---- each variable's main for all ------------------------------------------------------------------


def update_at_mains(
    optimizer: Any,
    rows: Sequence[Pairs],
    devices: Sequence[Any],
    average: bool,
    strategy: Strategy,
    base: Optional[Any] = None,
    cluster: Optional[Any] = None,
) -> Updated:
    """Reduce to the mains, update there once, copy the new values to the other towers over the same plan.

    Source: Chainer's MultiprocessParallelUpdater; its one main is here each variable's own.

    Args:
        optimizer: given N gradients, each with the variable of the tower that is its main. Its slots live there, and
            are named like those of tower 0's variable.
        rows: K rows of N pairs, before the all-reduce.
        devices: K devices.
        average: the mean of the gradients, or their sum.
        strategy: how to reduce and copy.
        base: the optimizer that updates, if ``optimizer`` is a wrapper that is known to pass all gradients on to it.
        cluster: of several hosts, each of which updates its own variables.

    Raises:
        GradientError: as :func:`hier_allreduce.allreduce_grads_and_vars`.
        StrategyError: the strategy cuts variables over several mains.
        VariableError: the variables differ between towers, are reference variables or pieces of partitioned ones, or
            ``optimizer`` cannot run on one device only.
    """
    refuse_wrapper(optimizer if base is None else base)
    check_variables(rows, devices)
    names = variable_names(rows, devices)
    _refuse_pieces(rows[0], devices, names)
    grads = check_matrix([[grad for grad, _ in row] for row in rows], tuple(devices), average, names)
    reduced, layout = reduce_to_mains(grads, average, strategy, cluster=cluster)
    mains = layout.mains()
    with _slots_named_like_tower_0(rows), _noting_created() as created:
        updated = optimizer.apply_gradients([(reduced[n], rows[main][n][1]) for n, main in sorted(mains.items())])
    values: List[Any] = [None] * len(names)
    for n, main in mains.items():
        with tf.control_dependencies([updated]), tf1.device(devices[main]):
            values[n] = rows[main][n][1].read_value()
    assigned = [updated]
    for tower, copied in enumerate(copy_from_mains(values, layout, devices)):
        with tf1.device(devices[tower]):
            assigned += [rows[tower][n][1].assign(copied[n]).op for n, main in mains.items() if main != tower]
    return Updated([tf.group(*assigned)], [created])


def refuse_wrapper(optimizer: Any) -> None:
    """Refuse what does more than update each variable where it is.

    Raises:
        VariableError: the class of ``optimizer`` has an ``apply_gradients`` of its own.
    """
    if type(optimizer).apply_gradients is not tf1.train.Optimizer.apply_gradients:
        raise VariableError(
            f"{type(optimizer).__name__} does more than update each variable where it is, so it cannot run on each"
            " variable's main only; use update='replicated', or the optimizer inside it"
        )


def _refuse_pieces(row: Pairs, devices: Sequence[Any], names: Sequence[str]) -> None:
    for n, (_, var) in enumerate(row):
        if getattr(var, "_save_slice_info", None) is not None:
            raise VariableError(
                f"{where(0, devices, n, names)}: a piece of a partitioned variable, whose slots would be saved as"
                " pieces of several towers' variables; use update='replicated', or create it without a partitioner"
            )


@contextlib.contextmanager
def _slots_named_like_tower_0(rows: Sequence[Pairs]) -> Iterator[None]:
    """Slots created in here are called like those of tower 0's variables, whichever tower's they belong to."""
    firsts = {var.op.name: first.op.name for row in rows for (_, var), (_, first) in zip(row, rows[0])}
    scope, taken = tf1.get_variable_scope(), {var.op.name for var in all_variables()}

    def renamed(getter: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        parts = owned(name, firsts, scope.name)
        if parts:
            name = parts.scope + firsts[parts.owner] + parts.rest
            name = name if kwargs.get("reuse") else _unused(name, taken)
        return getter(name, *args, **kwargs)

    with tf1.variable_scope(scope, custom_getter=renamed, auxiliary_name_scope=False):
        yield


def _unused(name: str, taken: Set[str]) -> str:
    """The name, or with the next number at its end that is not taken, as TensorFlow numbers slots: ``w/Adam_1``."""
    slot, slash = name.rstrip("/"), "/" * name.endswith("/")
    stem, number = re.sub(r"_\d+$", "", slot), itertools.count(1)
    while slot in taken:
        slot = f"{stem}_{next(number)}"
    taken.add(slot)
    return slot + slash


# ---- the towers' variables -------------------------------------------------------------------------


def check_variables(rows: Sequence[Pairs], devices: Sequence[Any]) -> None:
    """Check that K rows of N pairs hold each tower's own copy of the same N resource variables.

    Raises:
        VariableError: a variable is shared between towers, of another shape or dtype than tower 0's, of another
            shape or dtype than its gradient, or a reference variable; or no variable has a gradient.
    """
    if all(grad is None for row in rows for grad, _ in row):
        raise VariableError(
            "no variable has a gradient on any tower, so there is nothing to update: do the losses depend on them?"
        )
    owner: Dict[int, int] = {}
    for tower, row in enumerate(rows):
        names = [var.op.name for _, var in row]
        for n, (grad, var) in enumerate(row):
            place, first = where(tower, devices, n, names), rows[0][n][1]
            if not is_resource(var):
                raise VariableError(
                    f"{place}: a reference variable, which an update may overwrite while a gradient still reads it;"
                    " create it with use_resource=True, or call tf.compat.v1.enable_resource_variables() first"
                )
            if owner.setdefault(id(var), tower) != tower:
                raise VariableError(
                    f"{place}: is the variable of {where(owner[id(var)], devices)} too; give every tower its own copy"
                )
            if (var.dtype, str(var.shape)) != (first.dtype, str(first.shape)):
                raise VariableError(
                    f"{place}: {var.dtype.name} {var.shape}, but tower 0 has {first.op.name!r}, {first.dtype.name}"
                    f" {first.shape}; build the same model on every tower"
                )
            if isinstance(grad, (tf.Tensor, tf.IndexedSlices)):
                _check_fits(grad, var, place)


def _check_fits(grad: Any, var: Any, place: str) -> None:
    shape = static_shape(grad)
    if grad.dtype.base_dtype != var.dtype or not shape.is_compatible_with(var.shape):
        raise VariableError(
            f"{place}: a gradient of {grad.dtype.name} {shape} for {var.dtype.name} {var.shape}; pair each gradient"
            " with its own variable, and cast it to the variable's dtype"
        )


class Owned(NamedTuple):
    """The name of a variable's slot, in three parts: a scope, the variable, and what the slot is."""

    scope: str
    owner: str
    rest: str


def owned(name: str, variables: Container[str], scope: str = "") -> Optional[Owned]:
    """Which of ``variables`` a name is, or begins with, as a slot's does (``w/Adam``); None if there is none.

    ``scope`` is the variable scope that the update was built in: TensorFlow puts it before the variable's name.
    """
    for head in dict.fromkeys(["", f"{scope}/" if scope else ""]):
        if name.startswith(head):
            tail = name[len(head) :]
            ends = [end for end, letter in enumerate(tail) if letter == "/"]
            for end in (len(tail), *reversed(ends)):
                if tail[:end] in variables:
                    return Owned(head, tail[:end], tail[end:])
    return None
