"""Optimizers inside other optimizers: finding them, checking them, and patching them for a while.

K towers share one optimizer object, so some of its methods are replaced while the towers' updates are built. There is
no other access to objects that belong to the user; :func:`patched` puts everything back.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, Callable, Iterator, List, Mapping, Sequence

import tensorflow as tf

from ..errors import HierAllreduceError
from ..graph.tf import tf1

_FINISH = inspect.signature(tf1.train.Optimizer._finish).parameters
# attributes in which TensorFlow's mixed precision wrappers keep their loss scale, and the method of the scale that
# adapts it; the second pair is tf.contrib's
_LOSS_SCALES = (("_loss_scale", "update"), ("_loss_scale_manager", "update_loss_scale"))
_UNORDERED = ("tensorpack.tfutils.optimizer", "AccumGradOptimizer")
_ABSENT = object()


def held_by(optimizer: Any) -> List[Any]:
    """Return ``optimizer`` and all optimizers that it wraps, also in lists and mappings, from outside to inside."""
    optimizers = [optimizer]
    for holder in optimizers:  # the list grows while it is read
        for value in _flattened(vars(holder)):
            if isinstance(value, tf1.train.Optimizer) and all(value is not seen for seen in optimizers):
                optimizers.append(value)
    return optimizers


def _flattened(value: Any) -> Iterator[Any]:
    """Yield the values of mappings, lists and tuples at any depth."""
    if not isinstance(value, (Mapping, list, tuple)):
        yield value
        return
    for child in value.values() if isinstance(value, Mapping) else value:
        yield from _flattened(child)


def optimizers_with_finish(optimizer: Any) -> List[Any]:
    """Return the optimizers in ``optimizer`` whose ``_finish`` does work after all updates, as Adam's."""
    return [inner for inner in held_by(optimizer) if type(inner)._finish is not tf1.train.Optimizer._finish]


# ---- checks ------------------------------------------------------------------------------------------


def check_optimizer(optimizer: Any) -> None:
    """Check that ``optimizer`` can update towers.

    Raises:
        HierAllreduceError: it, or an optimizer that it wraps, is tensorpack's ``AccumGradOptimizer``, a
            ``SyncReplicasOptimizer``, or made for ``tf.distribute``.
    """
    for inner in held_by(optimizer):
        kind = type(inner)
        # each tower has a counter, read while it is advanced: now and then some towers apply sums that others do not
        if any((base.__module__, base.__name__) == _UNORDERED for base in kind.__mro__):
            raise HierAllreduceError(
                f"{kind.__name__} reads its counter while the same step advances it, so that the towers would diverge;"
                " use hier_allreduce.integrations.tensorpack.OrderedAccumGrad(optimizer, niter) instead"
            )
        if isinstance(inner, tf1.train.SyncReplicasOptimizer):
            raise HierAllreduceError(
                f"{kind.__name__} collects gradients of parameter servers' workers; towers' gradients are added up"
                " already: give the optimizer inside it"
            )
        if len(inspect.signature(kind._finish).parameters) != len(_FINISH):  # of tf.contrib.optimizer_v2
            raise HierAllreduceError(
                f"{kind.__module__}.{kind.__name__} is made for tf.distribute; use an optimizer of tf.compat.v1.train"
            )


def check_at_mains(optimizer: Any) -> None:
    """Raise a HierAllreduceError if ``optimizer`` does more than update each variable in place."""
    if type(optimizer).apply_gradients is not tf1.train.Optimizer.apply_gradients:
        raise HierAllreduceError(
            f"{type(optimizer).__name__} does more than update each variable in place, so it cannot run on each"
            " variable's main only; use update='replicated', or the optimizer inside it"
        )


def check_unshared(once_a_step: Sequence[Any]) -> None:
    """Raise a HierAllreduceError if an optimizer with once-a-step work already has variables in this graph.

    Run in one step, one train op would do that work, such as advancing Adam's beta powers, while the towers of the
    other read its result: some before, and some after.
    """
    for optimizer in once_a_step:
        if optimizer.variables():
            raise HierAllreduceError(
                f"{type(optimizer).__name__}: an earlier apply_gradients has the same one. Each train op would change"
                " its state once a step (Adam: the beta powers) while the towers of the other one read it, and the"
                " towers would diverge. Give each loss a TowerOptimizer with another optimizer, or add the losses up,"
                " or use update='main'"
            )


def sum_advice(optimizer: Any, towers: int) -> str:
    """Return how to tune the innermost optimizer for the sum over K towers if it was tuned for their mean.

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


# ---- patches -----------------------------------------------------------------------------------------


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


@contextlib.contextmanager
def without_finish(optimizers: Sequence[Any]) -> Iterator[None]:
    """Skip these optimizers' ``_finish`` in updates that are built inside the context."""
    with contextlib.ExitStack() as patches:
        for optimizer in optimizers:
            patches.enter_context(patched(optimizer, "_finish", lambda ops, name: tf.group(*ops, name=name)))
        yield


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
