"""Units: what travels on one way of a plan. A dense gradient is one; so is a sparse one, with its values and indices.

::

    parts of a unit              variables    tensors of each tower
    dense                        one          the gradient; zeros if it is missing; a sum of rows if it was sparse
    values, indices              one          rows; their number may be known only when the step runs
    values, indices, counts      several      rows of small gradients of equal width, and how many rows each has
    values    │    indices       several      rows of known number: one copy brings the indices of all widths
"""

from __future__ import annotations

from typing import Any, Callable, Collection, Dict, Hashable, Iterable, Iterator, List, NamedTuple, Sequence, Tuple

import tensorflow as tf

from ..errors import HierAllreduceError
from ..planning import Bucketing, Spec
from .compat import SUMMABLE_DTYPES, carrier, tf1
from .gradients import NARROW_DTYPES, Column, Matrix, dtype_of, is_sparse
from .names import where
from .packing import Splitter, Tensors

DENSE, VALUES, INDICES, COUNTS = "dense", "values", "indices", "counts"
ROWS = (VALUES, INDICES)


class Unit(NamedTuple):
    """Tensors of each tower that travel together.

    Attributes:
        columns: the gradients that it holds: one, or several sparse ones that are joined.
        parts: what each of its tensors is.
    """

    columns: Tuple[Column, ...]
    parts: Tuple[str, ...] = (DENSE,)

    @property
    def variables(self) -> Tuple[int, ...]:
        """The numbers of its variables."""
        return tuple(column.variable for column in self.columns)

    @property
    def spec(self) -> Spec:
        """The size and dtype by which it is planned: those of its first part."""
        return self.part_spec(self.parts[0])

    def part_spec(self, part: str) -> Spec:
        """Return the size of a part: of each tower's tensor if dense, of all towers' rows together if not.

        The size is that of what travels, in bytes; the dtype is the gradient's own, so that dtypes do not share a
        bucket.
        """
        if part == COUNTS:  # int32 is in host memory, where TensorFlow wants the sizes of a split
            return Spec(len(self.columns) * len(self.columns[0].grads), 4, "int32", packable=False)
        specs = [_spec(column, part) for column in self.columns]
        sizes = [spec.elements for spec in specs if spec.elements is not None]
        return specs[0]._replace(elements=sum(sizes) if len(sizes) == len(specs) else None)

    def tensors(self, tower: int, towers: Sequence[Any]) -> Tensors:
        """Add the ops that make a tower's tensors, one for each part; called on its device."""
        return tuple(self._tensor(part, tower, towers) for part in self.parts)

    def _tensor(self, part: str, tower: int, towers: Sequence[Any]) -> Any:
        if part == DENSE:
            return _dense(self.columns[0], tower, towers)
        tensors = [_rows(column, tower, towers, INDICES if part == COUNTS else part) for column in self.columns]
        if part == COUNTS:
            return tf.concat(tf.raw_ops.ShapeN(input=tensors, out_type=tf.int32), 0, name="rows")
        return tensors[0] if len(tensors) == 1 else tf.concat(tensors, 0, name="joined")

    def split(self, tensors: Tensors, splitter: Splitter) -> Iterator[Tuple[Column, str, Any]]:
        """Yield (column, part, tensor) of each variable in a tower's reduced tensors."""
        by_part = dict(zip(self.parts, tensors))
        counts = by_part.pop(COUNTS, None)
        known = [sum(rows for rows in column.rows if rows is not None) for column in self.columns]
        for part, tensor in by_part.items():
            pieces = splitter.split(tensor, known if counts is None else counts, len(self.columns))
            yield from zip(self.columns, [part] * len(pieces), pieces)


def reduced_gradients(
    units: Sequence[Unit], reduced: Dict[int, Tensors], tower: int, splitter: Splitter
) -> Dict[int, Any]:
    """Return one tower's reduced gradients by variable, from its reduced tensors by the number of their unit.

    Sparse ones keep the tower's own ``dense_shape``; where it has none, another tower's.
    """
    found: Dict[str, Dict[Column, Any]] = {DENSE: {}, VALUES: {}, INDICES: {}}
    for number, tensors in reduced.items():
        for column, part, tensor in units[number].split(tensors, splitter):
            found[part][column] = tensor
    for column, values in found[VALUES].items():
        shapes = [getattr(grad, "dense_shape", None) for grad in (column.grads[tower], *column.grads)]
        shape = next((shape for shape in shapes if shape is not None), None)
        found[DENSE][column] = tf.IndexedSlices(values, found[INDICES][column], shape)
    return {column.variable: grad for column, grad in found[DENSE].items()}


