"""The K×N matrix as the caller passes it, checked before the first op.

::

    grads[tower][variable]       variable 0   variable 1   …   variable N-1
    tower 0  on devices[0]          g00          g01
    tower 1  on devices[1]          g10          g11
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from ..errors import HierAllreduceError
from ..formatting import count
from .devices import device_fields, devices_match
from .names import names_within_towers, where
from .tf import SUMMABLE_DTYPES, in_current_graph, is_eager, is_resource, tf1

VAR_LIST_ADVICE = "without var_list=, compute_gradients takes all towers' variables: give it those of its own tower"


class Column(NamedTuple):
    """One variable's K gradients.

    Attributes:
        name: for messages and op names.
        grads: K tensors, ``tf.IndexedSlices`` or None, ``grads[tower]``.
        dtype: of the gradients; empty if all are None.
        shape: as far as it is known; of sparse gradients, their variable's.
        is_sparse: whether all gradients, at least one, are ``tf.IndexedSlices`` that stay sparse.
    """

    name: str
    grads: Tuple[Any, ...]
    dtype: str
    shape: tf.TensorShape
    is_sparse: bool


def column_of(name: str, grads: Sequence[Any], sparse: str = "gather") -> Column:
    """Return a column with the dtype and shape of its gradients.

    Raises:
        ValueError: the shapes contradict each other.
    """
    present = [grad for grad in grads if grad is not None]
    dtype = dtype_of(present[0]) if present else ""
    stays_sparse = sparse == "gather" and bool(present) and all(map(is_sparse, present))
    return Column(name, tuple(grads), dtype, merged_shape(map(static_shape, present)), stays_sparse)


def is_sparse(grad: Any) -> bool:
    """Return whether a gradient is ``tf.IndexedSlices``."""
    return isinstance(grad, tf.IndexedSlices)


def dtype_of(grad: Any) -> str:
    """Return the name of a gradient's dtype."""
    # assign_add of a reference variable gives float32_ref, which is float32
    return str(grad.dtype.base_dtype.name)


def check_average(average: Any) -> None:
    """Raise a HierAllreduceError if ``average`` is not a bool."""
    if not isinstance(average, bool):
        raise HierAllreduceError(f"average={average!r}: it is True for the mean, False for the sum")


def check_matrix(
    all_grads: Any,
    devices: Tuple[Any, ...],
    average: Any,
    names: Optional[Sequence[str]] = None,
    sparse: str = "gather",
    missing: str = "error",
) -> List[Column]:
    """Return the N columns of K×N gradients.

    Args:
        all_grads: K rows (any iterables) of N gradients.
        devices: K devices, from :func:`.devices.device_strings`.
        average: whether the mean is wanted, which integers do not have.
        names: N variable names; by default those of the gradients.
        sparse: ``"dense"`` if sparse gradients become dense.
        missing: ``"zeros"`` if None on some towers counts as zeros.

    Raises:
        HierAllreduceError: the rows do not match the devices or each other, or an entry cannot be added up.
    """
    check_average(average)
    rows = check_rows(all_grads, devices)
    names = tuple(names) if names is not None else tuple(_gradient_names(rows))
    for tower, row in enumerate(rows):
        for variable, grad in enumerate(row):
            _check_entry(grad, partial(where, tower, devices, variable, names))
    columns = [_checked_column(variable, rows, devices, names, average, sparse) for variable in range(len(names))]
    for variable, column in enumerate(columns):
        _check_presence(column, missing, partial(where, devices=devices, variable=variable, names=names))
    return columns


