"""The shapes of a model's own gradients, as the table that the bench and ``tune`` read."""

from __future__ import annotations

from typing import Any, List, Sequence, Tuple

from ..bench import DTYPE_BYTES, GradientShape, table_text
from ..errors import HierAllreduceError
from ..graph import is_sparse, static_shape, variable_names
from ..presets import write_text


def save_shapes(tower_grads: Sequence[Sequence[Any]], file: str) -> None:
    """Write the names, shapes and dtypes of a model's gradients as a table for ``tune`` and ``bench --model``.

    Args:
        tower_grads: K×N gradients, or (gradient, variable) pairs as ``compute_gradients`` returns them. All towers have
            the same shapes, so that one row is enough. Variables without gradients are left out.
        file: a TSV file: name, shape, dtype and whether it is sparse.

    Raises:
        HierAllreduceError: a gradient's shape is not known before the step runs, or the table cannot hold its dtype; or
            the towers list the same variables in different orders; or the file cannot be written.
    """
    write_text(file, table_text(shapes_of(tower_grads)))


def shapes_of(tower_grads: Sequence[Sequence[Any]]) -> Tuple[GradientShape, ...]:
    """Return the shape of each gradient of a tower; see :func:`save_shapes`.

    Raises:
        HierAllreduceError: as :func:`save_shapes`; or there are no rows, or an entry is not a gradient.
    """
    rows = [list(row) for row in tower_grads] if isinstance(tower_grads, (list, tuple)) else []
    if not rows or not rows[0]:
        raise HierAllreduceError(
            f"tower_grads={tower_grads!r}: expected K rows of gradients or (gradient, variable) pairs"
        )
    if all(_is_pair(entry) for entry in rows[0]):
        names = variable_names(rows, [f"row {number}" for number in range(len(rows))])
        pairs = rows[0]
    else:
        names = [str(getattr(grad, "name", None) or f"gradient{n}").split(":")[0] for n, grad in enumerate(rows[0])]
        pairs = [(grad, None) for grad in rows[0]]
    shapes = [_shape(name, grad, var) for name, (grad, var) in zip(names, pairs) if grad is not None]
    if not shapes:
        raise HierAllreduceError("tower_grads: no variable has a gradient")
    return tuple(shapes)


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, (tuple, list)) and len(entry) == 2


def _shape(name: str, grad: Any, var: Any) -> GradientShape:
    if not hasattr(grad, "dtype"):
        raise HierAllreduceError(f"{name}: expected a gradient, not {grad!r}")
    sizes: List[Any] = [None]
    for shape in (static_shape(grad), getattr(var, "shape", None)):
        if shape is not None and shape.is_fully_defined():
            sizes = shape.as_list()
            break
    if None in sizes:
        raise HierAllreduceError(
            f"{name}: the shape of its gradient is known only when the step runs; give (gradient, variable) pairs, or"
            " call set_shape"
        )
    dtype = grad.dtype.base_dtype.name
    if dtype not in DTYPE_BYTES:
        raise HierAllreduceError(f"{name}: dtype {dtype}; a table holds {', '.join(sorted(DTYPE_BYTES))}")
    return GradientShape(name, tuple(sizes), dtype, is_sparse(grad))
