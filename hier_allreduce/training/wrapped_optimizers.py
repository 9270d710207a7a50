"""Optimizers inside other optimizers: finding them, refusing them, and patching them for a while.

K towers share one optimizer object, so that some of its methods are replaced while the towers' updates are built.
There is no other way into objects that belong to the user; :func:`patched` puts everything back.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, Callable, Iterator, List, Mapping, Sequence

import tensorflow as tf

from ..errors import HierAllreduceError
from ..graph import tf1

_FINISH = inspect.signature(tf1.train.Optimizer._finish).parameters
# attributes in which TensorFlow's mixed precision wrappers keep their loss scale, and the method of the scale that
# adapts it; the second pair is tf.contrib's
_LOSS_SCALES = (("_loss_scale", "update"), ("_loss_scale_manager", "update_loss_scale"))
_UNORDERED = ("tensorpack.tfutils.optimizer", "AccumGradOptimizer")
_ABSENT = object()


def held_by(optimizer: Any) -> List[Any]:
    """Return ``optimizer`` and those that it wraps, also in lists and mappings, from outside to inside."""
    optimizers = [optimizer]
    for holder in optimizers:  # the list grows while it is read
        for value in _flattened(vars(holder)):
            if isinstance(value, tf1.train.Optimizer) and all(value is not seen for seen in optimizers):
                optimizers.append(value)
    return optimizers


def _flattened(value: Any) -> Iterator[Any]:
    """Yield what mappings, lists and tuples hold, at any depth."""
    if not isinstance(value, (Mapping, list, tuple)):
        yield value
        return
    for child in value.values() if isinstance(value, Mapping) else value:
        yield from _flattened(child)


# ---- refused optimizers ----------------------------------------------------------------------------


def refuse_unfit(optimizer: Any) -> None:
    """Check that ``optimizer`` can update towers.

    Raises:
        HierAllreduceError: it, or an optimizer that it wraps, is tensorpack's ``AccumGradOptimizer``, or is made for
            ``tf.distribute``.
    """
    for inner in held_by(optimizer):
        _refuse_unordered_accumulation(inner)
        _refuse_other_interface(inner)


def _refuse_unordered_accumulation(optimizer: Any) -> None:
    # Each tower has a counter, read while it is advanced: now and then some towers apply what others do not.
    if any((kind.__module__, kind.__name__) == _UNORDERED for kind in type(optimizer).__mro__):
        raise HierAllreduceError(
            f"{type(optimizer).__name__} reads its counter while the same step advances it, so that the towers would"
            " diverge; use hier_allreduce.integrations.tensorpack.OrderedAccumGrad(optimizer, niter) instead"
        )


def _refuse_other_interface(optimizer: Any) -> None:
    """Refuse the optimizers of ``tf.contrib.optimizer_v2``."""
    kind = type(optimizer)
    if len(inspect.signature(kind._finish).parameters) != len(_FINISH):
        raise HierAllreduceError(
            f"{kind.__module__}.{kind.__name__} is made for tf.distribute; use an optimizer of tf.compat.v1.train"
        )


def refuse_wrapper(optimizer: Any) -> None:
    """Check that ``optimizer`` only updates each variable in place.

    Raises:
        HierAllreduceError: its class overrides ``apply_gradients``.
    """
    if type(optimizer).apply_gradients is not tf1.train.Optimizer.apply_gradients:
        raise HierAllreduceError(
            f"{type(optimizer).__name__} does more than update each variable in place, so it cannot run on each"
            " variable's main only; use update='replicated', or the optimizer inside it"
        )


def refuse_shared_state(once_a_step: Sequence[Any], earlier: Sequence[Any]) -> None:
    """Check that no optimizer with work to do once a step is in the train ops of several updates.

    Run in one step, one train op would do that work, such as advancing Adam's beta powers, while the towers of the
    other read what it changes: some would read it before, and some after.

    Args:
        once_a_step: the optimizers with such work of an update of several towers.
        earlier: those of the graph's earlier updates.

    Raises:
        HierAllreduceError: an optimizer is in both.
    """
    for optimizer in once_a_step:
        if any(optimizer is other for other in earlier):
            raise HierAllreduceError(
                f"{type(optimizer).__name__}: an earlier apply_gradients has the same one. Each train op would change"
                " its state once a step (Adam: the beta powers) while the towers of the other one read it, and the"
                " towers would diverge. Give each loss a TowerOptimizer with an optimizer of its own, or add the losses"
                " up, or use update='main'"
            )


def sum_advice(optimizer: Any, towers: int) -> str:
    """Say how to tune an optimizer for the sum over K towers if it was tuned for their mean.

    The advice is about the innermost optimizer of a wrapper.

    Source of the corrections: Chainer's MultiprocessParallelUpdater, which makes them itself.
    """
    kind = type(held_by(optimizer)[-1]).__name__
    epsilon = {
        "AdamOptimizer": towers,
        "AdagradOptimizer": towers,
        "RMSPropOptimizer": towers,
        "AdadeltaOptimizer": towers**2,
    }
    change = f"multiply its epsilon by {epsilon[kind]}" if kind in epsilon else f"divide its learning rate by {towers}"
    return f"{kind} gets the sum over {towers} towers: {change}, or use average=True"


# ---- patches ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def patched(obj: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of ``obj`` inside the context; afterwards the object is as it was."""
    before = vars(obj).get(name, _ABSENT)
    setattr(obj, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(obj, name)  # the attribute of its class is visible again
        else:
            setattr(obj, name, before)


def optimizers_with_finish(optimizer: Any) -> List[Any]:
    """Return the optimizers in ``optimizer`` whose ``_finish`` does work after all updates, as Adam's."""
    return [inner for inner in held_by(optimizer) if type(inner)._finish is not tf1.train.Optimizer._finish]


@contextlib.contextmanager
def without_finish(optimizers: Sequence[Any]) -> Iterator[None]:
    """Skip these optimizers' ``_finish`` in updates that are built inside the context."""
    with contextlib.ExitStack() as patches:
        for optimizer in optimizers:
            patches.enter_context(patched(optimizer, "_finish", _group_updates))
        yield


def _group_updates(update_ops: Any, name_scope: Any) -> Any:
    return tf.group(*update_ops, name=name_scope)


@contextlib.contextmanager
def one_loss_scale(optimizer: Any) -> Iterator[None]:
    """Adapt the loss scale of TensorFlow's mixed precision wrappers for the first tower only.

    The other towers, whose gradients are equal, get the first one's decision: whether to apply them.
    """
    with contextlib.ExitStack() as patches:
        for inner in held_by(optimizer):
            for attribute, method in _LOSS_SCALES:
                scale = getattr(inner, attribute, None)
                if type(scale).__module__.startswith("tensorflow"):
                    patches.enter_context(patched(scale, method, _calling_once(getattr(scale, method))))
        yield


def _calling_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``function`` the first time only, and always returns that result."""
    results: List[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not results:
            results.append(function(*args, **kwargs))
        return results[0]

    return call
