"""What an optimizer keeps of a call of ``compute_gradients``: nothing, if there are several towers.

Such state, the loss or the norms of the gradients, is that of one tower. The update would take it
for that of the whole batch.
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, Set

import numpy as np

from ..compat import tf1
from ..errors import HierAllreduceError


class _Same:
    """An object that equals nothing but itself, because tensors compare by adding ops."""

    def __init__(self, held: Any):
        self.held = held

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Same) and self.held is other.held


def attributes_of(value: Any, seen: Set[int]) -> Any:
    """Return what can be compared with the same of a later time: of an optimizer its attributes."""
    if isinstance(value, (type(None), bool, int, float, complex, str, bytes)):
        return value
    if id(value) in seen:
        return _Same(value)
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, (dict, list, tuple, set, frozenset, tf1.train.Optimizer)):
        seen.add(id(value))
    if isinstance(value, tf1.train.Optimizer):
        return attributes_of(vars(value), seen)
    if isinstance(value, dict):
        return [(attributes_of(key, seen), attributes_of(value[key], seen)) for key in value]
    if isinstance(value, (list, tuple)):
        return [attributes_of(item, seen) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(id, value))
    return _Same(value)


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
    before = {name: attributes_of(value, set()) for name, value in vars(optimizer).items()}
    yield
    for name, value in vars(optimizer).items():
        if name not in before or attributes_of(value, set()) != before[name]:
            kind = type(optimizer).__name__
            raise HierAllreduceError(
                f"{kind}.compute_gradients changes {kind}.{name}, and is called for each of"
                f" {towers} towers: the update of all would use what one tower left there. Compute"
                " it in apply_gradients, from the reduced gradients, or before the towers"
            )


def numbers_of(optimizer: Any) -> Dict[str, Any]:
    """Return the numbers among the attributes of an optimizer, and of those in its attributes."""
    numbers: Dict[str, Any] = {}
    for name, value in vars(optimizer).items():
        if isinstance(value, tf1.train.Optimizer):
            numbers.update({f"{name}.{key}": number for key, number in numbers_of(value).items()})
        elif isinstance(value, (bool, int, float)):
            numbers[name] = value
    return numbers
