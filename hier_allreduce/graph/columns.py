"""A column: how one variable's K gradients travel; and whether they can be added up.

::

    grads[tower][variable]       variable 0   variable 1   …   variable N-1
    tower 0                         g00          g01
    tower 1                         g10          g11
                                     │
                                  column 0: K gradients of one dtype and shape
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow as tf

from ..compat import in_current_graph
from ..errors import HierAllreduceError
from ..planning.chunks import GradientSize
from .names import where
from .substitution import Call

Where = Callable[[int], str]  # a tower's words at the beginning of an error

# Only these dtypes are packed, because concat has GPU kernels for them.
_PACKABLE = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


class Column(NamedTuple):
    """How one variable's K gradients travel."""

    name: str  # the variable's name in messages and op names
    towers: Tuple[int, ...]  # those that have a gradient
    dtype: str  # the gradients' dtype; empty if all are None
    shape: tf.TensorShape  # as far as it is known; of sparse ones, their variable's
    wire: str  # the dtype in which they travel
    is_sparse: bool  # whether all, at least one, are tf.IndexedSlices that stay sparse
    size: GradientSize  # of a gradient as it travels; of sparse ones that of their sum, at most


def column_of(
    name: str, grads: Sequence[Any], sparse: str = "auto", wire: Optional[str] = None
) -> Column:
    """Return the column of K gradients, sparse or made dense as a :class:`Strategy` says.

    Raises:
        ValueError: the dtypes differ, or the shapes contradict each other.
    """
    towers = tuple(tower for tower, grad in enumerate(grads) if grad is not None)
    present = [grads[tower] for tower in towers]
    dtype = dtype_of(present[0]) if present else ""
    sent = wire if wire and dtype == "float32" else dtype
    shape = tf.TensorShape(None)
    is_known = True
    for grad in present:
        if dtype_of(grad) != dtype:
            raise ValueError(f"{dtype_of(grad)} is not {dtype}")
        grad_shape = static_shape(grad)
        is_known &= grad_shape.is_fully_defined()
        # Shapes are compared first, because merging is slow, and nearly all are equal.
        is_equal = shape.is_fully_defined() and shape == grad_shape
        if not is_equal:
            shape = shape.merge_with(grad_shape)
    elements = shape.num_elements() if is_known else None
    itemsize = tf.as_dtype(sent or "float32").size
    size = GradientSize(elements, itemsize, dtype, dtype in _PACKABLE)
    is_sparse = bool(present) and all(isinstance(grad, tf.IndexedSlices) for grad in present)
    if not is_sparse or sparse == "dense":
        return Column(name, towers, dtype, shape, sent, False, size)
    slices = _size_of_slices(present, shape, size)
    # They stay sparse unless they are known to be more bytes than the dense gradient.
    if sparse == "auto" and len(grads) > 1 and shape.is_fully_defined():
        is_sparse = slices.bytes <= shape.num_elements() * itemsize
    return Column(name, towers, dtype, shape, sent, is_sparse, slices if is_sparse else size)


def _size_of_slices(
    present: Sequence[Any], shape: tf.TensorShape, size: GradientSize
) -> GradientSize:
    """Return the size of a sum of sparse gradients: at most the slices of all towers."""
    # It is less if towers have the same index.
    numbers = [grad.values.shape[:1].num_elements() for grad in present]
    width = shape[1:].num_elements()
    if None in numbers or width is None:
        return size._replace(elements=None, packable=False)
    itemsize = width * size.itemsize + tf.int64.size
    return size._replace(elements=sum(numbers), itemsize=itemsize, packable=False)


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

    ``names`` are of the N variables; by default each is that of its first gradient's op.

    Raises:
        HierAllreduceError: some entry cannot be added up.
    """
    columns = []
    for n, grads in enumerate(zip(*call.rows)):
        # What has a value is in no graph, and has no op.
        ops = [grad.op.name for grad in grads if hasattr(grad, "op")]
        name = names[n] if names else next(iter(ops), f"gradient{n}")
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
    try:
        column = column_of(name, grads, call.strategy.sparse, call.strategy.wire_dtype)
    except ValueError:
        kinds = {k: f"{dtype_of(grad)} {static_shape(grad)}" for k, grad in grad_by_tower.items()}
        listed = ", ".join(f"tower {k}: {kind}" for k, kind in kinds.items())
        usual = kinds[min(kinds)]
        other = next(tower for tower, kind in kinds.items() if kind != usual)
        fault = (
            f"the dtype or shape differs between towers ({listed}); build the same model on every"
            " tower, list the variables in one order on every tower, and cast to one dtype"
        )
        raise HierAllreduceError(f"{place(other)}: {fault}") from None
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
    is_height_known = column.is_sparse or column.shape[:1].is_fully_defined()
    for tower, grad in grad_by_tower.items():
        is_slices = isinstance(grad, tf.IndexedSlices)
        if is_slices and grad.dense_shape is None and not is_height_known:
            fault = "its IndexedSlices has no dense_shape, so it cannot be made dense; give one"
            raise HierAllreduceError(f"{place(tower)}: {fault}")
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
    dtype = grad.dtype.base_dtype
    if not (dtype.is_floating or dtype.is_integer or dtype.is_complex):
        return f"{dtype.name} has no sum; cast it to a number first"
    # Sums of slices have a height that only the step knows, so TensorFlow would fail there.
    # Scalars are no slices.
    heights = ([None], grad.values.shape[:1]) if is_sparse else ()
    if not all(grad.indices.shape.is_compatible_with(height) for height in heights):
        return (
            f"IndexedSlices with values of shape {grad.values.shape} and indices of shape"
            f" {grad.indices.shape}; expected one index for each slice of the values"
        )
    return ""
