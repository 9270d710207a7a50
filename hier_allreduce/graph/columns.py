"""A column: one variable's K gradients, and how they travel; and whether they can be added up.

::

    grads[tower][variable]       variable 0   variable 1   …   variable N-1
    tower 0                         g00          g01
    tower 1                         g10          g11
                                     │
                                  column 0: K gradients of one dtype and shape
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from ..compat import DTYPES_WITHOUT_ADD, SUMMABLE_DTYPES, in_current_graph
from ..errors import HierAllreduceError
from ..formatting import count
from ..planning.chunks import GradientSize
from ..planning.strategy import Strategy
from .devices import any_on_gpu
from .names import names_of_gradients, where

Where = Callable[[int], str]  # a tower's words at the beginning of an error

# Only these dtypes are packed, because concat has GPU kernels for them.
_PACKABLE = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
# Ops for which TensorFlow has no GPU kernel of a dtype, as its registry of kernels lists them.
# A dtype without AddN can be added only in pairs. Not even a chain of pairs helps, because
# Grappler, TensorFlow's graph optimizer, makes an AddN of the chain.
_FEW_GPU_KERNELS = {
    **dict.fromkeys(("int8", "int16", "uint8", "uint16", "uint64"), ("AddN", "UnsortedSegmentSum")),
    **dict.fromkeys(("int64", "uint32"), ("UnsortedSegmentSum",)),
}


class Column(NamedTuple):
    """One variable's K gradients, and how they travel."""

    name: str  # the variable's name in messages and op names
    grads: Tuple[Any, ...]  # K tensors, tf.IndexedSlices or None
    dtype: str  # the gradients' dtype; empty if all are None
    shape: tf.TensorShape  # as far as it is known; of sparse ones, their variable's
    wire: str  # the dtype in which they travel
    is_sparse: bool  # whether all, at least one, are tf.IndexedSlices that stay sparse
    size: GradientSize  # of a gradient as it travels; of sparse ones that of their sum, at most

    @property
    def present(self) -> List[Any]:
        """The gradients of the towers that have one."""
        return [grad for grad in self.grads if grad is not None]

    @property
    def is_known(self) -> bool:
        """Whether the shape of each gradient is known before the step runs."""
        return all(static_shape(grad).is_fully_defined() for grad in self.present)


def column_of(
    name: str, grads: Sequence[Any], sparse: str = "auto", wire: Optional[str] = None
) -> Column:
    """Return a column, sparse or made dense as a :class:`Strategy` says.

    Raises:
        ValueError: the shapes contradict each other.
    """
    present = [grad for grad in grads if grad is not None]
    dtype = dtype_of(present[0]) if present else ""
    sent = wire if wire and dtype == "float32" else dtype
    shape = tf.TensorShape(None)
    is_known = True
    for grad_shape in map(static_shape, present):
        is_known &= grad_shape.is_fully_defined()
        # Shapes are compared first, because merging is slow, and nearly all are equal.
        is_equal = shape.is_fully_defined() and shape == grad_shape
        if not is_equal:
            shape = shape.merge_with(grad_shape)
    elements = shape.num_elements() if is_known else None
    itemsize = tf.as_dtype(sent or "float32").size
    size = GradientSize(elements, itemsize, dtype, dtype in _PACKABLE)
    is_sparse = have_rows_only(present) and sparse != "dense"
    if is_sparse and sparse == "auto" and len(grads) > 1:
        is_sparse = not _can_exceed_dense(present, shape, itemsize)
    if is_sparse:
        size = _size_of_rows(present, shape, sent)
    return Column(name, tuple(grads), dtype, shape, sent, is_sparse, size)


def have_rows_only(present: Sequence[Any]) -> bool:
    """Return whether all gradients, at least one, are ``tf.IndexedSlices``."""
    return bool(present) and all(isinstance(grad, tf.IndexedSlices) for grad in present)


def _row_counts(present: Sequence[Any]) -> List[Optional[int]]:
    """Return the number of rows in each sparse gradient; None where only the step will know."""
    return [grad.values.shape[:1].num_elements() for grad in present]


