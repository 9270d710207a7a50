"""What a caller gives: K rows of N gradients, alone or in pairs, checked before the first op.

::

    grads[tower][variable]       variable 0   variable 1   …   variable N-1
    tower 0  on devices[0]          g00          g01              ◄─ one row, as compute_gradients
    tower 1  on devices[1]          g10          g11                 returns it with variables
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import tensorflow as tf

from ..cluster import Cluster
from ..compat import is_resource, tf1
from ..configs import refusal
from ..errors import ClusterError, HierAllreduceError
from ..formatting import count, warn
from .columns import static_shape
from .devices import device_fields, devices_match, is_list
from .names import name_of, where

VAR_LIST_ADVICE = (
    "without var_list=, compute_gradients takes all towers' variables: give it those of its own"
    " tower"
)

Rows = Tuple[Tuple[Any, ...], ...]  # K × N


def check_average(average: Any) -> None:
    """Raise a HierAllreduceError if ``average`` is not a bool; NumPy's bools are bools."""
    if not isinstance(average, (bool, np.bool_)):
        raise refusal(average, "average", "True for the mean, False for the sum")


def check_cluster(cluster: Any) -> None:
    """Raise a ClusterError if ``cluster`` is neither a cluster nor None, which is one host."""
    if cluster is not None and not isinstance(cluster, Cluster):
        raise ClusterError(f"cluster={cluster!r}: expected a hier_allreduce.Cluster")


def checked_rows(all_grads: Any, devices: Sequence[Any]) -> Rows:
    """Return the K rows of N gradients, or of N (gradient, variable) pairs, as tuples.

    Raises:
        HierAllreduceError: not K rows, or rows of different lengths.
    """
    shape = "all_grads is K rows, one for each tower, of N gradients: all_grads[tower][variable]"
    if not is_list(all_grads):
        raise HierAllreduceError(f"{shape}; it is one {type(all_grads).__name__}")
    rows = list(all_grads)
    if len(rows) != len(devices):
        counts = f"{count(len(rows), 'row')} of gradients for {count(len(devices), 'device')}"
        raise HierAllreduceError(f"{counts}: {shape}. Give one row for each device")
    for tower, row in enumerate(rows):
        if not is_list(row):
            fault = f"its row is one {type(row).__name__}; {shape}"
            raise HierAllreduceError(f"{where(tower, devices)}: {fault}")
    # Rows are read once and kept, because they may be iterators.
    full = tuple(map(tuple, rows))
    if len(set(map(len, full))) > 1:
        lengths_of = [f"{where(k, devices)} has {len(row)}" for k, row in enumerate(full)]
        counts = ", ".join(lengths_of)
        fault = f"every tower must have the same number of gradients: {counts}"
        raise HierAllreduceError(f"{fault}; {VAR_LIST_ADVICE}")
    return full


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
    return tuple(tuple((_of_variable(grad, var), var) for grad, var in row) for row in rows)


def _of_variable(grad: Any, var: Any) -> Any:
    """Return a gradient, whose rows get their variable's shape if they tell another height.

    TensorFlow's updates of rows ignore ``dense_shape``, so some programs write any.
    """
    is_sparse = isinstance(grad, tf.IndexedSlices) and grad.dense_shape is not None
    if not is_sparse or static_shape(grad)[:1].is_compatible_with(var.shape[:1]):
        return grad
    return tf.IndexedSlices(grad.values, grad.indices, np.array(var.shape.as_list()))


def _fault_of_pair(pair: Any) -> str:
    """Return why an entry is not a (gradient, variable) pair; "" if it is one."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        return "expected a (gradient, variable) pair; allreduce_grads takes gradients alone"
    if not hasattr(pair[1], "name"):
        return f"expected a variable after the gradient, not {pair[1]!r}"
    return ""


def _check_homes(rows: Sequence[Sequence[Any]], devices: Sequence[Any]) -> None:
    """Check that no row has variables of another tower, unless the towers share them."""
    device_by_tower: Dict[int, str] = {}
    for tower, device in enumerate(devices):
        # A device function, or a job without a device, tells nothing.
        if isinstance(device, str) and device_fields(device).device_type:
            device_by_tower[tower] = device

    # A variable's home is the tower on whose device it is. The row's tower comes first, because
    # several towers may share a device, and it is the home if no device tells another one.
    homes: List[List[int]] = []  # K × N
    for tower, row in enumerate(rows):
        candidates = [k for k in (tower, *device_by_tower) if k in device_by_tower]
        homes.append([])
        for var in row:
            device = getattr(var, "device", "")
            matching = (k for k in candidates if devices_match(device, device_by_tower[k]))
            homes[tower].append(next(matching, tower) if device else tower)

    # A variable on another tower's device is right if all of that tower's own variables are there,
    # too. If some are not, the rows are swapped.
    mixed = {tower for tower, row in enumerate(homes) if set(row) != {tower}}
    ids = [set(map(id, row)) for row in rows]
    for tower, row in enumerate(rows):
        for variable, (var, home) in enumerate(zip(row, homes[tower])):
            if home != tower and home in mixed and id(var) not in ids[home]:
                place = where(tower, devices, variable, name_of(var))
                raise HierAllreduceError(
                    f"{place}: the variable is on {var.device}, tower {home}'s device; give one row"
                    " for each tower, in the order of the devices: rows[tower][variable]"
                )


def warn_of_references(variables: Sequence[Any]) -> None:
    """Warn of reference variables, whose reads race with updates."""
    references = []
    for var in variables:
        if isinstance(var, tf1.Variable) and not is_resource(var):
            references.append(var.op.name)
    if references:
        warn(
            f"{len(references)} of {len(variables)} trained variables are reference variables, the"
            f" first is {references[0]!r}: an update may overwrite one while a gradient still reads"
            " it, and training then goes wrong; call tf.compat.v1.enable_resource_variables()"
            " before the model is built, or create them with use_resource=True (tf_cnn_benchmarks:"
            " --use_resource_vars=True)"
        )
