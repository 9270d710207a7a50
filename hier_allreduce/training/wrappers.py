"""Optimizers inside other optimizers: finding them, checking them, and patching them for a while.

K towers share one optimizer object, so some of its methods are replaced while the towers' updates
are built.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, List, Sequence

from ..compat import tf1
from ..errors import HierAllreduceError

_OTHER_METHODS = "tensorflow.contrib.optimizer_v2"  # in TensorFlow 1.15
_UNORDERED = ("tensorpack.tfutils.optimizer", "AccumGradOptimizer")


def held_by(optimizer: Any) -> List[Any]:
    """Return ``optimizer`` and all that it wraps, also in lists, from outside to inside."""
    optimizers = [optimizer]
    for holder in optimizers:  # the list grows while it is read
        for value in vars(holder).values():
            inside = _optimizers_in(value)
            optimizers += [inner for inner in inside if inner not in optimizers]
    return optimizers


def _optimizers_in(value: Any) -> List[Any]:
    """Return a value, or the values of a container, if they are optimizers, each once."""
    values = [value]
    if isinstance(value, dict):
        values = list(value.values())
    elif isinstance(value, (list, tuple)):
        values = list(value)
    optimizers = [each for each in values if isinstance(each, tf1.train.Optimizer)]
    return list(dict.fromkeys(optimizers))


def check_optimizer(optimizer: Any) -> None:
    """Check that ``optimizer`` can update towers.

    Raises:
        HierAllreduceError: it is or wraps a ``SyncReplicasOptimizer``, one of contrib's
            optimizer_v2, or tensorpack's ``AccumGradOptimizer``.
    """
    for inner in held_by(optimizer):
        if isinstance(inner, tf1.train.SyncReplicasOptimizer):
            raise HierAllreduceError(
                f"{type(inner).__name__} collects gradients of parameter servers' workers; towers'"
                " gradients are added up already: use the optimizer inside it"
            )
        if any(base.__module__.startswith(_OTHER_METHODS) for base in type(inner).__mro__):
            raise HierAllreduceError(
                f"{type(inner).__name__} is one of {_OTHER_METHODS}, whose methods have other"
                " arguments; use the optimizer of this name in tf.compat.v1.train"
            )
        if any((base.__module__, base.__name__) == _UNORDERED for base in type(inner).__mro__):
            raise HierAllreduceError(
                f"{type(inner).__name__} reads its counter while the same step advances it, so that"
                " the towers would diverge; use"
                " hier_allreduce.integrations.tensorpack.OrderedAccumGrad(optimizer, niter)"
                " instead"
            )


@contextlib.contextmanager
def patched(objects: Sequence[Any], method: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a method of several objects by ``change(method)`` while the context is open."""
    with contextlib.ExitStack() as restore:
        for obj in objects:
            if method in vars(obj):
                restore.callback(setattr, obj, method, vars(obj)[method])
            else:
                restore.callback(delattr, obj, method)  # its class's is visible again
            setattr(obj, method, change(getattr(obj, method)))
        yield


def once(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that calls ``function`` once, and later returns that result again."""
    results: List[Any] = []

    def call(argument: Any) -> Any:
        results.extend([] if results else [function(argument)])
        return results[0]

    return call