def check_rows(all_grads: Any, devices: Tuple[Any, ...]) -> Tuple[Tuple[Any, ...], ...]:
    """Return the K rows of N gradients, or of N (gradient, variable) pairs, as tuples.

    Raises:
        HierAllreduceError: not K rows, or rows of different lengths.
    """
    shape = "all_grads is K rows, one for each tower, of N gradients: all_grads[tower][variable]"
    if isinstance(all_grads, tf.Tensor):
        raise HierAllreduceError(f"{shape}; a single tensor was given")
    try:
        rows = list(all_grads)
    except TypeError:
        raise HierAllreduceError(f"{shape}; {type(all_grads).__name__} was given") from None
    if len(rows) != len(devices):
        counts = f"{count(len(rows), 'row')} of gradients for {count(len(devices), 'device')}"
        raise HierAllreduceError(f"{counts}: {shape}. Give one row for each device{_transposed(rows, devices)}")
    for tower, row in enumerate(rows):
        if isinstance(row, (tf.Tensor, tf.Variable)) or not hasattr(row, "__iter__"):
            raise HierAllreduceError(f"{where(tower, devices)}: its row is one {type(row).__name__}; {shape}")
    full = tuple(tuple(row) for row in rows)
    if len({len(row) for row in full}) > 1:
        counts = ", ".join(f"{where(tower, devices)} has {len(row)}" for tower, row in enumerate(full))
        raise HierAllreduceError(f"every tower must have the same number of gradients: {counts}{_unshared(full)}")
    return full


def _transposed(rows: Sequence[Any], devices: Sequence[Any]) -> str:
    """Return a hint if the rows are as long as there are devices: they may be columns; else ""."""
    lengths = {len(row) if isinstance(row, (tuple, list)) else -1 for row in rows}
    return "; these look like N columns: transpose them with zip(*all_grads)" if lengths == {len(devices)} else ""


def check_pairs(all_grads_and_vars: Any, devices: Tuple[Any, ...]) -> Tuple[Tuple[Tuple[Any, Any], ...], ...]:
    """Return K rows of N (gradient, variable) pairs, as tuples.

    Raises:
        HierAllreduceError: not K rows, rows of different lengths, an entry that is not a pair, or rows that hold other
            towers' variables.
    """
    rows = check_rows(all_grads_and_vars, devices)
    for tower, row in enumerate(rows):
        for variable, pair in enumerate(row):
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise HierAllreduceError(
                    f"{where(tower, devices, variable)}: expected a (gradient, variable) pair; allreduce_grads takes"
                    " gradients alone"
                )
            if not hasattr(pair[1], "name"):
                raise HierAllreduceError(
                    f"{where(tower, devices, variable)}: expected a variable after the gradient, not {pair[1]!r}"
                )
    _check_places(rows, devices)
    return rows


def reference_warning(pairs: Sequence[Tuple[Any, Any]]) -> str:
    """Return a warning if some variables of N pairs are reference variables, whose reads race with updates; else ""."""
    references = [var.op.name for _, var in pairs if isinstance(var, tf1.Variable) and not is_resource(var)]
    if not references:
        return ""
    return (
        f"{len(references)} of {len(pairs)} trained variables are reference variables, the first is {references[0]!r}:"
        " an update may overwrite one while a gradient still reads it, and training then goes wrong; call"
        " tf.compat.v1.enable_resource_variables() before the model is built, or create them with use_resource=True"
        " (tf_cnn_benchmarks: --use_resource_vars=True)"
    )


def _check_places(rows: Sequence[Sequence[Tuple[Any, Any]]], devices: Sequence[Any]) -> None:
    """Check that rows and towers are not mixed up: no variables on each other's devices.

    Variables that towers share may be anywhere.
    """
    homes = [[_home(getattr(var, "device", ""), tower, devices) for _, var in row] for tower, row in enumerate(rows)]
    for tower, row_homes in enumerate(homes):
        for variable, home in enumerate(row_homes):
            var = rows[tower][variable][1]
            swapped = home != tower and any(other != home for other in homes[home])
            if swapped and not any(var is other for _, other in rows[home]):
                raise HierAllreduceError(
                    f"{where(tower, devices, variable, [var.name for _, var in rows[tower]])}: the variable is on"
                    f" {var.device}, tower {home}'s device; give one row for each tower, in the order of the devices:"
                    " rows[tower][variable]"
                )


