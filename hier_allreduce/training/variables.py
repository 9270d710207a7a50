"""The towers' variables: which exist, whether copies match, and which variable a slot belongs to."""

from __future__ import annotations

import contextlib
from typing import Any, Container, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from ..errors import HierAllreduceError
from ..graph import VAR_LIST_ADVICE, is_resource, static_shape, tf1, where

Pairs = Sequence[Tuple[Any, Any]]  # N (gradient, variable) pairs of one tower


def all_variables() -> List[Any]:
    """Return the global and the local variables of the current graph, each once."""
    return list({id(var): var for var in tf1.global_variables() + tf1.local_variables()}.values())


@contextlib.contextmanager
def recording_created() -> Iterator[List[Any]]:
    """Yield a list that holds, once the context is left, the variables that were created inside it."""
    created: List[Any] = []
    before = {id(var) for var in all_variables()}
    yield created
    created += [var for var in all_variables() if id(var) not in before]


def check_variables(rows: Sequence[Pairs], devices: Sequence[Any]) -> None:
    """Check that K rows of N pairs hold each tower's own copy of the same N resource variables.

    Raises:
        HierAllreduceError: a variable is shared between towers, has another shape or dtype than tower 0's or than its
            gradient, or is a reference variable; or no variable has a gradient.
    """
    if all(grad is None for row in rows for grad, _ in row):
        raise HierAllreduceError(
            "no variable has a gradient on any tower, so there is nothing to update: do the losses depend on them?"
        )
    tower_of: Dict[int, int] = {}  # of each id(variable)
    for tower, row in enumerate(rows):
        names = [var.op.name for _, var in row]
        for n, (grad, var) in enumerate(row):
            place = where(tower, devices, n, names)
            _check_is_resource(var, place)
            if tower_of.setdefault(id(var), tower) != tower:
                advice = VAR_LIST_ADVICE if grad is None else "give every tower its own copy"
                raise HierAllreduceError(
                    f"{place}: the same variable is in the row of {where(tower_of[id(var)], devices)}; {advice}"
                )
            _check_matches_tower_0(var, rows[0][n][1], place)
            if isinstance(grad, (tf.Tensor, tf.IndexedSlices)):
                _check_gradient_fits(grad, var, place)


def _check_is_resource(var: Any, place: str) -> None:
    if not is_resource(var):
        raise HierAllreduceError(
            f"{place}: a reference variable, which an update may overwrite while a gradient still reads it;"
            " create it with use_resource=True, or call tf.compat.v1.enable_resource_variables() first"
        )


def _check_matches_tower_0(var: Any, first: Any, place: str) -> None:
    if (var.dtype, str(var.shape)) != (first.dtype, str(first.shape)):
        raise HierAllreduceError(
            f"{place}: {var.dtype.name} {var.shape}, but tower 0 has {first.op.name!r}, {first.dtype.name}"
            f" {first.shape}; build the same model on every tower"
        )


def _check_gradient_fits(grad: Any, var: Any, place: str) -> None:
    shape = static_shape(grad)
    if grad.dtype.base_dtype != var.dtype or not shape.is_compatible_with(var.shape):
        raise HierAllreduceError(
            f"{place}: a gradient of {grad.dtype.name} {shape} for {var.dtype.name} {var.shape}; pair each gradient"
            " with its own variable, and cast it to the variable's dtype"
        )


class SlotName(NamedTuple):
    """A slot's name in three parts, such as ``"train/"``, ``"tower1/w"``, ``"/Adam"``.

    The last one is empty in the name of the variable itself.
    """

    scope: str
    variable: str
    slot: str


def parse_slot_name(name: str, variables: Container[str], scopes: Sequence[str] = ("",)) -> Optional[SlotName]:
    """Split the name of a variable or of its slot; return None if it belongs to none of ``variables``.

    Args:
        name: ``"w"``, ``"w/Adam"`` or, with a scope, ``"train/w/Adam"``.
        variables: names of variables. The longest that fits is taken.
        scopes: what may come before the variable's name, such as ``"train/"``. TensorFlow puts the variable scope there
            in which an update was built.
    """
    for prefix in scopes:
        if name.startswith(prefix):
            tail = name[len(prefix) :]
            for end in (len(tail), *reversed(_slashes(tail))):
                if tail[:end] in variables:
                    return SlotName(prefix, tail[:end], tail[end:])
    return None


def scopes_in(name: str) -> List[str]:
    """Return all that a name begins with: ``""``, ``"a/"`` and ``"a/b/"`` for ``"a/b/c"``."""
    return ["", *(name[: place + 1] for place in _slashes(name))]


def _slashes(name: str) -> List[int]:
    return [place for place, letter in enumerate(name) if letter == "/"]
