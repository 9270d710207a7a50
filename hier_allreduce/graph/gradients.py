"""The K×N matrix as people pass it, checked before anything is built.

::

    grads[tower][variable]       variable 0   variable 1   …   variable N-1
    tower 0  on devices[0]          g00          g01
    tower 1  on devices[1]          g10          g11
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import tensorflow as tf

from ..errors import GradientError
from .compat import SUMMED, belongs_here, is_eager
from .devices import device_fields, fits

NARROW = ("float16", "bfloat16")  # dtypes that are added in float32


@dataclass(frozen=True)
class Matrix:
    """``rows[tower][variable]``, K×N: tensors, ``tf.IndexedSlices``, or a column of None; and how to speak of them."""

    rows: Tuple[Tuple[Any, ...], ...]
    devices: Tuple[Any, ...]
    names: Tuple[str, ...]  # N, what each variable is called in messages and op names

    @property
    def columns(self) -> List[Tuple[Any, ...]]:
        """The same, N×K."""
        return list(zip(*self.rows))


def is_sparse(grad: Any) -> bool:
    """Whether a gradient is ``tf.IndexedSlices``."""
    return isinstance(grad, tf.IndexedSlices)


def dtype_of(grad: Any) -> str:
    """The name of a gradient's dtype: ``assign_add`` of a reference variable gives float32_ref, which is float32."""
    return str(grad.dtype.base_dtype.name)


def where(tower: int, devices: Sequence[Any], variable: Optional[int] = None, names: Sequence[str] = ()) -> str:
    """``tower 3 (/gpu:3), variable 5 ('conv1/W')``: how every message says where it hurts."""
    text = f"tower {tower} ({devices[tower]})" if tower < len(devices) else f"tower {tower}"
    if variable is None:
        return text
    called = f" ({names[variable]!r})" if variable < len(names) else ""
    return f"{text}, variable {variable}{called}"


def check_matrix(
    all_grads: Any, devices: Tuple[Any, ...], average: Any, names: Optional[Sequence[str]] = None
) -> Matrix:
    """Check the K×N gradients of K devices.

    Args:
        all_grads: K rows (any iterables) of N gradients.
        devices: K devices, already read.
        average: the mean is wanted, which integers do not have.
        names: N variable names; by default those of the gradients.

    Raises:
        GradientError: the rows do not match the devices or each other, or an entry cannot be added up.
    """
    if not isinstance(average, bool):
        raise GradientError(f"average={average!r}: it is True for the mean, False for the sum")
    rows = rows_of(all_grads, devices)
    names = tuple(names) if names is not None else tuple(_name(v, column) for v, column in enumerate(zip(*rows)))
    for tower, row in enumerate(rows):
        for variable, grad in enumerate(row):
            _check_entry(grad, partial(where, tower, devices, variable, names))
    for variable, column in enumerate(zip(*rows)):
        _check_column(column, variable, devices, names, average)
    return Matrix(rows, devices, names)


def rows_of(all_grads: Any, devices: Tuple[Any, ...]) -> Tuple[Tuple[Any, ...], ...]:
    """The K rows of N gradients, or of N (gradient, variable) pairs, as tuples.

    Raises:
        GradientError: not K rows, or rows of different lengths.
    """
    shape = "all_grads is K rows, one for each tower, of N gradients: all_grads[tower][variable]"
    if isinstance(all_grads, tf.Tensor):
        raise GradientError(f"{shape}; a single tensor was given")
    try:
        rows = list(all_grads)
    except TypeError:
        raise GradientError(f"{shape}; {type(all_grads).__name__} was given") from None
    if len(rows) != len(devices):
        raise GradientError(f"{len(rows)} rows of gradients for {len(devices)} devices: {shape}")
    for tower, row in enumerate(rows):
        if isinstance(row, (tf.Tensor, tf.Variable)) or not hasattr(row, "__iter__"):
            raise GradientError(f"{where(tower, devices)}: its row is one {type(row).__name__}; {shape}")
    full = tuple(tuple(row) for row in rows)
    if len({len(row) for row in full}) > 1:
        counts = ", ".join(f"{where(tower, devices)} has {len(row)}" for tower, row in enumerate(full))
        raise GradientError(f"every tower must have the same number of gradients: {counts}{_unshared(full)}")
    return full


