"""Optimizers inside other optimizers: finding them, checking them, and patching them for a while.

K towers share one optimizer object, so some of its methods are replaced while the towers' updates are built. There is
no other access to objects that belong to the user; :func:`patched` puts everything back.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, List, Sequence

import tensorflow as tf

from ..errors import HierAllreduceError
from ..graph.tf import tf1

_UNORDERED = ("tensorpack.tfutils.optimizer", "AccumGradOptimizer")
_ABSENT = object()


def held_by(optimizer: Any) -> List[Any]:
    """Return ``optimizer`` and all optimizers that it wraps, also in lists, from outside to inside."""
    optimizers = [optimizer]
    for holder in optimizers:  # the list grows while it is read
        for value in vars(holder).values():
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(inner, tf1.train.Optimizer) and inner not in optimizers:
                    optimizers.append(inner)
    return optimizers


# ---- checks ------------------------------------------------------------------------------------------


def check_optimizer(optimizer: Any) -> None:
    """Check that ``optimizer`` can update towers.

    Raises:
        HierAllreduceError: it is or wraps a ``SyncReplicasOptimizer``, or tensorpack's ``AccumGradOptimizer``. With the
            latter each tower has a counter, read while it is advanced: now and then some towers apply sums that others
            do not.
    """
    for inner in held_by(optimizer):
        if isinstance(inner, tf1.train.SyncReplicasOptimizer):
            raise HierAllreduceError(
                f"{type(inner).__name__} collects gradients of parameter servers' workers; towers' gradients are added"
                " up already: use the optimizer inside it"
            )
        if any((base.__module__, base.__name__) == _UNORDERED for base in type(inner).__mro__):
            raise HierAllreduceError(
                f"{type(inner).__name__} reads its counter while the same step advances it, so that the towers would"
                " diverge; use hier_allreduce.integrations.tensorpack.OrderedAccumGrad(optimizer, niter) instead"
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
    """Adapt the loss scale of ``MixedPrecisionLossScaleOptimizer`` for the first tower only.

    The other towers, whose gradients are equal, get the first one's decision: whether to apply them.
    """

    def once(update: Any) -> Any:
        results: List[Any] = []

        def call(grads: Any) -> Any:
            results.extend([] if results else [update(grads)])
            return results[0]

        return call

    with contextlib.ExitStack() as patches:
        for inner in held_by(optimizer):
            scale: Any = getattr(inner, "_loss_scale", None)
            if type(scale).__module__.startswith("tensorflow"):
                patches.enter_context(patched(scale, "update", once(scale.update)))
        yield
