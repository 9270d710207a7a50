"""Gradients as they really come: dense, sparse or missing, as one list of tensors that travel.

A dense variable is one entry, a gathered sparse one is two (values, indices), one without any gradient is none.
:func:`entries` only looks, so that everything wrong is said before the first op; :func:`tensors` then builds.
"""

from __future__ import annotations

import re
from itertools import chain, count
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import tensorflow as tf

from ..errors import GradientError
from ..planning import Spec, Strategy
from .compat import tf1
from .devices import all_on_cpu
from .gradients import NARROW, Matrix, dtype_of, is_sparse, merged_shape, static_shape, where

DENSE, VALUES, INDICES = "dense", "values", "indices"


class Entry(NamedTuple):
    """One tensor of each tower that travels: of which variable, which part of it, and its size."""

    variable: int
    part: str
    spec: Spec


def find_entries(grads: Matrix, strategy: Strategy) -> List[Entry]:
    """What travels of a K×N matrix, in the order of the variables.

    Raises:
        GradientError: None on some towers (unless ``strategy.missing`` allows it), or sparse rows that must become
            dense and whose variable has no known number of rows.
    """
    found: List[Entry] = []
    # between CPU devices bytes cost nothing, and making rows dense does
    sparse = "gather" if strategy.sparse == "auto" and all_on_cpu(grads.devices) else strategy.sparse
    for variable, column in enumerate(grads.columns):
        missing = [tower for tower, grad in enumerate(column) if grad is None]
        if len(missing) == len(column):
            continue
        if missing and strategy.missing == "error":
            raise GradientError(
                f"{where(missing[0], grads.devices, variable, grads.names)}: the gradient is None on towers {missing}"
                " but not on the others; give it on every tower or on none, or choose missing='zeros'"
            )
        if _gathers(column, sparse):
            found += [Entry(variable, part, _spec(column, part)) for part in (VALUES, INDICES)]
            continue
        for tower, grad in enumerate(column):
            if is_sparse(grad) and grad.dense_shape is None and _known_rows(column) is None:
                raise GradientError(
                    f"{where(tower, grads.devices, variable, grads.names)}: its IndexedSlices has no dense_shape, so it"
                    " cannot be made dense; give dense_shape, or choose sparse='gather'"
                )
        found.append(Entry(variable, DENSE, _spec(column, DENSE)))
    return found


def entry_tensors(grads: Matrix, found: Sequence[Entry]) -> List[List[Any]]:
    """The entries' tensors of each tower, K×E: zeros for what is missing, dense for what is added dense. Adds ops."""
    columns = grads.columns
    rows = []
    for tower, row in enumerate(grads.rows):
        with tf1.device(grads.devices[tower]):
            rows.append([_tensor(row[entry.variable], entry.part, columns[entry.variable]) for entry in found])
    return rows


def to_gradients(reduced: Dict[int, Any], found: Sequence[Entry], tower: int, grads: Matrix) -> List[Any]:
    """One tower's N gradients from its reduced entries, None where there are none.

    Sparse ones keep the tower's own ``dense_shape``; where it has none, another tower's.
    """
    result: List[Any] = [None] * len(grads.names)
    for number, tensor in reduced.items():
        variable, part, _ = found[number]
        if part == DENSE:
            result[variable] = tensor
        elif part == VALUES:
            shapes = [getattr(row[variable], "dense_shape", None) for row in (grads.rows[tower], *grads.rows)]
            shape = next((shape for shape in shapes if shape is not None), None)
            result[variable] = tf.IndexedSlices(tensor, reduced[number + 1], shape)  # its indices come next
    return result


def _gathers(column: Sequence[Any], sparse: str) -> bool:
    if sparse == "dense" or not all(grad is None or is_sparse(grad) for grad in column):
        return False
    dense = _spec(column, DENSE)
    values, indices = _spec(column, VALUES), _spec(column, INDICES)
    if sparse == "gather" or None in (dense.elements, values.elements, indices.elements):
        return True
    # K-1 towers send their own rows and get those of all, or send a dense gradient and get one
    rows = values.bytes + indices.bytes
    return rows / len(column) + rows <= 2 * dense.bytes


def _spec(column: Sequence[Any], part: str) -> Spec:
    """Size of an entry: of each tower's tensor if dense, of all towers' rows together if gathered."""
    present = [grad for grad in column if grad is not None]
    if part == DENSE:
        known = all(static_shape(grad).is_fully_defined() or is_sparse(grad) for grad in present)
        elements = _merged_shape(column).num_elements() if known else None
        return Spec(elements, present[0].dtype.size, dtype_of(present[0]))
    gathered = [getattr(grad, part) for grad in present]
    sizes: List[Optional[int]] = [tensor.shape.num_elements() for tensor in gathered]
    total = None if None in sizes else sum(size for size in sizes if size)
    return Spec(total, gathered[0].dtype.size, dtype_of(gathered[0]), packable=False)


def _merged_shape(column: Sequence[Any]) -> tf.TensorShape:
    return merged_shape(static_shape(grad) for grad in column if grad is not None)


def _known_rows(column: Sequence[Any]) -> Optional[int]:
    shape = _merged_shape(column)
    return shape.as_list()[0] if shape.ndims else None


def _tensor(grad: Any, part: str, column: Sequence[Any]) -> Any:
    if part != DENSE:
        # a tower without a gradient adds no rows
        other = next(g for g in column if g is not None)
        return getattr(grad, part) if grad is not None else getattr(other, part)[:0]
    if is_sparse(grad):
        return _summed(grad, column)
    return grad if grad is not None else _zeros(column)


def _summed(grad: Any, column: Sequence[Any]) -> Any:
    rows = _known_rows(column)
    # equal indices are additions too, and are made in float32 as those of the all-reduce are
    wide = tf.cast(grad.values, tf.float32) if grad.dtype.name in NARROW else grad.values
    dense = tf.math.unsorted_segment_sum(wide, grad.indices, grad.dense_shape[0] if rows is None else rows)
    dense = tf.cast(dense, grad.dtype)
    dense.set_shape(_merged_shape(column))
    return dense


def _zeros(column: Sequence[Any]) -> Any:
    shape = _merged_shape(column)
    # sparse ones without a shape are not alone: they would be gathered, or refused
    other = next(g for g in column if g is not None and not (is_sparse(g) and g.dense_shape is None))
    if shape.is_fully_defined():
        return tf.zeros(shape, other.dtype)
    return tf.zeros(other.dense_shape if is_sparse(other) else tf.shape(other), other.dtype)


def op_names(names: Sequence[str]) -> List[str]:
    """``names`` made safe and unique as parts of op names: ``conv1/W`` → ``conv1.W``."""
    safe: Dict[str, None] = {}
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9_.-]", ".", name).lstrip("._-") or "chunk"
        numbered = chain([plain], (f"{plain}.{number}" for number in count(2)))
        safe[next(free for free in numbered if free not in safe)] = None
    return list(safe)