# ---- which units ------------------------------------------------------------------------------------


def find_units(grads: Matrix, gathered: Collection[int], missing: str, bucketing: Bucketing) -> List[Unit]:
    """Return the units of a K×N matrix, in the order of their first variables.

    Args:
        grads: the matrix.
        gathered: the sparse variables whose rows are gathered; other sparse gradients become dense.
        missing: None on some towers is an ``"error"``, or stands for ``"zeros"``.
        bucketing: sparse gradients of less than ``pack_below`` bytes on each tower are joined, as long as a tower's
            share of the whole has at most ``bucket_bytes``. Those whose number of rows is known only when the step runs
            count as small.

    Raises:
        HierAllreduceError: None on some towers, with ``"error"``; or rows that must become dense and whose variable has
            no known number of rows.
    """
    columns = [column for column in grads.columns if column.present]
    for column in columns:
        _check_presence(column, grads, missing, column.variable in gathered)
    dense = [Unit((column,)) for column in columns if column.variable not in gathered]
    units = [*_joined([column for column in columns if column.variable in gathered], bucketing), *dense]
    return sorted(units, key=lambda unit: unit.variables[0])


def _check_presence(column: Column, grads: Matrix, missing: str, is_gathered: bool) -> None:
    without = [tower for tower, grad in enumerate(column.grads) if grad is None]
    if without and missing == "error":
        raise HierAllreduceError(
            f"{where(without[0], grads.places.towers, column.variable, grads.names)}: the gradient is None on towers"
            f" {without} but not on the others; give it on every tower or on none, or choose missing='zeros'"
        )
    shapeless = [tower for tower, grad in enumerate(column.grads) if is_sparse(grad) and grad.dense_shape is None]
    if shapeless and not is_gathered and column.height is None:
        raise HierAllreduceError(
            f"{where(shapeless[0], grads.places.towers, column.variable, grads.names)}: its IndexedSlices has no"
            " dense_shape, so it cannot be made dense; give dense_shape, or choose sparse='gather'"
        )


def _joined(columns: Sequence[Column], bucketing: Bucketing) -> Iterator[Unit]:
    """Yield the units of sparse gradients, small ones joined."""
    known = [column for column in columns if None not in column.rows]
    unknown = [column for column in columns if None in column.rows]
    by_indices = [group for group in _groups(known, INDICES, _index_dtype, bucketing) if len(group) > 1]
    yield from (Unit(group, (INDICES,)) for group in by_indices)
    apart = [column for group in by_indices for column in group]
    yield from (Unit(group, (VALUES,)) for group in _groups(apart, VALUES, _row_type, bucketing))
    for group in _groups(unknown, VALUES, _row_and_index_type, bucketing):
        yield Unit(group, (VALUES, INDICES, COUNTS) if len(group) > 1 else ROWS)
    yield from (Unit((column,), ROWS) for column in known if column not in apart)


def _groups(
    columns: Iterable[Column], part: str, key: Callable[[Column], Hashable], bucketing: Bucketing
) -> List[Tuple[Column, ...]]:
    """Divide columns into groups: small ones with the same key together, and each other one alone.

    Groups are filled in readiness order, the last variable first, up to ``bucket_bytes`` on each tower.
    """
    alone: List[List[Column]] = []
    by_key: Dict[Hashable, List[List[Column]]] = {}
    room: Dict[Hashable, float] = {}
    for column in sorted(columns, key=lambda column: -column.variable):
        size = _spec(column, part).bytes / len(column.grads)  # an entry's size is that of all towers' rows
        common = key(column)
        if common is None or size >= bucketing.pack_below:
            alone.append([column])
            continue
        if size > room.get(common, -1.0):
            by_key.setdefault(common, []).append([])
            room[common] = bucketing.bucket_bytes
        by_key[common][-1].append(column)
        room[common] -= size
    groups = [group for groups in by_key.values() for group in groups]
    return [tuple(reversed(group)) for group in [*groups, *alone]]


def _index_dtype(column: Column) -> Hashable:
    return dtype_of(column.present[0].indices)


def _row_type(column: Column) -> Hashable:
    """Return the dtype and shape of a row; None if such rows cannot be joined."""
    row = column.shape[1:]
    ranks_known = all(grad.values.shape.ndims is not None for grad in column.present)
    if not ranks_known or not row.is_fully_defined() or carrier(column.dtype) != column.dtype:
        return None
    return (column.dtype, tuple(row.as_list()))