def _home(device: Any, row: int, devices: Sequence[Any]) -> int:
    """Return the tower on whose device a variable of ``row`` is: that row's, if it is on no other tower's device."""
    if not device or _is_on(device, devices[row]):
        return row
    return next((tower for tower, other in enumerate(devices) if _is_on(device, other)), row)


def _is_on(device: str, tower_device: Any) -> bool:
    """Return whether ``device`` is known to be a tower's: never where that is a function, or a job without a device."""
    if not isinstance(tower_device, str):
        return False
    *_, device_type, _ = device_fields(tower_device)
    return device_type is not None and devices_match(device, tower_device)


def _unshared(rows: Sequence[Sequence[Any]]) -> str:
    """Return a clause that names the variables which only some towers have; "" for rows without variables."""
    pairs = [[entry for entry in row if isinstance(entry, (tuple, list)) and len(entry) == 2] for row in rows]
    names = names_within_towers([[var for _, var in row if hasattr(var, "name")] for row in pairs])
    towers = Counter(name for row in names for name in set(row))
    unshared = sorted(name for name, having in towers.items() if having < len(rows))
    clause = f"; not on every tower: {', '.join(unshared)}" if unshared else ""
    return f"{clause}; {VAR_LIST_ADVICE}" if _hold_other_towers_variables(pairs) else clause


def _hold_other_towers_variables(rows: Sequence[Sequence[Any]]) -> bool:
    """Return whether a variable that has a gradient in one row is in another row without one."""
    with_gradient = {id(var) for row in rows for grad, var in row if grad is not None}
    return any(grad is None and id(var) in with_gradient for row in rows for grad, var in row)


def _check_entry(grad: Any, place: Callable[[], str]) -> None:
    if grad is None:
        return
    if isinstance(grad, (tuple, list)) and not is_sparse(grad):
        raise HierAllreduceError(
            f"{place()}: a {type(grad).__name__} was given where a gradient is expected; for (gradient, variable)"
            " pairs use allreduce_grads_and_vars, or pass the gradients alone"
        )
    tensors = [grad.values, grad.indices] if is_sparse(grad) else [grad]
    for tensor, part in zip(tensors, ("values", "indices")):
        if not isinstance(tensor, tf.Tensor):
            within = f" of tensors, not with {part} that are" if is_sparse(grad) else ", not"
            raise HierAllreduceError(
                f"{place()}: expected a tf.Tensor or tf.IndexedSlices{within} {type(tensor).__name__}; use"
                " tf.convert_to_tensor"
            )
    if dtype_of(grad) not in SUMMABLE_DTYPES:
        raise HierAllreduceError(
            f"{place()}: {dtype_of(grad)} has no sum in this TensorFlow; cast it to a number first, one of"
            f" {', '.join(SUMMABLE_DTYPES)}"
        )
    if not all(in_current_graph(tensor) for tensor in tensors):
        raise HierAllreduceError(
            f"{place()}: {grad!r} does not belong to the graph that is being built; call this inside"
            " `with graph.as_default():` of the towers' graph"
        )
    if is_sparse(grad) and not grad.indices.shape.is_compatible_with(grad.values.shape[:1]):
        raise HierAllreduceError(
            f"{place()}: IndexedSlices with values of shape {grad.values.shape} and indices of shape"
            f" {grad.indices.shape}; expected one index for each row of the values"
        )


def _check_presence(column: Column, missing: str, place: Callable[[int], str]) -> None:
    without = [tower for tower, grad in enumerate(column.grads) if grad is None]
    if column.dtype and without and missing == "error":
        raise HierAllreduceError(
            f"{place(without[0])}: the gradient is None on towers {without} but not on the others; give it on every"
            " tower or on none, or choose missing='zeros'"
        )
    shapeless = [tower for tower, grad in enumerate(column.grads) if is_sparse(grad) and grad.dense_shape is None]
    if shapeless and not column.is_sparse and height_of(column.shape) is None:
        raise HierAllreduceError(
            f"{place(shapeless[0])}: its IndexedSlices has no dense_shape, so it cannot be made dense; give"
            " dense_shape, or choose sparse='gather'"
        )


