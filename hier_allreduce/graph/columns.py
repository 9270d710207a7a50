"""K×N gradients as the caller passes them, alone or with variables, checked before the first op.

::

    grads[tower][variable]       variable 0   variable 1   …   variable N-1
    tower 0  on devices[0]          g00          g01
    tower 1  on devices[1]          g10          g11
                                     │
                                  column 0: K gradients of one dtype and shape
"""

from __future__ import annotations

import warnings
from collections import Counter
from functools import partial
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from ..compat import DTYPES_WITHOUT_ADD, SUMMABLE_DTYPES, in_current_graph, is_resource, tf1
from ..configs import check_keys
from ..errors import HierAllreduceError
from ..formatting import count
from ..planning import Strategy
from .devices import any_on_gpu, device_fields, devices_match
from .names import name_of, names_of_gradients, names_within_towers, where

VAR_LIST_ADVICE = (
    "without var_list=, compute_gradients takes all towers' variables: give it those of its own"
    " tower"
)

Rows = Tuple[Tuple[Any, ...], ...]  # K × N
Place = Callable[[int], str]  # a tower's words at the beginning of an error

# Ops for which TensorFlow has no GPU kernel of a dtype, as its registry of kernels lists them.
# A dtype without AddN can be added only in pairs. Not even a chain of pairs helps, because
# Grappler, TensorFlow's graph optimizer, makes an AddN of the chain.
_FEW_GPU_KERNELS = {
    **dict.fromkeys(("int8", "int16", "uint8", "uint16", "uint64"), ("AddN", "UnsortedSegmentSum")),
    **dict.fromkeys(("int64", "uint32"), ("UnsortedSegmentSum",)),
}


class Column(NamedTuple):
    """One variable's K gradients.

    Attributes:
        name: for messages and op names.
        grads: K tensors, ``tf.IndexedSlices`` or None, ``grads[tower]``.
        dtype: of the gradients; empty if there is nothing to add up.
        shape: as far as it is known; of sparse gradients, their variable's.
        is_sparse: whether all gradients, at least one, are ``tf.IndexedSlices`` that stay sparse.
    """

    name: str
    grads: Tuple[Any, ...]
    dtype: str
    shape: tf.TensorShape
    is_sparse: bool


def column_of(name: str, grads: Sequence[Any], sparse: str = "auto") -> Column:
    """Return a column with the dtype and shape of its gradients.

    Raises:
        ValueError: the shapes contradict each other.
    """
    present = [grad for grad in grads if grad is not None]
    dtype = dtype_of(present[0]) if present else ""
    shape = tf.TensorShape(None)
    for other in map(static_shape, present):
        is_equal = shape.is_fully_defined() and shape == other
        if not is_equal:  # merging is slow, and nearly all are equal
            shape = shape.merge_with(other)
    column = Column(name, tuple(grads), dtype, shape, is_sparse=False)
    if sparse == "dense" or not has_rows_only(column):
        return column
    is_smaller_dense = sparse == "auto" and len(grads) > 1 and _rows_exceed_dense(column)
    return column._replace(is_sparse=not is_smaller_dense)


def has_rows_only(column: Column) -> bool:
    """Return whether all gradients, at least one, are ``tf.IndexedSlices``."""
    present = [grad for grad in column.grads if grad is not None]
    return bool(present) and all(isinstance(grad, tf.IndexedSlices) for grad in present)


def _rows_exceed_dense(column: Column) -> bool:
    """Return whether the rows of all towers can be more bytes than the dense gradient.

    They are at least those whose number is known before the step runs.
    """
    height = column.shape[:1].num_elements()
    if height is None:
        return False
    rows = sum(count for count in row_counts(column) if count is not None)
    width = column.shape[1:].num_elements()
    if width is None:
        return rows > height
    itemsize = tf.as_dtype(column.dtype).size
    return rows * bytes_of_row(column, itemsize) > height * width * itemsize


def row_counts(column: Column) -> List[Optional[int]]:
    """Return the number of rows in each sparse gradient; None where only the step will know."""
    present = [grad for grad in column.grads if grad is not None]
    return [grad.values.shape[:1].num_elements() for grad in present]


def bytes_of_row(column: Column, itemsize: int) -> int:
    """Return the bytes of a row and its index, in a column whose rows have a known shape."""
    return int(column.shape[1:].num_elements()) * itemsize + tf.int64.size


