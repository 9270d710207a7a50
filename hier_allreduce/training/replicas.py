"""Keeping towers equal: copying tower 0's variables to the others, and looking for differences."""

from __future__ import annotations

import re
from typing import Any, Dict, Iterable, List, NamedTuple, Sequence

import tensorflow as tf

from ..errors import StrategyError
from ..graph import copy_from_tower_0, tf1, tower_scopes
from .updates import Pairs, owned


class Replicas(NamedTuple):
    """Variables that exist once on every tower: ``rows[tower][variable]``, K×V; and those that do not, by name."""

    rows: List[List[Any]]
    left_out: List[str]


class Drift(NamedTuple):
    """The largest difference between towers: of which variable, on which tower, how large."""

    variable: str
    tower: int
    difference: float

    def __str__(self) -> str:
        if not self.difference:
            return "all towers are equal"
        return f"{self.variable!r} differs by {self.difference:.3g} between tower 0 and tower {self.tower}"


class HostDrift(Drift):
    """The same, between the towers of one of several hosts: what the others have, nobody has looked at."""

    def __str__(self) -> str:
        return super().__str__() if self.difference else "all towers of this host are equal"


def check_period(name: str, steps: int, never: int = 0) -> int:
    """A number of steps; ``never`` is the number that means that. Where it is -1, 0 is "at the start only".

    Raises:
        StrategyError: it is none.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < never:
        others = "0 (at the start only) or -1 (never)" if never else "or 0 (never)"
        raise StrategyError(f"{name}={steps!r}: expected a number of steps, {others}")
    return steps


def find_replicas(
    rows: Sequence[Pairs],
    variables: Iterable[Any],
    shared: Iterable[Any] = (),
    alike: Sequence[Sequence[Any]] = (),
    scope: str = "",
    private: Iterable[Any] = (),
) -> Replicas:
    """Sort ``variables`` by their towers: what is trained by its place in the rows, slots by the names of their
    variables, and others by what the names of a tower's variables begin with.

    Args:
        rows: K rows of N (gradient, variable) pairs.
        variables: all that may have copies: weights, optimizer slots, moving averages.
        shared: those among them that exist once for all towers.
        alike: K rows of those that are known to be copies of each other.
        scope: the variable scope that the update was built in.
        private: those that each tower has for itself, if tower 0's is among them: metrics, which count differently.
    """
    settled = {id(var) for var in shared} | {id(var) for row in alike for var in row}
    scopes = tower_scopes([[var for _, var in row] for row in rows])
    heads = [(tower_scope, tower, scopes[0]) for tower, tower_scope in enumerate(scopes)]
    heads.sort(key=lambda head: -len(head[0]))
    trained = {
        var.op.name: (tower, first.op.name)
        for tower, row in enumerate(rows)
        for (_, var), (_, first) in zip(row, rows[0])
    }
    towers: List[Dict[str, Any]] = [{} for _ in rows]
    for var in variables:
        name = var.op.name
        parts = owned(name, trained, scope)
        head = next((head for head in heads if name.startswith(head[0])), None)
        if id(var) in settled:
            continue
        if parts:
            tower, first = trained[parts.owner]
            towers[tower][parts.scope + first + parts.rest] = var
        elif head:
            own, tower, on_tower_0 = head
            towers[tower][on_tower_0 + name[len(own) :]] = var
    everywhere = [name for name in towers[0] if all(name in own for own in towers)]
    left_out = [var.op.name for own in towers for name, var in own.items() if name not in everywhere]
    aside = {id(var) for var in private}
    kept = [name for name in everywhere if id(towers[0][name]) not in aside]
    copies = [[*(own[name] for name in kept), *more] for own, more in zip(towers, alike or [()] * len(rows))]
    return Replicas(copies, sorted(left_out))


def made_alike(made: Sequence[Sequence[Any]]) -> List[List[Any]]:
    """What every tower's update has made for itself: K rows, matched by names but for the numbers in them.

    What only some towers' have made, as the beta powers of Adam, is not in it.
    """

    def by_name(variables: Sequence[Any]) -> Dict[Any, List[Any]]:
        found: Dict[Any, List[Any]] = {}
        for var in variables:
            kind = (re.sub(r"_\d+(?=/|$)", "", var.op.name), var.dtype.base_dtype, str(var.shape))
            found.setdefault(kind, []).append(var)
        return found

    towers = [by_name(variables) for variables in made]
    counts = [{kind: len(own) for kind, own in found.items()} for found in towers]
    kinds = [kind for kind, count in counts[0].items() if all(other.get(kind) == count for other in counts)]
    return [[var for kind in kinds for var in own[kind]] for own in towers]


def broadcast(found: Replicas, devices: Sequence[Any]) -> Any:
    """An op that copies tower 0's variables to the other towers. Adds ops."""
    values = []
    for var in found.rows[0]:
        with tf1.device(devices[0]):
            values.append(var.read_value())
    assigned = []
    for tower, row in enumerate(copy_from_tower_0(values, devices)):
        with tf1.device(devices[tower]):
            assigned += [var.assign(value).op for var, value in zip(found.rows[tower], row) if tower]
    return tf.group(*assigned)


def differences(found: Replicas) -> Any:
    """K−1 × V tensor: the largest difference of each variable between tower 0 and each other tower. Adds ops.

    Equal numbers differ by 0, also if they are infinite or not numbers; one that is no number on one tower only
    differs infinitely, and strings by 1.
    """
    rows = []
    for row in found.rows[1:]:
        rows.append([_largest(var, first) for var, first in zip(row, found.rows[0])])
    return tf.stack([tf.stack(row) for row in rows])


def _largest(var: Any, first: Any) -> Any:
    one, other = (tf.reshape(v.read_value(), [-1]) for v in (var, first))
    unequal = tf.cast(tf.not_equal(one, other), tf.float64)
    if var.dtype.base_dtype == tf.string:
        difference = unequal
    elif var.dtype.is_integer:  # large ones differ by less than a float64 can say
        difference = tf.maximum(unequal, tf.abs(tf.cast(one, tf.float64) - tf.cast(other, tf.float64)))
    else:
        one, other = (tf.cast(v, tf.complex128 if v.dtype.is_complex else tf.float64) for v in (one, other))
        difference, none = tf.abs(one - other), tf.math.is_nan
        nothing = tf.zeros_like(difference)
        difference = tf.where(none(difference), nothing + float("inf"), difference)
        same = tf.equal(one, other) | (none(tf.abs(one)) & none(tf.abs(other)))
        difference = tf.where(same, nothing, difference)
    return tf.reduce_max(tf.concat([difference, [0.0]], 0))


def drift(found: Replicas, values: Any, hosts: int = 1) -> Drift:
    """The largest of the differences that :func:`differences` gave, on one of ``hosts``."""
    kind = HostDrift if hosts > 1 else Drift
    largest = kind("", 0, 0.0)
    for tower, row in enumerate(values, 1):
        for var, difference in zip(found.rows[0], row):
            if difference > largest.difference:
                largest = kind(var.op.name, tower, float(difference))
    return largest
