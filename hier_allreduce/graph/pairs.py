"""K rows of N (gradient, variable) pairs, checked: the variables tell whether rows and towers are mixed up."""

from __future__ import annotations

import warnings
from typing import Any, Dict, Sequence, Tuple

from ..errors import HierAllreduceError
from .devices import device_fields, devices_match
from .matrix import check_rows
from .names import where
from .tf import is_resource, tf1


def check_pairs(all_grads_and_vars: Any, devices: Sequence[Any]) -> Tuple[Tuple[Tuple[Any, Any], ...], ...]:
    """Return K rows of N (gradient, variable) pairs, as tuples.

    Raises:
        HierAllreduceError: not K rows, rows of different lengths, an entry that is not a pair, or rows that hold other
            towers' variables.
    """
    rows = check_rows(all_grads_and_vars, devices)
    for tower, row in enumerate(rows):
        for variable, pair in enumerate(row):
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                fault = "expected a (gradient, variable) pair; allreduce_grads takes gradients alone"
            elif not hasattr(pair[1], "name"):
                fault = f"expected a variable after the gradient, not {pair[1]!r}"
            else:
                continue
            raise HierAllreduceError(f"{where(tower, devices, variable)}: {fault}")
    _check_devices([[var for _, var in row] for row in rows], devices)
    return rows


def _check_devices(rows: Sequence[Sequence[Any]], devices: Sequence[Any]) -> None:
    """Check that no row has variables of another tower, unless the towers share them."""
    # a function, or a job without a device, tells nothing
    known = {k: name for k, name in enumerate(devices) if isinstance(name, str) and device_fields(name)[3]}
    homes = [[_home(var, tower, known) for var in row] for tower, row in enumerate(rows)]
    for tower, row in enumerate(rows):
        for variable, (var, home) in enumerate(zip(row, homes[tower])):
            is_swapped = home != tower and any(other != home for other in homes[home])
            if is_swapped and not any(var is other for other in rows[home]):
                raise HierAllreduceError(
                    f"{where(tower, devices, variable, [var.name for var in row])}: the variable is on {var.device},"
                    f" tower {home}'s device; give one row for each tower, in the order of the devices:"
                    " rows[tower][variable]"
                )


def _home(var: Any, row: int, known: Dict[int, str]) -> int:
    """Return the tower on whose device a variable of ``row`` is: that row's, if it is on no known device."""
    device = getattr(var, "device", "")
    homes = (tower for tower in (row, *known) if tower in known and device and devices_match(device, known[tower]))
    return next(homes, row)


def warn_of_references(pairs: Sequence[Tuple[Any, Any]]) -> None:
    """Warn the caller's caller, if some variables of N pairs are reference variables: their reads race with updates."""
    references = [var.op.name for _, var in pairs if isinstance(var, tf1.Variable) and not is_resource(var)]
    if references:
        warnings.warn(
            f"{len(references)} of {len(pairs)} trained variables are reference variables, the first is"
            f" {references[0]!r}: an update may overwrite one while a gradient still reads it, and training then goes"
            " wrong; call tf.compat.v1.enable_resource_variables() before the model is built, or create them with"
            " use_resource=True (tf_cnn_benchmarks: --use_resource_vars=True)",
            stacklevel=4,  # without_autograph is in between
        )
