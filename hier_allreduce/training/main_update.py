"""``update="main"``: each variable's main updates it for all towers."""

from __future__ import annotations

import contextlib
import itertools
import re
from typing import Any, Iterator, List, Optional, Sequence, Set

import tensorflow as tf

from ..errors import HierAllreduceError
from ..graph import HostGroup, copy_from_mains, reduce_to_mains, variable_names, where
from ..graph.tf import tf1
from ..planning import Strategy
from .replicas import copies_of, owner_of
from .update import Pairs, Updated, all_variables, check_variables, recording_created
from .wrapped import check_at_mains


def update_at_mains(
    optimizer: Any,
    rows: Sequence[Pairs],
    devices: Sequence[Any],
    average: bool,
    strategy: Strategy,
    cluster: Optional[HostGroup] = None,
    base: Optional[Any] = None,
) -> Updated:
    """Reduce to the mains, update there once, and copy the new values over the same plan to all towers.

    Source: Chainer's MultiprocessParallelUpdater. There one device is the main of all variables; here mains hold about
    equal bytes.

    Args:
        optimizer: gets N gradients, each with the variable of the tower that is its main. Its slots live there, and
            have the names of the slots of tower 0's variable.
        rows: K rows of N pairs, before the all-reduce.
        devices: K devices.
        average: True for the mean of the gradients, False for their sum.
        strategy: how to reduce and copy.
        cluster: the cluster of several hosts, each of which updates its variables.
        base: the optimizer that updates, if ``optimizer`` is a wrapper that is known to pass all gradients on to it.

    Raises:
        HierAllreduceError: as :func:`hier_allreduce.allreduce_grads_and_vars`; or the variables differ between towers,
            are reference variables or pieces of partitioned ones, or ``optimizer`` cannot run on one device only.
    """
    check_at_mains(optimizer if base is None else base)
    check_variables(rows, devices)
    names = variable_names(rows, devices)
    _check_whole(rows[0], devices, names)
    grads = [[grad for grad, _ in row] for row in rows]
    reduced, layout = reduce_to_mains(grads, devices, average, strategy, cluster=cluster, names=names)
    mains = layout.mains()
    with _slots_named_like_tower_0(rows), recording_created() as created:
        updated = optimizer.apply_gradients([(reduced[n], rows[main][n][1]) for n, main in sorted(mains.items())])
    values: List[Any] = [None] * len(names)
    for n, main in mains.items():
        with tf.control_dependencies([updated]), tf1.device(devices[main]):
            values[n] = rows[main][n][1].read_value()
    ops = [updated]
    for tower, copied in enumerate(copy_from_mains(values, layout)):
        with tf1.device(devices[tower]):
            ops += [rows[tower][n][1].assign(copied[n]).op for n, main in mains.items() if main != tower]
    return Updated(tf.group(*ops), [[var for _, var in row] for row in rows], [[] for _ in rows], created)


def _check_whole(row: Pairs, devices: Sequence[Any], names: Sequence[str]) -> None:
    """Raise a HierAllreduceError if a variable is a piece of a partitioned one."""
    for n, (_, var) in enumerate(row):
        if getattr(var, "_save_slice_info", None) is not None:
            raise HierAllreduceError(
                f"{where(0, devices, n, names)}: a piece of a partitioned variable, whose slots would be saved as"
                " pieces of several towers' variables; use update='replicated', or create it without a partitioner"
            )


@contextlib.contextmanager
def _slots_named_like_tower_0(rows: Sequence[Pairs]) -> Iterator[None]:
    """Name slots that are created inside the context, on any tower, like those of tower 0's variables."""
    copies = copies_of([[[var for _, var in row] for row in rows]])
    scope, taken = tf1.get_variable_scope(), {var.op.name for var in all_variables()}

    def get_renamed(getter: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        owner = owner_of(name, copies)
        if owner:
            name = owner[2] if kwargs.get("reuse") else _unused(owner[2], taken)
        return getter(name, *args, **kwargs)

    with tf1.variable_scope(scope, custom_getter=get_renamed, auxiliary_name_scope=False):
        yield


def _unused(name: str, taken: Set[str]) -> str:
    """Return the name, or with the next free number as TensorFlow numbers slots, ``w/Adam_1``; take it."""
    slot = name.rstrip("/")
    stem, number = re.sub(r"_\d+$", "", slot), itertools.count(1)
    while slot in taken:
        slot = f"{stem}_{next(number)}"
    taken.add(slot)
    return f"{slot}/" if name.endswith("/") else slot