def _can_exceed_dense(present: Sequence[Any], shape: tf.TensorShape, itemsize: int) -> bool:
    """Return whether the rows of all towers can be more bytes than the dense gradient.

    They count as far as their number is known before the step runs. Without a width the indices do
    not count.
    """
    height, width = shape[:1].num_elements(), shape[1:].num_elements()
    if height is None:
        return False
    rows = sum(count for count in _row_counts(present) if count is not None)
    row_bytes = itemsize * (1 if width is None else width)
    index_bytes = 0 if width is None else tf.int64.size
    return bool(rows * (row_bytes + index_bytes) > height * row_bytes)


def _size_of_rows(present: Sequence[Any], shape: tf.TensorShape, sent: str) -> GradientSize:
    """Return the size of a sum of sparse gradients: at most the rows of all towers."""
    # It is less if towers have the same index.
    itemsize = tf.as_dtype(sent).size
    known = [count for count in _row_counts(present) if count is not None]
    width = shape[1:].num_elements()
    dtype = dtype_of(present[0])
    if len(known) < len(present) or width is None:
        return GradientSize(None, itemsize, dtype, packable=False)
    return GradientSize(sum(known), width * itemsize + tf.int64.size, dtype, packable=False)


def dtype_of(grad: Any) -> str:
    """Return the name of a gradient's dtype."""
    # The base dtype counts, because assign_add of a reference variable gives float32_ref.
    return str(grad.dtype.base_dtype.name)


def static_shape(grad: Any) -> tf.TensorShape:
    """Return the shape of a gradient as far as it is known; of a sparse one its variable's."""
    if not isinstance(grad, tf.IndexedSlices):
        return grad.shape
    height = None
    if grad.dense_shape is not None:
        dense_shape = tf.get_static_value(grad.dense_shape)
        height = None if dense_shape is None else dense_shape[0]
    return tf.TensorShape([height]).concatenate(grad.values.shape[1:])


def fits(grad: Any, wanted: Any) -> bool:
    """Return whether a gradient has the dtype, and a possible shape, of a variable or gradient."""
    is_shape = static_shape(grad).is_compatible_with(static_shape(wanted))
    return dtype_of(grad) == dtype_of(wanted) and bool(is_shape)


# ---- checks --------------------------------------------------------------------------------------


def checked_columns(
    rows: Sequence[Sequence[Any]],
    devices: Sequence[Any],
    average: bool,
    strategy: Strategy,
    names: Optional[Sequence[str]] = None,
) -> List[Column]:
    """Return the N columns of K×N gradients, by the user's choices.

    ``names`` are of the N variables; by default those of the gradients.

    Raises:
        HierAllreduceError: some entry cannot be added up.
    """
    names = names_of_gradients(rows) if names is None else names
    on_gpus = any_on_gpu(devices)
    columns = []
    for variable, grads in enumerate(zip(*rows)):
        place = partial(where, devices=devices, variable=variable, name=names[variable])
        column = _checked_column(names[variable], grads, average, strategy, place)
        # Slices that become dense must tell their variable's height, because nothing else does.
        slices = {k: grad for k, grad in enumerate(grads) if isinstance(grad, tf.IndexedSlices)}
        shapeless = [tower for tower, grad in slices.items() if grad.dense_shape is None]
        has_height = column.is_sparse or column.shape[:1].is_fully_defined()
        if shapeless and not has_height:
            raise HierAllreduceError(
                f"{place(shapeless[0])}: its IndexedSlices has no dense_shape, so it cannot be made"
                " dense; give dense_shape"
            )
        fault = _fault_on_gpus(column) if on_gpus else ""
        if fault:
            raise HierAllreduceError(f"{place(0)}: {fault}")
        columns.append(column)
    return columns