def _row_and_index_type(column: Column) -> Hashable:
    row = _row_type(column)
    return None if row is None else (row, _index_dtype(column))


# ---- one column -------------------------------------------------------------------------------------


def _spec(column: Column, part: str) -> Spec:
    if part == DENSE:
        is_known = all(is_sparse(grad) or grad.shape.is_fully_defined() for grad in column.present)
        elements = column.shape.num_elements() if is_known else None
        # other dtypes, of variables that are only copied, may lack Concat or Split
        return Spec(elements, _carried_bytes(column.dtype), column.dtype, packable=column.dtype in SUMMABLE_DTYPES)
    tensors = [getattr(grad, part) for grad in column.present]
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    dtype = dtype_of(tensors[0])
    return Spec(None if None in sizes else sum(sizes), _carried_bytes(dtype), dtype, packable=False)


def _carried_bytes(dtype: str) -> int:
    """Return the bytes of an element as it travels."""
    return int(tf.as_dtype(carrier(dtype)).size)


def moves_fewer_bytes(column: Column) -> bool:
    """Return whether gathering rows moves no more bytes than adding up dense gradients, as far as is known."""
    dense, values, indices = (_spec(column, part) for part in (DENSE, *ROWS))
    if None in (dense.elements, values.elements, indices.elements):
        return True
    # K-1 towers send their own rows and get those of all, or send a dense gradient and get one
    rows = values.bytes + indices.bytes
    return rows / len(column.grads) + rows <= 2 * dense.bytes


def _rows(column: Column, tower: int, towers: Sequence[Any], part: str) -> Any:
    """Return a tower's values or indices; if it has no gradient no rows, of the shape of the others'."""
    if column.grads[tower] is not None:
        return getattr(column.grads[tower], part)
    row = column.shape[1:] if part == VALUES else tf.TensorShape([])
    home, other = next((home, grad) for home, grad in enumerate(column.grads) if grad is not None)
    like = getattr(other, part)
    if row.is_fully_defined():
        return _filled_with_zeros([0, *row.as_list()], like)
    with tf1.device(towers[home]):  # so that only a shape is copied from there
        shape = tf.concat([[0], tf.shape(like)[1:]], 0)
    return _filled_with_zeros(shape, like)


def _dense(column: Column, tower: int, towers: Sequence[Any]) -> Any:
    grad = column.grads[tower]
    if is_sparse(grad):
        return _summed_rows(column, grad)
    return _zeros(column, towers) if grad is None else grad


def _summed_rows(column: Column, grad: Any) -> Any:
    # rows with equal indices are added, in float32 as everything else that is added
    wide = tf.cast(grad.values, tf.float32 if grad.dtype.name in NARROW_DTYPES else carrier(column.dtype))
    dense = _scattered(wide, grad.indices, grad.dense_shape[0] if column.height is None else column.height)
    dense = tf.cast(dense, grad.dtype)
    dense.set_shape(column.shape)
    return dense


def _scattered(values: Any, indices: Any, rows: Any) -> Any:
    """Return ``rows`` rows with ``values`` added up in those of ``indices``."""
    if dtype_of(values) != "int64":
        return tf.math.unsorted_segment_sum(values, indices, rows)
    # GPUs have no UnsortedSegmentSum for int64
    shape = tf.concat([[tf.cast(rows, indices.dtype)], tf.shape(values, out_type=indices.dtype)[1:]], 0)
    return tf.scatter_nd(tf.expand_dims(indices, 1), values, shape)


def _zeros(column: Column, towers: Sequence[Any]) -> Any:
    shape: Any = column.shape
    # There is such a gradient: a column of sparse ones without a shape would be gathered, or is an error.
    home, other = next(
        (k, g) for k, g in enumerate(column.grads) if g is not None and not (is_sparse(g) and g.dense_shape is None)
    )
    if not column.shape.is_fully_defined():
        with tf1.device(towers[home]):  # so that only a shape is copied from there
            shape = other.dense_shape if is_sparse(other) else tf.shape(other)
    return _filled_with_zeros(shape, other)


def _filled_with_zeros(shape: Any, like: Any) -> Any:
    # GPUs have no Fill for some of the dtypes that are carried as int64
    return tf.cast(tf.zeros(shape, carrier(dtype_of(like))), dtype_of(like))
