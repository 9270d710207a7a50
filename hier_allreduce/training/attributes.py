"""What an optimizer keeps of a call of ``compute_gradients``: nothing, if there are several towers.

Such state, the loss or the norms of the gradients, is that of one tower. The update would take it
for that of the whole batch.
"""

from __future__ import annotations

import contextlib
from collections import abc
from typing import Any, Iterator, Set

import numpy as np

from ..compat import tf1
from ..errors import HierAllreduceError


class _Same:
    """An object that equals nothing but itself, because tensors compare by adding ops."""

    def __init__(self, held: Any):
        self.held = held

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Same) and self.held is other.held


def attributes_of(state: Any, seen: Set[int]) -> Any:
    """Return what can be compared with the same of a later time: of an optimizer its attributes."""
    if isinstance(state, (type(None), bool, int, float, complex, str, bytes)):
        return state
    if id(state) in seen:
        return _Same(state)
    if isinstance(state, np.ndarray):
        return state.dtype.str, state.shape, state.tobytes()
    # Objects that hold others are noted before these are read, because they may hold each other.
    if isinstance(state, (dict, abc.Sequence, abc.Set, tf1.train.Optimizer)):
        seen.add(id(state))
    if isinstance(state, tf1.train.Optimizer):
        return attributes_of(vars(state), seen)
    if isinstance(state, dict):
        return [(attributes_of(key, seen), attributes_of(state[key], seen)) for key in state]
    if isinstance(state, abc.Sequence):
        return [attributes_of(member, seen) for member in state]
    # Members of a set are known by their ids, because a set has no order in which to compare them.
    if isinstance(state, abc.Set):
        return sorted(map(id, state))
    return _Same(state)


@contextlib.contextmanager
def unchanged(optimizer: Any, towers: int) -> Iterator[None]:
    """Open the context of one tower's ``compute_gradients``.

    Raises:
        HierAllreduceError: there are several towers, and attributes of ``optimizer``, or of those
            in it, changed.
    """
    if towers == 1:
        yield
        return
    before = {
        attribute: attributes_of(state, set()) for attribute, state in vars(optimizer).items()
    }
    yield
    for attribute, state in vars(optimizer).items():
        if attribute not in before or attributes_of(state, set()) != before[attribute]:
            # The attribute is named, because the cure is to compute it elsewhere.
            optimizer_class = type(optimizer).__name__
            raise HierAllreduceError(
                f"{optimizer_class}.compute_gradients changes {optimizer_class}.{attribute}, and is"
                f" called for each of {towers} towers: the update of all would use what one tower"
                " left there. Compute it in apply_gradients, from the reduced gradients, or before"
                " the towers"
            )