def _checked_column(
    name: str, grads: Sequence[Any], average: bool, strategy: Strategy, place: Where
) -> Column:
    """Return a column whose gradients can be added up by the user's choices."""
    grad_by_tower = {tower: grad for tower, grad in enumerate(grads) if grad is not None}
    index_by_tower = {}
    for tower, grad in grad_by_tower.items():
        fault = _fault(grad)
        if fault:
            raise HierAllreduceError(f"{place(tower)}: {fault}")
        if isinstance(grad, tf.IndexedSlices):
            index_by_tower[tower] = dtype_of(grad.indices)
    dtype_by_tower = {tower: dtype_of(grad) for tower, grad in grad_by_tower.items()}
    _check_equal("dtype", dtype_by_tower, "cast to one dtype", place)
    _check_equal("dtype of the indices", index_by_tower, "cast them to one dtype", place)
    try:
        column = column_of(name, grads, strategy.sparse, strategy.wire_dtype)
    except ValueError:
        shape_by_tower = {tower: static_shape(grad) for tower, grad in grad_by_tower.items()}
        advice = (
            "build the same model on every tower, and list the variables in one order on every"
            " tower"
        )
        _check_equal("shape", shape_by_tower, advice, place)
        raise
    if average and column.dtype and tf.as_dtype(column.dtype).is_integer:
        fault = f"{column.dtype} has no exact mean; average=False sums it, or cast it to float"
        raise HierAllreduceError(f"{place(min(grad_by_tower))}: {fault}")
    missing = [tower for tower, grad in enumerate(grads) if grad is None]
    if grad_by_tower and missing and strategy.missing == "error":
        raise HierAllreduceError(
            f"{place(missing[0])}: the gradient is None on towers {missing} but not on the others;"
            " give it on every tower or on none, or choose missing='zeros'"
        )
    return column


def _fault(grad: Any) -> str:
    """Return why a gradient cannot be added up; "" if it can."""
    is_sparse = isinstance(grad, tf.IndexedSlices)
    tensors = {"values": grad.values, "indices": grad.indices} if is_sparse else {"": grad}
    for component, tensor in tensors.items():
        if not isinstance(tensor, tf.Tensor):
            within = f" of tensors, not with {component} that are" if component else ", not"
            return f"expected a tf.Tensor or tf.IndexedSlices{within} {type(tensor).__name__}"
        if not in_current_graph(tensor):
            return (
                f"{grad!r} does not belong to the graph that is being built; call this inside"
                " `with graph.as_default():` of the towers' graph"
            )
    if dtype_of(grad) not in SUMMABLE_DTYPES:
        summable = ", ".join(SUMMABLE_DTYPES)
        return (
            f"{dtype_of(grad)} has no sum in this TensorFlow; cast it to a number first, one of"
            f" {summable}"
        )
    # Sums of rows have a height that only the step knows, so TensorFlow would fail there.
    if is_sparse and not grad.indices.shape.is_compatible_with(grad.values.shape[:1]):
        return (
            f"IndexedSlices with values of shape {grad.values.shape} and indices of shape"
            f" {grad.indices.shape}; expected one index for each row of the values"
        )
    return ""


def _fault_on_gpus(column: Column) -> str:
    """Return why GPUs cannot add up a column: TensorFlow lacks a kernel; "" if they can."""
    # Rows of one tower travel as they are, so nothing is added up.
    if column.dtype not in _FEW_GPU_KERNELS or (column.is_sparse and len(column.grads) == 1):
        return ""
    # Two tensors are added by tf.add, but only where their shape is known.
    fewest = 2 if column.is_known and column.dtype not in DTYPES_WITHOUT_ADD else 1
    if "AddN" in _FEW_GPU_KERNELS[column.dtype] and len(column.grads) > fewest:
        unknown = "" if column.is_known else ", in a shape that is known only when the step runs,"
        return (
            f"TensorFlow adds up {column.dtype} of more than {count(fewest, 'tower')}{unknown} on"
            " CPU devices only; cast it to int32 or int64"
        )
    if any(isinstance(grad, tf.IndexedSlices) for grad in column.grads):
        return (
            f"TensorFlow adds up rows of {column.dtype} on CPU devices only; cast them to int32 or"
            " a float"
        )
    return ""


def _check_equal(
    attribute: str, attribute_by_tower: Dict[int, Any], advice: str, place: Where
) -> None:
    """Check that all towers have one dtype, or shape; an error names the first uncommon one."""
    counts = Counter(map(str, attribute_by_tower.values()))
    if len(counts) < 2:
        return
    # Where most towers agree, the one that does not is at fault.
    usual = counts.most_common(1)[0][0]
    uncommon = [tower for tower in attribute_by_tower if str(attribute_by_tower[tower]) != usual]
    listed = ", ".join(f"tower {tower}: {held}" for tower, held in attribute_by_tower.items())
    fault = f"the {attribute} differs between towers ({listed}); {advice}"
    raise HierAllreduceError(f"{place(uncommon[0])}: {fault}")