def pairs_of(all_grads_and_vars: Any, devices: Tuple[Any, ...]) -> Tuple[Tuple[Tuple[Any, Any], ...], ...]:
    """K rows of N (gradient, variable) pairs, as tuples.

    Raises:
        GradientError: not K rows, rows of different lengths, an entry that is no pair, or rows that hold other
            towers' variables.
    """
    rows = rows_of(all_grads_and_vars, devices)
    for tower, row in enumerate(rows):
        for variable, pair in enumerate(row):
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise GradientError(
                    f"{where(tower, devices, variable)}: expected a (gradient, variable) pair; allreduce_grads takes"
                    " gradients alone"
                )
            if not hasattr(pair[1], "name"):
                raise GradientError(
                    f"{where(tower, devices, variable)}: expected a variable beside the gradient, not {pair[1]!r}"
                )
    _check_places(rows, devices)
    return rows


def _check_places(rows: Sequence[Sequence[Tuple[Any, Any]]], devices: Sequence[Any]) -> None:
    """Refuse rows and towers mixed up: variables on each other's devices. Those that towers share may be anywhere."""
    at = [[_tower_of(getattr(var, "device", ""), tower, devices) for _, var in row] for tower, row in enumerate(rows)]
    for tower, places in enumerate(at):
        for variable, place in enumerate(places):
            var = rows[tower][variable][1]
            swapped = place != tower and any(other != place for other in at[place])
            if swapped and not any(var is other for _, other in rows[place]):
                raise GradientError(
                    f"{where(tower, devices, variable, [var.name for _, var in rows[tower]])}: the variable is on"
                    f" {var.device}, tower {place}'s device; give one row for each tower, in the order of the devices:"
                    " rows[tower][variable]"
                )


def _tower_of(device: Any, own: int, devices: Sequence[Any]) -> int:
    """The tower on whose device something is: its own, if it is not on another one's."""
    if not device or _is_on(device, devices[own]):
        return own
    return next((tower for tower, other in enumerate(devices) if _is_on(device, other)), own)


def _is_on(device: str, place: Any) -> bool:
    """Whether ``device`` is a tower's ``place``; on a function, or a job without a device, nothing is known to be."""
    if not isinstance(place, str):
        return False
    *_, kind, _ = device_fields(place)
    return kind is not None and fits(device, place)


def _unshared(rows: Sequence[Sequence[Any]]) -> str:
    """Which variables only some towers have, where the rows say so."""
    pairs = [[entry for entry in row if isinstance(entry, (tuple, list)) and len(entry) == 2] for row in rows]
    names = _names([[var for _, var in row if hasattr(var, "name")] for row in pairs])
    towers = Counter(name for row in names for name in set(row))
    some = sorted(name for name, count in towers.items() if count < len(rows))
    return f"; not on every tower: {', '.join(some)}" if some else ""


def _names(rows: Sequence[Sequence[Any]]) -> List[List[str]]:
    """The names of each tower's variables, without the scope that is the tower's own."""
    return [
        [name[len(scope) :] if name.startswith(scope) else name for name in map(_full_name, row)]
        for row, scope in zip(rows, tower_scopes(rows))
    ]


def tower_scopes(rows: Sequence[Sequence[Any]]) -> List[str]:
    """The scope that is each tower's own, in the names of K rows of variables; empty where there is none.

    It is what all names of a row begin with, up to the last part that no other row has::

        tower 0                tower 1
        w, layer/b             tower1/w, tower1/layer/b        "" and "tower1/", as tensorpack calls them
        m_0/w, m_0/layer/b     m_1/w, m_1/layer/b              "m_0/" and "m_1/"

    A name that several rows have is a variable that towers share, and does not count.
    """
    full = [list(map(_full_name, row)) for row in rows]
    names = Counter(name for row in full for name in set(row))
    parts = Counter(part for row in full for part in {part for name in row for part in name.split("/")[:-1]})
    scopes = []
    for row in full:
        levels = zip(*(name.split("/")[:-1] for name in row if names[name] == 1))
        shared = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels)]
        own = max((depth for depth, part in enumerate(shared, 1) if parts[part] == 1), default=0)
        scopes.append("".join(f"{part}/" for part in shared[:own]))
    return scopes


def _full_name(var: Any) -> str:
    return str(var.name).split(":")[0]