def _checked_column(
    variable: int,
    rows: Sequence[Sequence[Any]],
    devices: Sequence[Any],
    names: Sequence[str],
    average: bool,
    sparse: str,
) -> Column:
    place = partial(where, devices=devices, variable=variable, names=names)
    grads = [row[variable] for row in rows]
    present = {tower: grad for tower, grad in enumerate(grads) if grad is not None}
    dtypes = {tower: dtype_of(grad) for tower, grad in present.items()}
    _check_equal("dtype", dtypes, "cast the gradients to one dtype", place)
    indices = {tower: dtype_of(grad.indices) for tower, grad in present.items() if is_sparse(grad)}
    _check_equal("dtype of the indices", indices, "cast the indices to one dtype", place)
    try:
        column = column_of(names[variable], grads, sparse)
    except ValueError:
        shapes = {tower: static_shape(grad) for tower, grad in present.items()}
        _check_equal("shape", shapes, _shape_advice(rows), place)
        raise
    if average and present and tf.as_dtype(column.dtype).is_integer:
        raise HierAllreduceError(
            f"{place(next(iter(present)))}: {column.dtype} has no exact mean; average=False sums it, or cast it to"
            " float"
        )
    return column


def _shape_advice(rows: Sequence[Sequence[Any]]) -> str:
    """Return what to do about a column of different shapes: the same shapes in another order, or another model?"""
    shapes = {tuple(sorted(str(static_shape(grad)) for grad in row if grad is not None)) for row in rows}
    if len(shapes) == 1:
        return "list the variables in one order on every tower"
    return "no order of the variables makes the towers equal: build the same model on every tower"


def _check_equal(attribute: str, by_tower: Dict[int, Any], advice: str, place: Callable[[int], str]) -> None:
    """Raise a HierAllreduceError that names the first tower whose value is not the most frequent one."""
    if len(set(map(str, by_tower.values()))) <= 1:
        return
    usual, _ = Counter(map(str, by_tower.values())).most_common(1)[0]
    odd = next(tower for tower, value in by_tower.items() if str(value) != usual)
    values = ", ".join(f"tower {tower}: {value}" for tower, value in by_tower.items())
    raise HierAllreduceError(f"{place(odd)}: the {attribute} differs between towers ({values}); {advice}")


def static_shape(grad: Any) -> tf.TensorShape:
    """Return the shape of a gradient as far as it is known when the graph is built; of a sparse one its variable's."""
    if not is_sparse(grad):
        return grad.shape
    rows = None
    if grad.dense_shape is not None:
        dense_shape = tf.get_static_value(grad.dense_shape)
        rows = None if dense_shape is None else int(dense_shape[0])
    return tf.TensorShape([rows]).concatenate(grad.values.shape[1:])


def merged_shape(shapes: Iterable[tf.TensorShape]) -> tf.TensorShape:
    """Merge shapes that may be known in part.

    Raises:
        ValueError: the shapes contradict each other.
    """
    merged = tf.TensorShape(None)
    for shape in shapes:
        if not (merged.is_fully_defined() and merged == shape):  # merging is slow, and nearly all are equal
            merged = merged.merge_with(shape)
    return merged


def height_of(shape: tf.TensorShape) -> Optional[int]:
    """Return the first number of a shape; None if it is not known."""
    return shape.as_list()[0] if shape.ndims else None


def _gradient_names(rows: Sequence[Sequence[Any]]) -> List[str]:
    """Return names for variables of which only gradients are known."""
    return [_op_name(column) or f"gradient{variable}" for variable, column in enumerate(zip(*rows))]


def _op_name(column: Sequence[Any]) -> str:
    """Return the name of the first op in a column; "" where there is none, as in eager execution."""
    tensors = [grad.values if is_sparse(grad) else grad for grad in column]
    return next((str(t.op.name) for t in tensors if isinstance(t, tf.Tensor) and not is_eager(t)), "")
