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
from ..errors import ClusterError, HierAllreduceError
from ..formatting import count, shown, warn
from .columns import static_shape
from .devices import devices_match, tower_at
from .names import name_of, where

VAR_LIST_ADVICE = (
    "without var_list=, compute_gradients takes all towers' variables: give it those of its own"
    " tower"
)

Rows = Tuple[Tuple[Any, ...], ...]  # K × N


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
    rows = list(all_grads)
    if len(rows) != len(devices):
        counts = f"{count(len(rows), 'row')} of gradients for {count(len(devices), 'device')}"
        raise HierAllreduceError(f"{counts}: {shape}. Give one row for each device")
    # Rows are read once and kept, because they may be iterators.
    full = tuple(map(tuple, rows))
    if len(set(map(len, full))) > 1:
        counts = ", ".join(f"{where(k, devices)} has {len(row)}" for k, row in enumerate(full))
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
    checked = []
    for tower, row in enumerate(rows):
        pairs = []
        for variable, pair in enumerate(row):
            is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
            if not is_pair or not hasattr(pair[1], "name"):
                raise HierAllreduceError(
                    f"{where(tower, devices, variable)}: expected a (gradient, variable) pair, not"
                    f" {shown(pair)}; allreduce_grads takes gradients alone"
                )
            grad, var = pair
            # TensorFlow's updates of slices ignore dense_shape, so some programs write any. Slices
            # that tell another height than their variable's get its shape.
            is_sparse = isinstance(grad, tf.IndexedSlices)
            if is_sparse and not static_shape(grad)[:1].is_compatible_with(var.shape[:1]):
                shape = np.array(var.shape.as_list())
                grad = tf.IndexedSlices(grad.values, grad.indices, shape)
            pairs.append((grad, var))
        checked.append(tuple(pairs))
    _check_homes([variables_in(row) for row in checked], devices)
    return tuple(checked)


def _check_homes(rows: Sequence[Sequence[Any]], devices: Sequence[Any]) -> None:
    """Check that no row has variables of another tower, unless the towers share them."""
    # A device function tells nothing.
    named = [device if isinstance(device, str) else "" for device in devices]

    # Note which variables of a tower are on the device of another one, its home. Several towers
    # may share a device.
    homes: List[Dict[int, int]] = []  # K times the homes of variables
    for tower, row in enumerate(rows):
        homes.append({})
        for variable, var in enumerate(row):
            device = getattr(var, "device", "")
            home = tower_at(device, named)
            if home is not None and not devices_match(device, named[tower]):
                homes[tower][variable] = home

    # A variable on another tower's device is right if all of that tower's own variables are there,
    # too. If some are not, the rows are swapped.
    ids = [set(map(id, row)) for row in rows]
    for tower, row in enumerate(rows):
        for variable, home in homes[tower].items():
            var = row[variable]
            if homes[home] and id(var) not in ids[home]:
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