def _check_entry(grad: Any, place: Callable[[], str]) -> None:
    if grad is None:
        return
    if isinstance(grad, (tuple, list)) and not is_sparse(grad):
        raise GradientError(
            f"{place()}: a {type(grad).__name__} was given where a gradient is expected; for (gradient, variable)"
            " pairs use allreduce_grads_and_vars, or pass the gradients alone"
        )
    tensors = [grad.values, grad.indices] if is_sparse(grad) else [grad]
    for tensor, part in zip(tensors, ("values", "indices")):
        if not isinstance(tensor, tf.Tensor):
            within = f" of tensors, not with {part} that are" if is_sparse(grad) else ", not"
            raise GradientError(
                f"{place()}: expected a tf.Tensor or tf.IndexedSlices{within} {type(tensor).__name__}; use"
                " tf.convert_to_tensor"
            )
    if dtype_of(grad) not in SUMMED:
        raise GradientError(
            f"{place()}: {dtype_of(grad)} has no sum in this TensorFlow; cast it to a number first, one of"
            f" {', '.join(SUMMED)}"
        )
    if not all(belongs_here(tensor) for tensor in tensors):
        raise GradientError(
            f"{place()}: {grad!r} does not belong to the graph that is being built; call this inside"
            " `with graph.as_default():` of the towers' graph"
        )


def _check_column(
    column: Tuple[Any, ...], variable: int, devices: Sequence[Any], names: Sequence[str], average: bool
) -> None:
    def check_equal(what: str, values: Dict[int, Any], advice: str) -> None:
        usual, count = Counter(map(str, values.values())).most_common(1)[0]
        if count < len(values):
            odd = next(tower for tower, value in values.items() if str(value) != usual)
            each = ", ".join(f"tower {tower}: {value}" for tower, value in values.items())
            place = where(odd, devices, variable, names)
            raise GradientError(f"{place}: the {what} differs between towers ({each}); {advice}")

    present = {tower: grad for tower, grad in enumerate(column) if grad is not None}
    if not present:
        return
    check_equal("dtype", {t: dtype_of(grad) for t, grad in present.items()}, "cast the gradients to one dtype")
    indices = {t: dtype_of(grad.indices) for t, grad in present.items() if is_sparse(grad)}
    if indices:
        check_equal("dtype of the indices", indices, "cast the indices to one dtype")
    shapes = {tower: static_shape(grad) for tower, grad in present.items()}
    try:
        merged_shape(shapes.values())
    except ValueError:
        check_equal("shape", shapes, "list the variables in one order on every tower")
    tower, grad = next(iter(present.items()))
    if average and grad.dtype.is_integer:
        raise GradientError(
            f"{where(tower, devices, variable, names)}: {dtype_of(grad)} has no exact mean; average=False sums it,"
            " or cast it to float"
        )


def static_shape(grad: Any) -> tf.TensorShape:
    """The shape of a gradient as far as the graph tells; for sparse ones that of the variable."""
    if not is_sparse(grad):
        return grad.shape
    rows = None
    if grad.dense_shape is not None:
        known = tf.get_static_value(grad.dense_shape)
        rows = None if known is None else int(known[0])
    return tf.TensorShape([rows]).concatenate(grad.values.shape[1:])


def merged_shape(shapes: Iterable[tf.TensorShape]) -> tf.TensorShape:
    """What all of the shapes say together.

    Raises:
        ValueError: they contradict each other.
    """
    merged = tf.TensorShape(None)
    for shape in shapes:
        if not (merged.is_fully_defined() and merged == shape):  # merging is slow, and nearly all are equal
            merged = merged.merge_with(shape)
    return merged


def _name(variable: int, column: Sequence[Any]) -> str:
    """What to call a variable of which only gradients are known: tower 0's op, in graphs."""
    for grad in column:
        tensor = grad.values if is_sparse(grad) else grad
        if isinstance(tensor, tf.Tensor) and not is_eager(tensor):
            return str(tensor.op.name)
    return f"gradient{variable}"


def variable_names(tower_grads_and_vars: Sequence[Sequence[Tuple[Any, Any]]], devices: Sequence[Any]) -> List[str]:
    """The N names of (gradient, variable) rows, without the scopes that are the towers' own.

    Raises:
        GradientError: the towers list the same variables in different orders.
    """
    rows = _names([[var for _, var in row] for row in tower_grads_and_vars])
    for tower, row in enumerate(rows):
        if row != rows[0] and sorted(row) == sorted(rows[0]):
            variable = next(v for v, (a, b) in enumerate(zip(row, rows[0])) if a != b)
            raise GradientError(
                f"{where(tower, devices, variable, row)}: tower 0 has {rows[0][variable]!r} there; list the variables"
                " in one order on every tower"
            )
    return rows[0] if rows else []