def dtype_of(grad: Any) -> str:
    """Return the name of a gradient's dtype."""
    # assign_add of a reference variable gives float32_ref, which is float32
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


# ---- the caller's arguments ----------------------------------------------------------------------


def check_average(average: Any) -> None:
    """Raise a HierAllreduceError if ``average`` is not a bool; NumPy's bools are bools."""
    if not isinstance(average, (bool, np.bool_)):
        raise HierAllreduceError(f"average={average!r}: it is True for the mean, False for the sum")


def check_names(unknown: Mapping[str, Any], function: str, known: Sequence[str]) -> None:
    """Raise a HierAllreduceError that says what the arguments of a function are called here."""
    if "mean" in unknown:
        value = unknown["mean"]
        raise HierAllreduceError(f"{function}(mean={value!r}): it is called average={value!r} here")
    check_keys(unknown, known, function)


def checked_rows(all_grads: Any, devices: Sequence[Any]) -> Rows:
    """Return the K rows of N gradients, or of N (gradient, variable) pairs, as tuples.

    Raises:
        HierAllreduceError: not K rows, or rows of different lengths.
    """
    shape = "all_grads is K rows, one for each tower, of N gradients: all_grads[tower][variable]"
    if not _is_list(all_grads):
        raise HierAllreduceError(f"{shape}; it is one {type(all_grads).__name__}")
    rows = list(all_grads)
    if len(rows) != len(devices):
        lengths = {len(row) if isinstance(row, (tuple, list)) else -1 for row in rows}
        hint = ""
        if lengths == {len(devices)}:
            hint = "; these look like N columns: transpose them with zip(*all_grads)"
        counts = f"{count(len(rows), 'row')} of gradients for {count(len(devices), 'device')}"
        raise HierAllreduceError(f"{counts}: {shape}. Give one row for each device{hint}")
    for tower, row in enumerate(rows):
        if not _is_list(row):
            fault = f"its row is one {type(row).__name__}; {shape}"
            raise HierAllreduceError(f"{where(tower, devices)}: {fault}")
    full = tuple(map(tuple, rows))
    if len(set(map(len, full))) > 1:
        lengths_of = [f"{where(k, devices)} has {len(row)}" for k, row in enumerate(full)]
        counts = ", ".join(lengths_of)
        fault = f"every tower must have the same number of gradients: {counts}"
        raise HierAllreduceError(fault + _unshared(full))
    return full


def _is_list(rows: Any) -> bool:
    return hasattr(rows, "__iter__") and not isinstance(rows, (tf.Tensor, tf.Variable))


def _unshared(rows: Rows) -> str:
    """Return a clause with the variables that only some towers have; "" for gradients alone."""
    pairs = [_pairs_among(row) for row in rows]
    variables = [variables_in(row) for row in pairs]
    names = names_within_towers(variables)
    towers: Counter = Counter()
    for row in names:
        towers.update(set(row))
    unshared = sorted(name for name, number in towers.items() if number < len(rows))
    clause = f"; not on every tower: {', '.join(unshared)}" if unshared else ""
    some_grad_is_none = any(grad is None for row in pairs for grad in grads_in(row))
    advice = f"; {VAR_LIST_ADVICE}" if some_grad_is_none else ""
    return clause + advice


def _pairs_among(row: Sequence[Any]) -> List[Any]:
    return [entry for entry in row if not _fault_of_pair(entry)]


def grads_in(pairs: Sequence[Any]) -> List[Any]:
    """Return the gradients of N (gradient, variable) pairs."""
    return [grad for grad, _ in pairs]


def variables_in(pairs: Sequence[Any]) -> List[Any]:
    """Return the variables of N (gradient, variable) pairs."""
    return [var for _, var in pairs]


def checked_pairs(all_grads_and_vars: Any, devices: Sequence[Any]) -> Rows:
    """Return K rows of N (gradient, variable) pairs, as tuples.

    Raises:
        HierAllreduceError: not K rows, rows of different lengths, an entry that is not a pair, or
            rows that hold other towers' variables.
    """
    rows = checked_rows(all_grads_and_vars, devices)
    for tower, row in enumerate(rows):
        for variable, pair in enumerate(row):
            fault = _fault_of_pair(pair)
            if fault:
                raise HierAllreduceError(f"{where(tower, devices, variable)}: {fault}")
    _check_homes([variables_in(row) for row in rows], devices)
    return rows


