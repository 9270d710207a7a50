"""A column: one variable's K gradients, and how they travel; and whether they can be added up.

::

    grads[tower][variable]       variable 0   variable 1   …   variable N-1
    tower 0                         g00          g01
    tower 1                         g10          g11
                                     │
                                  column 0: K gradients of one dtype and shape
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from ..compat import SUMMABLE_DTYPES, in_current_graph
from ..errors import HierAllreduceError
from ..planning.chunks import GradientSize
from .names import names_of_gradients, where
from .substitution import Call

Where = Callable[[int], str]  # a tower's words at the beginning of an error

# Only these dtypes are packed, because concat has GPU kernels for them.
_PACKABLE = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


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
    is_sparse = have_slices_only(present) and sparse != "dense"
    if is_sparse and sparse == "auto" and len(grads) > 1:
        is_sparse = not _can_exceed_dense(present, shape, itemsize)
    if is_sparse:
        size = _size_of_slices(present, shape, itemsize)
    return Column(name, tuple(grads), dtype, shape, sent, is_sparse, size)


def have_slices_only(present: Sequence[Any]) -> bool:
    """Return whether all gradients, at least one, are ``tf.IndexedSlices``."""
    return bool(present) and all(isinstance(grad, tf.IndexedSlices) for grad in present)


def _known_slices(present: Sequence[Any]) -> List[int]:
    """Return the numbers of slices in sparse gradients, as far as they are known."""
    numbers = [grad.values.shape[:1].num_elements() for grad in present]
    return [number for number in numbers if number is not None]


def _can_exceed_dense(present: Sequence[Any], shape: tf.TensorShape, itemsize: int) -> bool:
    """Return whether the slices of all towers can be more bytes than the dense gradient.

    They count as far as their number is known before the step runs. Without a width the indices do
    not count.
    """
    height = shape[:1].num_elements()
    width = shape[1:].num_elements()
    if height is None:
        return False
    dense = itemsize * (1 if width is None else width)
    sparse = dense + (0 if width is None else tf.int64.size)
    return bool(sum(_known_slices(present)) * sparse > height * dense)


def _size_of_slices(present: Sequence[Any], shape: tf.TensorShape, itemsize: int) -> GradientSize:
    """Return the size of a sum of sparse gradients: at most the slices of all towers."""
    # It is less if towers have the same index.
    known = _known_slices(present)
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


def checked_columns(call: Call, names: Optional[Sequence[str]] = None) -> List[Column]:
    """Return the N columns of K×N gradients, by the user's choices.

    ``names`` are of the N variables; by default those of the gradients.

    Raises:
        HierAllreduceError: some entry cannot be added up.
    """
    columns = []
    names = names_of_gradients(call.rows) if names is None else names
    for n, (name, grads) in enumerate(zip(names, zip(*call.rows))):
        place = partial(where, devices=call.devices, variable=n, name=name)
        columns.append(_checked_column(call, name, grads, place))
    return columns


def _checked_column(call: Call, name: str, grads: Sequence[Any], place: Where) -> Column:
    """Return a column whose gradients can be added up by the user's choices."""
    grad_by_tower = {tower: grad for tower, grad in enumerate(grads) if grad is not None}
    for tower, grad in grad_by_tower.items():
        fault = _fault(grad)
        if fault:
            raise HierAllreduceError(f"{place(tower)}: {fault}")
    dtype_by_tower = {tower: dtype_of(grad) for tower, grad in grad_by_tower.items()}
    _check_equal("dtype", dtype_by_tower, "cast to one dtype", place)
    try:
        column = column_of(name, grads, call.strategy.sparse, call.strategy.wire_dtype)
    except ValueError:
        shape_by_tower = {tower: static_shape(grad) for tower, grad in grad_by_tower.items()}
        advice = (
            "build the same model on every tower, and list the variables in one order on every"
            " tower"
        )
        _check_equal("shape", shape_by_tower, advice, place)
        raise
    if call.average and column.dtype and tf.as_dtype(column.dtype).is_integer:
        fault = f"{column.dtype} has no exact mean; average=False sums it, or cast it to float"
        raise HierAllreduceError(f"{place(min(grad_by_tower))}: {fault}")
    missing = [tower for tower, grad in enumerate(grads) if grad is None]
    if grad_by_tower and missing and call.strategy.missing == "error":
        raise HierAllreduceError(
            f"{place(missing[0])}: the gradient is None on towers {missing} but not on the others;"
            " give it on every tower or on none, or choose missing='zeros'"
        )
    # Slices that become dense must tell their variable's height, because nothing else does.
    slices = {k: grad for k, grad in grad_by_tower.items() if isinstance(grad, tf.IndexedSlices)}
    shapeless = [tower for tower, grad in slices.items() if grad.dense_shape is None]
    if shapeless and not column.is_sparse and not column.shape[:1].is_fully_defined():
        raise HierAllreduceError(
            f"{place(shapeless[0])}: its IndexedSlices has no dense_shape, so it cannot be made"
            " dense; give dense_shape"
        )
    return column


def _fault(grad: Any) -> str:
    """Return why a gradient cannot be added up; "" if it can."""
    is_sparse = isinstance(grad, tf.IndexedSlices)
    for tensor in (grad.values, grad.indices) if is_sparse else (grad,):
        if not isinstance(tensor, tf.Tensor):
            given = type(tensor).__name__
            return f"expected a tf.Tensor, or tf.IndexedSlices of tensors, not {given}"
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
    # Sums of slices have a height that only the step knows, so TensorFlow would fail there.
    # Scalars are no slices.
    heights = ([None], grad.values.shape[:1]) if is_sparse else ()
    if not all(grad.indices.shape.is_compatible_with(height) for height in heights):
        return (
            f"IndexedSlices with values of shape {grad.values.shape} and indices of shape"
            f" {grad.indices.shape}; expected one index for each slice of the values"
        )
    return ""


def _check_equal(
    attribute: str, attribute_by_tower: Dict[int, Any], advice: str, place: Where
) -> None:
    """Check that all towers have the dtype, or shape, of the first one."""
    usual = set(map(str, list(attribute_by_tower.values())[:1]))
    for tower, attribute_there in attribute_by_tower.items():
        if str(attribute_there) not in usual:
            listed = ", ".join(f"tower {k}: {held}" for k, held in attribute_by_tower.items())
            fault = f"the {attribute} differs between towers ({listed}); {advice}"
            raise HierAllreduceError(f"{place(tower)}: {fault}")
