"""``update="main"``: each variable's main updates it for all towers."""

from __future__ import annotations

import contextlib
import itertools
import re
from typing import Any, Iterator, List, Optional, Sequence, Set

import tensorflow as tf

from ..graph import HostGroup, copy_from_mains, reduce_to_mains, variable_names
from ..graph.tf import tf1
from ..planning import Strategy
from .replicas import Copies, finder
from .update import Pairs, Updated, all_variables, check_variables
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

    Arguments and errors are those of :func:`hier_allreduce.allreduce_grads_and_vars`, and of
    :func:`.update.check_variables`. The optimizer gets N gradients, with the variables of the towers that are their
    mains. Its slots live there, and have the names of the slots of tower 0's variables.

    Args:
        base: the optimizer that updates, if ``optimizer`` is a wrapper that is known to pass all gradients on to it.
    """
    check_at_mains(optimizer if base is None else base)
    check_variables(rows, devices)
    names = variable_names(rows, devices)
    grads = [[grad for grad, _ in row] for row in rows]
    variables = [[var for _, var in row] for row in rows]
    reduced, layout = reduce_to_mains(grads, devices, average, strategy, cluster=cluster, names=names)
    mains = layout.mains()
    with _slots_named_like_tower_0(variables):
        updated = optimizer.apply_gradients([(reduced[n], variables[main][n]) for n, main in sorted(mains.items())])
    values: List[Any] = [None] * len(names)
    for n, main in mains.items():
        with tf.control_dependencies([updated]), tf1.device(devices[main]):
            values[n] = variables[main][n].read_value()
    ops = [updated]
    for tower, copied in enumerate(copy_from_mains(values, layout)):
        with tf1.device(devices[tower]):
            ops += [variables[tower][n].assign(copied[n]).op for n, main in mains.items() if main != tower]
    return Updated(tf.group(*ops), variables, [[] for _ in rows])


@contextlib.contextmanager
def _slots_named_like_tower_0(variables: Copies) -> Iterator[None]:
    """Name slots that are created inside the context, on any tower, like those of tower 0's variables."""
    find, taken = finder(variables), {var.op.name for var in all_variables()}

    def get_renamed(getter: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        _, renamed = find(name)
        return getter(renamed if kwargs.get("reuse") else _unused(renamed, taken), *args, **kwargs)

    with tf1.variable_scope(tf1.get_variable_scope(), custom_getter=get_renamed, auxiliary_name_scope=False):
        yield


def _unused(name: str, taken: Set[str]) -> str:
    """Return the name, or with the next free number as TensorFlow numbers slots, ``w/Adam_1``; take it."""
    slot = name.rstrip("/")
    numbered = (re.sub(r"(_\d+)?$", f"_{number}", slot, count=1) for number in itertools.count(1))
    free = next(candidate for candidate in itertools.chain([slot], numbered) if candidate not in taken)
    taken.add(free)
    return free + name[len(slot) :]