def _fault_of_pair(pair: Any) -> str:
    """Return why an entry is not a (gradient, variable) pair; "" if it is one."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        return "expected a (gradient, variable) pair; allreduce_grads takes gradients alone"
    if not hasattr(pair[1], "name"):
        return f"expected a variable after the gradient, not {pair[1]!r}"
    return ""


def _check_homes(rows: Sequence[Sequence[Any]], devices: Sequence[Any]) -> None:
    """Check that no row has variables of another tower, unless the towers share them."""
    known: Dict[int, str] = {}
    for tower, device in enumerate(devices):
        # a function, or a job without a device, tells nothing
        if isinstance(device, str) and device_fields(device)[3]:
            known[tower] = device
    homes = []  # K × N
    for tower, row in enumerate(rows):
        homes.append([_home(var, tower, known) for var in row])
    for tower, row in enumerate(rows):
        for variable, var in enumerate(row):
            home = homes[tower][variable]
            if home == tower:
                continue
            # A variable on another tower's device is right if all of that tower's own variables
            # are there, too. If some are not, the rows are swapped.
            home_is_mixed = any(other != home for other in homes[home])
            is_shared = any(var is other for other in rows[home])
            if home_is_mixed and not is_shared:
                place = where(tower, devices, variable, list(map(name_of, row)))
                raise HierAllreduceError(
                    f"{place}: the variable is on {var.device}, tower {home}'s device; give one row"
                    " for each tower, in the order of the devices: rows[tower][variable]"
                )


def _home(var: Any, row: int, known: Dict[int, str]) -> int:
    """Return the tower on whose device a variable of ``row`` is; ``row`` if no tower is known."""
    device = getattr(var, "device", "")
    for tower in (row, *known):
        if device and tower in known and devices_match(device, known[tower]):
            return tower
    return row


def warn_of_references(variables: Sequence[Any]) -> None:
    """Warn the caller's caller of reference variables, whose reads race with updates."""
    references = []
    for var in variables:
        if isinstance(var, tf1.Variable) and not is_resource(var):
            references.append(var.op.name)
    if references:
        warnings.warn(
            f"{len(references)} of {len(variables)} trained variables are reference variables, the"
            f" first is {references[0]!r}: an update may overwrite one while a gradient still reads"
            " it, and training then goes wrong; call tf.compat.v1.enable_resource_variables()"
            " before the model is built, or create them with use_resource=True (tf_cnn_benchmarks:"
            " --use_resource_vars=True)",
            stacklevel=4,  # without_autograph is in between
        )


# ---- columns -------------------------------------------------------------------------------------


def checked_columns(
    rows: Sequence[Sequence[Any]],
    devices: Sequence[Any],
    average: bool,
    strategy: Strategy,
    names: Optional[Sequence[str]] = None,
) -> List[Column]:
    """Return the N columns of K×N gradients, by the user's choices.

    Args:
        rows: K × N, from :func:`checked_rows`.
        devices: K devices.
        average: the mean, which integers do not have.
        strategy: decides about sparse and missing gradients.
        names: of the N variables; by default those of the gradients.

    Raises:
        HierAllreduceError: some entry cannot be added up.
    """
    names = names_of_gradients(rows) if names is None else names
    on_gpus = any_on_gpu(devices)
    columns = []
    for variable, grads in enumerate(zip(*rows)):
        place = partial(where, devices=devices, variable=variable, names=names)
        column = _checked_column(names[variable], grads, average, strategy, place)
        fault = _fault_on_gpus(column) if on_gpus else ""
        if fault:
            raise HierAllreduceError(f"{place(0)}: {fault}")
        columns.append(column)
    return columns


