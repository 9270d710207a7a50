"""Gradients as they really come (dense, sparse or missing) as one list of tensors to reduce.

::

    variable                entries
    dense                   one: the gradient
    sparse, made dense      one: the dense gradient
    sparse, gathered        two: values and indices
    None on all towers      none

Those of small sparse gradients may be joined, so that together they cost one copy::

    values      [r0×8] [r1×8] [r2×8]      ─►  [(r0+r1+r2)×8]
    indices     [r0] [r1] [r2]            ─►  [r0+r1+r2]
    counts      [r0, r1, r2], if they are known only when the step runs

:func:`find_entries` only looks, so that every error is raised before the first op; :func:`entry_tensors` adds ops.
"""

from __future__ import annotations

from typing import Any, Collection, Dict, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from ..errors import GradientError
from ..planning import Spec
from .compat import SUMMABLE_DTYPES, carrier, tf1
from .gradients import NARROW_DTYPES, Matrix, dtype_of, is_sparse, merged_shape, static_shape
from .names import where
from .pieces import Splitter

DENSE, VALUES, INDICES, COUNTS = "dense", "values", "indices", "counts"
# int32 is in host memory, where TensorFlow wants the sizes of a split
COUNT_SPEC = Spec(None, 4, "int32", packable=False)


class Entry(NamedTuple):
    """One tensor of each tower that is reduced.

    Attributes:
        variables: the columns of the matrix that it holds: one, or several that are joined.
        part: ``DENSE``, ``VALUES``, ``INDICES`` or ``COUNTS``.
        spec: its size and dtype.
        rows: K×V, the rows of V joined sparse gradients on each tower, if all are known when the graph is built.
        follows: how many entries before this one are the values on whose way it travels; 0 if it has its own.
    """

    variables: Tuple[int, ...]
    part: str
    spec: Spec
    rows: Tuple[Tuple[int, ...], ...] = ()
    follows: int = 0


def find_entries(grads: Matrix, gathered: Collection[int], missing: str) -> List[Entry]:
    """Return the entries of a K×N matrix, in the order of the variables.

    Args:
        grads: the matrix.
        gathered: the sparse variables whose rows are gathered; other sparse gradients become dense.
        missing: None on some towers is an ``"error"``, or stands for ``"zeros"``.

    Raises:
        GradientError: None on some towers, with ``"error"``; or rows that must become dense and whose variable has no
            known number of rows.
    """
    entries: List[Entry] = []
    for variable, column in enumerate(grads.columns):
        without = [tower for tower, grad in enumerate(column) if grad is None]
        if len(without) == len(column):
            continue
        if without and missing == "error":
            raise GradientError(
                f"{where(without[0], grads.devices, variable, grads.names)}: the gradient is None on towers {without}"
                " but not on the others; give it on every tower or on none, or choose missing='zeros'"
            )
        if variable in gathered:
            values, indices = (Entry((variable,), part, entry_spec(column, part)) for part in (VALUES, INDICES))
            entries += [values, indices._replace(follows=1)]
            continue
        for tower, grad in enumerate(column):
            if is_sparse(grad) and grad.dense_shape is None and _known_rows(column) is None:
                raise GradientError(
                    f"{where(tower, grads.devices, variable, grads.names)}: its IndexedSlices has no dense_shape, so it"
                    " cannot be made dense; give dense_shape, or choose sparse='gather'"
                )
        entries.append(Entry((variable,), DENSE, entry_spec(column, DENSE)))
    return entries


def entry_spec(column: Sequence[Any], part: str) -> Spec:
    """Return the size of an entry: of each tower's tensor if dense, of all towers' rows together if gathered.

    The size is that of what travels, in bytes; the dtype is the gradient's own, so that dtypes do not share a bucket.
    """
    present = [grad for grad in column if grad is not None]
    if part == DENSE:
        is_known = all(static_shape(grad).is_fully_defined() or is_sparse(grad) for grad in present)
        elements = _merged_shape(column).num_elements() if is_known else None
        dtype = dtype_of(present[0])
        # other dtypes, of variables that are only copied, may lack Concat or Split
        return Spec(elements, _carried_bytes(present[0]), dtype, packable=dtype in SUMMABLE_DTYPES)
    tensors = [getattr(grad, part) for grad in present]
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    total = None if None in sizes else sum(sizes)
    return Spec(total, _carried_bytes(tensors[0]), dtype_of(tensors[0]), packable=False)


def _carried_bytes(tensor: Any) -> int:
    """Return the bytes of an element as it travels."""
    return int(tf.as_dtype(carrier(dtype_of(tensor))).size)


def entry_tensors(grads: Matrix, entries: Sequence[Entry]) -> List[List[Any]]:
    """Add the ops that make the K×E tensors of the entries: zeros for missing gradients, dense ones from rows."""
    columns = grads.columns
    rows = []
    for tower, row in enumerate(grads.rows):
        with tf1.device(grads.devices[tower]):
            rows.append([_entry_tensor(row, entry, columns, grads.devices) for entry in entries])
    return rows


