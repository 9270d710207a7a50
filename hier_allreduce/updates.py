"""What happens around the all-reduce: who updates the variables.

::

    update="replicated"                          update="main"
    every tower gets the reduced gradients       each variable's main gets its reduced gradient,
    and updates its own variables                updates it there once, and copies the new value to the others

With mains chosen by bytes the second keeps every optimizer slot once, spread over the devices, instead of K times.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Container, ContextManager, Dict, Iterator, List, Optional, Sequence, Tuple

import tensorflow as tf

from .allreduce import copy_from_mains, reduce_to_mains
from .compat import is_resource, tf1
from .errors import StrategyError, VariableError
from .gradients import matrix, static_shape, variable_names, where
from .strategy import Strategy

Pairs = Sequence[Tuple[Any, Any]]  # N (gradient, variable) pairs of one tower

UPDATES = ("replicated", "main")


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
        for value in vars(one).values():
            held = value if isinstance(value, (list, tuple)) else [value]
            found += [o for o in held if isinstance(o, tf1.train.Optimizer) and all(o is not known for known in found)]
    return found


def refuse_accumulation(optimizer: Any) -> None:
    """Refuse tensorpack's own accumulation of gradients: it looks at its counter while the same step advances it.

    Each tower has a counter, so that now and then some towers apply what others do not.

    Raises:
        VariableError: ``optimizer``, or one that it holds, is an ``AccumGradOptimizer``.
    """
    for one in held_by(optimizer):
        if (type(one).__module__, type(one).__name__) == ("tensorpack.tfutils.optimizer", "AccumGradOptimizer"):
            raise VariableError(
                "AccumGradOptimizer reads its counter while the same step advances it, so the towers would part; give"
                " hier_allreduce.integrations.tensorpack.OrderedAccumGrad(optimizer, niter) in its place"
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


def update_replicated(
    optimizer: Any,
    rows: Sequence[Pairs],
    devices: Sequence[Any],
    scope: Callable[[int], ContextManager] = lambda tower: contextlib.nullcontext(),
) -> List[Any]:
    """One update for each tower on its device.

    The towers share ``optimizer``. Where it, or one that it holds, has work to do once a step, after the updates (Adam
    advances its beta powers), only the last tower's update does it, and waits for the others, which read what it
    changes. A loss scale is adapted once, too, by what the first tower's gradients are.

    Args:
        optimizer: what applies gradients; perhaps a wrapper.
        rows: K rows of N pairs, after the all-reduce.
        devices: K devices.
        scope: entered for each tower's number, around what its update creates.

    Returns:
        K ops.
    """
    once_a_step = [one for one in held_by(optimizer) if type(one)._finish is not tf1.train.Optimizer._finish]
    updates: List[Any] = []
    with _one_loss_scale(optimizer):
        for tower, (row, device) in enumerate(zip(rows, devices)):
            last = tower == len(devices) - 1
            wait = tf.control_dependencies(updates if once_a_step and last else [])
            finish = contextlib.nullcontext() if last else _without_finish(once_a_step)
            with tf1.device(device), scope(tower), wait, finish:
                updates.append(optimizer.apply_gradients(row, name=f"apply_grad_{tower}"))
    return updates


@contextlib.contextmanager
def _without_finish(optimizers: Sequence[Any]) -> Iterator[None]:
    """While this lasts, updates do not end with these optimizers' ``_finish``."""
    for one in optimizers:
        one._finish = lambda updates, name: tf.group(*updates, name=name)
    try:
        yield
    finally:
        for one in optimizers:
            del one._finish  # the method of its class is there again


@contextlib.contextmanager
def _one_loss_scale(optimizer: Any) -> Iterator[None]:
    """While this lasts, TensorFlow's mixed precision wrappers adapt their loss scale for the first tower only.

    The other towers, whose gradients are the same, are told what it was told: whether to apply them.
    """
    scales = [one._loss_scale for one in held_by(optimizer) if hasattr(one, "_loss_scale")]
    for scale in scales:
        scale.update = _first_result(scale.update)
    try:
        yield
    finally:
        for scale in scales:
            del scale.update  # the method of its class is there again


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
) -> Any:
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

    Returns:
        The train op.

    Raises:
        GradientError: as :func:`hier_allreduce.allreduce_grads_and_vars`.
        StrategyError: the strategy cuts variables over several mains.
        VariableError: the variables differ between towers, are reference variables, or ``optimizer`` cannot run on one
            device only.
    """
    refuse_wrapper(optimizer if base is None else base)
    check_variables(rows, devices)
    names = variable_names(rows, devices)
    grads = matrix([[grad for grad, _ in row] for row in rows], tuple(devices), average, names)
    reduced, layout = reduce_to_mains(grads, average, strategy, cluster=cluster)
    mains = layout.mains()
    with _slots_named_like_tower_0(rows):
        updated = optimizer.apply_gradients([(reduced[n], rows[main][n][1]) for n, main in sorted(mains.items())])
    values: List[Any] = [None] * len(names)
    for n, main in mains.items():
        with tf.control_dependencies([updated]), tf1.device(devices[main]):
            values[n] = rows[main][n][1].read_value()
    assigned = [updated]
    for tower, copied in enumerate(copy_from_mains(values, layout, devices)):
        with tf1.device(devices[tower]):
            assigned += [rows[tower][n][1].assign(copied[n]).op for n, main in mains.items() if main != tower]
    return tf.group(*assigned)


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


@contextlib.contextmanager
def _slots_named_like_tower_0(rows: Sequence[Pairs]) -> Iterator[None]:
    """Slots created in here are called like those of tower 0's variables, whichever tower's they belong to."""
    firsts = {var.op.name: first.op.name for row in rows for (_, var), (_, first) in zip(row, rows[0])}

    def renamed(getter: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        owner = owner_of(name, firsts)
        return getter(name if owner is None else firsts[owner] + name[len(owner) :], *args, **kwargs)

    with tf1.variable_scope(tf1.get_variable_scope(), custom_getter=renamed):
        yield


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
            if (var.dtype, var.shape.as_list()) != (first.dtype, first.shape.as_list()):
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


def owner_of(name: str, variables: Container[str]) -> Optional[str]:
    """Which of ``variables`` a name is, or begins with, as a slot's does (``w/Adam``); None if there is none."""
    ends = [end for end, letter in enumerate(name) if letter == "/"]
    return next((name[:end] for end in (len(name), *reversed(ends)) if name[:end] in variables), None)