def _checked_column(
    name: str, grads: Sequence[Any], average: bool, strategy: Strategy, place: Place
) -> Column:
    """Return a column whose gradients can be added up by the user's choices."""
    present = {tower: grad for tower, grad in enumerate(grads) if grad is not None}
    for tower, grad in present.items():
        fault = _fault(grad)
        if fault:
            raise HierAllreduceError(f"{place(tower)}: {fault}")
    slices = {tower: grad for tower, grad in present.items() if isinstance(grad, tf.IndexedSlices)}
    dtypes = {tower: dtype_of(grad) for tower, grad in present.items()}
    _check_equal("dtype", dtypes, "cast to one dtype", place)
    indices = {tower: dtype_of(grad.indices) for tower, grad in slices.items()}
    _check_equal("dtype of the indices", indices, "cast them to one dtype", place)
    try:
        column = column_of(name, grads, strategy.sparse)
    except ValueError:
        shapes = {tower: static_shape(grad) for tower, grad in present.items()}
        advice = (
            "build the same model on every tower, and list the variables in one order on every"
            " tower"
        )
        _check_equal("shape", shapes, advice, place)
        raise
    if average and column.dtype and tf.as_dtype(column.dtype).is_integer:
        fault = f"{column.dtype} has no exact mean; average=False sums it, or cast it to float"
        raise HierAllreduceError(f"{place(min(present))}: {fault}")
    missing = [tower for tower, grad in enumerate(grads) if grad is None]
    if present and missing and strategy.missing == "error":
        raise HierAllreduceError(
            f"{place(missing[0])}: the gradient is None on towers {missing} but not on the others;"
            " give it on every tower or on none, or choose missing='zeros'"
        )
    _check_height(column, slices, place)
    return column


def _fault(grad: Any) -> str:
    """Return why a gradient cannot be added up; "" if it can."""
    if isinstance(grad, (tuple, list)):
        return (
            f"expected a gradient, not a {type(grad).__name__}; for (gradient, variable) pairs use"
            " allreduce_grads_and_vars, or pass the gradients alone"
        )
    is_sparse = isinstance(grad, tf.IndexedSlices)
    tensors = {"values": grad.values, "indices": grad.indices} if is_sparse else {"": grad}
    for name, tensor in tensors.items():
        if not isinstance(tensor, tf.Tensor):
            within = f" of tensors, not with {name} that are" if name else ", not"
            return (
                f"expected a tf.Tensor or tf.IndexedSlices{within} {type(tensor).__name__};"
                " use tf.convert_to_tensor"
            )
        if not in_current_graph(tensor):
            return (
                f"{grad!r} does not belong to the graph that is being built; call this inside"
                " `with graph.as_default():` of the towers' graph"
            )
    if dtype_of(grad) not in SUMMABLE_DTYPES:
        numbers = ", ".join(SUMMABLE_DTYPES)
        return (
            f"{dtype_of(grad)} has no sum in this TensorFlow; cast it to a number first, one of"
            f" {numbers}"
        )
    if is_sparse and not grad.indices.shape.is_compatible_with(grad.values.shape[:1]):
        return (
            f"IndexedSlices with values of shape {grad.values.shape} and indices of shape"
            f" {grad.indices.shape}; expected one index for each row of the values"
        )
    return ""


def _fault_on_gpus(column: Column) -> str:
    """Return why GPUs cannot add up a column: TensorFlow lacks a kernel; "" if they can."""
    if column.dtype not in _FEW_GPU_KERNELS or (column.is_sparse and len(column.grads) == 1):
        return ""
    fewest = 1 if column.dtype in DTYPES_WITHOUT_ADD else 2
    if "AddN" in _FEW_GPU_KERNELS[column.dtype] and len(column.grads) > fewest:
        return (
            f"TensorFlow adds up {column.dtype} of more than {count(fewest, 'tower')} on CPU"
            " devices only; cast it to int32 or int64"
        )
    if any(isinstance(grad, tf.IndexedSlices) for grad in column.grads):
        return (
            f"TensorFlow adds up rows of {column.dtype} on CPU devices only; cast them to int32 or"
            " a float"
        )
    return ""


def _check_height(column: Column, slices: Dict[int, Any], place: Place) -> None:
    """Check that sparse gradients which become dense tell their variable's height."""
    if column.is_sparse or column.shape[:1].is_fully_defined():
        return
    for tower, grad in slices.items():
        if grad.dense_shape is None:
            raise HierAllreduceError(
                f"{place(tower)}: its IndexedSlices has no dense_shape, so it cannot be made dense;"
                " give dense_shape, or choose sparse='rows'"
            )


def _check_equal(attribute: str, by_tower: Dict[int, Any], advice: str, place: Place) -> None:
    """Check that all towers have one value; an error names the first with an uncommon one."""
    counts = Counter(map(str, by_tower.values()))
    if len(counts) < 2:
        return
    usual = counts.most_common(1)[0][0]
    uncommon = [tower for tower, value in by_tower.items() if str(value) != usual]
    values = ", ".join(f"tower {tower}: {value}" for tower, value in by_tower.items())
    fault = f"the {attribute} differs between towers ({values}); {advice}"
    raise HierAllreduceError(f"{place(uncommon[0])}: {fault}")