def _entry_tensor(row: Sequence[Any], entry: Entry, columns: Sequence[Sequence[Any]], devices: Sequence[Any]) -> Any:
    part = INDICES if entry.part == COUNTS else entry.part
    tensors = [_tensor(row[variable], part, columns[variable], devices) for variable in entry.variables]
    if entry.part == COUNTS:
        return tf.concat(tf.raw_ops.ShapeN(input=tensors, out_type=tf.as_dtype(COUNT_SPEC.dtype)), 0, name="rows")
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, 0, name="joined")


def reduced_gradients(
    reduced: Dict[int, Any], entries: Sequence[Entry], tower: int, grads: Matrix, splitter: Splitter
) -> Dict[int, Any]:
    """Return one tower's reduced gradients by variable, from its reduced entries by number.

    Sparse ones keep the tower's own ``dense_shape``; where it has none, another tower's.
    """
    found: Dict[str, Dict[int, Any]] = {DENSE: {}, VALUES: {}, INDICES: {}}
    for number, tensor in reduced.items():
        entry = entries[number]
        if entry.part != COUNTS:
            counts = reduced.get(number - entry.follows + 2)  # read only if the numbers of rows are not known
            sizes = [sum(rows) for rows in zip(*entry.rows)] if entry.rows else counts
            pieces = splitter.split(tensor, sizes, len(entry.variables))
            found[entry.part].update(zip(entry.variables, pieces))
    for variable, values in found[VALUES].items():
        shape = _dense_shape(variable, tower, grads)
        found[DENSE][variable] = tf.IndexedSlices(values, found[INDICES][variable], shape)
    return found[DENSE]


def _dense_shape(variable: int, tower: int, grads: Matrix) -> Any:
    shapes = [getattr(row[variable], "dense_shape", None) for row in (grads.rows[tower], *grads.rows)]
    return next((shape for shape in shapes if shape is not None), None)


def _merged_shape(column: Sequence[Any]) -> tf.TensorShape:
    return merged_shape(static_shape(grad) for grad in column if grad is not None)


def _known_rows(column: Sequence[Any]) -> Optional[int]:
    shape = _merged_shape(column)
    return shape.as_list()[0] if shape.ndims else None


def _tensor(grad: Any, part: str, column: Sequence[Any], devices: Sequence[Any]) -> Any:
    if part != DENSE:
        return getattr(grad, part) if grad is not None else _no_rows(part, column, devices)
    if is_sparse(grad):
        return _summed_rows(grad, column)
    return grad if grad is not None else _zeros(column, devices)


def _no_rows(part: str, column: Sequence[Any], devices: Sequence[Any]) -> Any:
    """Return what a tower without a gradient adds to those of others: no rows, of their shape."""
    tower = next(tower for tower, grad in enumerate(column) if grad is not None)
    row = merged_shape(getattr(grad, part).shape[1:] for grad in column if grad is not None)
    tensor = getattr(column[tower], part)
    if row.is_fully_defined():
        return _filled_with_zeros([0, *row.as_list()], tensor)
    with tf1.device(devices[tower]):  # so that only a shape is copied from there
        shape = tf.concat([[0], tf.shape(tensor)[1:]], 0)
    return _filled_with_zeros(shape, tensor)


def _summed_rows(grad: Any, column: Sequence[Any]) -> Any:
    rows = _known_rows(column)
    # rows with equal indices are added, in float32 as everything else that is added
    wide = tf.cast(grad.values, tf.float32 if grad.dtype.name in NARROW_DTYPES else carrier(dtype_of(grad)))
    dense = _scattered(wide, grad.indices, grad.dense_shape[0] if rows is None else rows)
    dense = tf.cast(dense, grad.dtype)
    dense.set_shape(_merged_shape(column))
    return dense


def _scattered(values: Any, indices: Any, rows: Any) -> Any:
    """Return ``rows`` rows with ``values`` added up in those of ``indices``."""
    if dtype_of(values) != "int64":
        return tf.math.unsorted_segment_sum(values, indices, rows)
    # GPUs have no UnsortedSegmentSum for int64
    shape = tf.concat([[tf.cast(rows, indices.dtype)], tf.shape(values, out_type=indices.dtype)[1:]], 0)
    return tf.scatter_nd(tf.expand_dims(indices, 1), values, shape)


def _zeros(column: Sequence[Any], devices: Sequence[Any]) -> Any:
    shape = _merged_shape(column)
    # There is such a gradient: a column of sparse ones without a shape would be gathered, or is an error.
    tower, other = next(
        (k, g) for k, g in enumerate(column) if g is not None and not (is_sparse(g) and g.dense_shape is None)
    )
    if not shape.is_fully_defined():
        with tf1.device(devices[tower]):  # so that only a shape is copied from there
            shape = other.dense_shape if is_sparse(other) else tf.shape(other)
    return _filled_with_zeros(shape, other)


def _filled_with_zeros(shape: Any, like: Any) -> Any:
    # GPUs have no Fill for some of the dtypes that are carried as int64
    return tf.cast(tf.zeros(shape, carrier(dtype_of(like))), dtype_of(like))
