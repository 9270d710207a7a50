"""``update="main"``: each variable's main updates it for all towers (ZeRO stage 1).

::

    K×N gradients ─► reduced to each variable's main ─► updated there ─► new values copied to all

The optimizer gets the mains' variables under the names of tower 0's. So slots exist once, at the
mains, and have the names that they have on one device: a ``Saver`` and ``tf.train.Checkpoint``
restore them on any number of towers.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple
from weakref import WeakKeyDictionary

import tensorflow as tf

from ..compat import outer_graph, tf1
from ..errors import HierAllreduceError
from ..graph import add_ops, copy_from_roots, plan_gradients, sums_only
from ..graph.columns import grads_in, variables_in
from ..graph.layout import Layout
from ..graph.names import variable_names, where
from ..planning import Strategy
from ..planning.chunks import Load
from .replicas import ReplicatedVariables, note_copies
from .update import Pairs, warn_of_moved_updates, with_rows_on_gpu
from .views import TowerViews, under_name_of
from .wrappers import held_by
from .writes import let_writes_wait, used_by

if TYPE_CHECKING:
    from ..cluster import Cluster


def update_at_mains(
    optimizer: Any,
    rows: Sequence[Pairs],
    devices: Sequence[Any],
    average: bool,
    strategy: Strategy,
    cluster: Optional[Cluster] = None,
    arguments: Optional[Dict[str, Any]] = None,
) -> Tuple[Any, ReplicatedVariables]:
    """Reduce to the mains, update there once, and copy the new values back over the same plan.

    Source: Chainer's MultiprocessParallelUpdater. There one device is the main of all variables;
    here mains hold about equal bytes, also if a graph has several such updates.

    Arguments and errors are those of :func:`hier_allreduce.allreduce_grads_and_vars`, with ``rows``
    from :func:`.update.check_variables`. The optimizer's ``apply_gradients`` gets ``arguments``,
    too. A variable that is in its row twice, or has slots at another main, is an error too. So is
    an optimizer that uses a variable of another tower than its main; this is found only once the
    ops are there. Returns the op, and the copies that it updates.
    """
    names = variable_names(rows, devices)
    grads = list(map(grads_in, rows))
    variables = list(map(variables_in, rows))
    _check_each_is_once(variables, devices, names)
    updates = _updates_of_graph()
    load = updates.load(optimizer, variables[0], devices)
    layout = plan_gradients(grads, devices, average, strategy, cluster, names, load)
    mains = layout.roots()
    optimizers = held_by(optimizer)
    views = TowerViews(variables, optimizers, arguments)
    at_mains = views.rows[0]  # the update is built as tower 0's
    for n, main in mains.items():
        at_mains[n] = under_name_of(variables[0][n], variables[main][n])
        _check_slots_are_here(optimizers, at_mains[n], where(main, devices, n, names))
    updates.add(layout, load)

    reduced = add_ops(sums_only(layout), average, "reduce_to_mains", cluster)
    pairs = []
    for n, main in sorted(mains.items()):
        with tf1.device(devices[main]):
            pairs.append((with_rows_on_gpu(reduced[main][n]), at_mains[n]))
    graph = tf1.get_default_graph()
    earlier = len(graph.get_operations())
    with views.update_of(0):
        updated = optimizer.apply_gradients(pairs, **views.arguments(0))
    added = graph.get_operations()[earlier:]
    _check_uses_mains_only(type(optimizer).__name__, added, variables, layout)
    warn_of_moved_updates(type(optimizer).__name__, added)
    updates_of_mains = [(reduced[main][n], variables[main][n]) for n, main in mains.items()]
    let_writes_wait(added, updates_of_mains)
    note_copies(variables, devices)
    return tf.group(updated, *_copy_variables(variables, layout, updated)), variables


def _copy_variables(variables: ReplicatedVariables, layout: Layout, updated: Any) -> List[Any]:
    """Return ops that copy the mains' variables to all other towers, after the op ``updated``."""
    mains = layout.roots()
    values: List[Any] = [None] * len(layout.columns)
    for n, main in mains.items():
        with tf.control_dependencies([updated]), tf1.device(layout.devices[main]):
            values[n] = variables[main][n].read_value()
    ops = []
    for tower, copied in enumerate(copy_from_roots(values, layout)):  # K × N
        others = [n for n, main in mains.items() if main != tower]
        with tf1.device(layout.devices[tower]):
            ops += [variables[tower][n].assign(copied[n]).op for n in others]
    return ops


# ---- checks --------------------------------------------------------------------------------------


def _check_each_is_once(
    variables: ReplicatedVariables, devices: Sequence[Any], names: Sequence[str]
) -> None:
    """Check that no row has a variable twice."""
    first: Dict[int, int] = {}  # number of each variable
    for tower, row in enumerate(variables):
        for n, var in enumerate(row):
            if first.setdefault(id(var), n) != n:
                raise HierAllreduceError(
                    f"{where(tower, devices, n, names)}: the variable is in this row twice, and two"
                    " mains would update it; add up its gradients, or use update='replicated'"
                )


def _check_uses_mains_only(
    kind: str, ops: Sequence[Any], variables: ReplicatedVariables, layout: Layout
) -> None:
    """Check that an update, with these ``ops``, reads and writes each variable on its main only."""
    used = used_by(ops)
    for n, main in layout.roots().items():
        for tower, row in enumerate(variables):
            name = row[n].op.name
            if tower != main and name in used:
                raise HierAllreduceError(
                    f"{kind}: the update uses {name!r} of {where(tower, layout.devices)}, and the"
                    f" variable's main is {where(main, layout.devices)}. Use the variables that"
                    " apply_gradients gets, or update='replicated'"
                )


def _check_slots_are_here(optimizers: Sequence[Any], view: Any, place: str) -> None:
    """Check that a variable has no slots on another device than its own."""
    slots = []
    for inner in optimizers:
        if not hasattr(inner, "_slots"):
            continue  # a wrapper that does not call its base's constructor
        slots += [inner.get_slot(view, name) for name in inner.get_slot_names()]
    for slot in slots:
        if slot is not None and slot.device != view.device:
            raise HierAllreduceError(
                f"{place}: this would be the variable's main, and an earlier apply_gradients made"
                f" its slots on {slot.device}; choose Strategy(main=0), or give each loss a"
                " TowerOptimizer with another optimizer"
            )


# ---- bytes on the mains --------------------------------------------------------------------------


class _Updates:
    """The bytes of variables that each device updates in one graph, over all updates at mains."""

    def __init__(self) -> None:
        self._bytes: Counter = Counter()  # by device
        self._loads: Dict[Any, Load] = {}  # by the ids of optimizer and variables

    def load(self, optimizer: Any, variables: Sequence[Any], devices: Sequence[Any]) -> Load:
        """Return the bytes of N variables, and of all earlier ones on each of K devices.

        An optimizer that updates the same variables again gets the same load, because their slots
        cannot move. It is known by its id, because its slots would keep the graph alive.
        """
        ids = tuple(map(id, variables))
        key = id(optimizer), ids, tuple(devices)
        if key not in self._loads:
            sizes = [var.dtype.size * (var.shape.num_elements() or 0) for var in variables]
            self._loads[key] = Load(sizes, [self._bytes[device] for device in devices])
        return self._loads[key]

    def add(self, layout: Layout, load: Load) -> None:
        """Count the variables of one more update."""
        for n, main in layout.roots().items():
            self._bytes[layout.devices[main]] += load.variables[n]


_updates: WeakKeyDictionary = WeakKeyDictionary()


def _updates_of_graph() -> _Updates:
    """Return the updates at mains of the graph that is being built."""
    updates: _Updates = _updates.setdefault(outer_graph(), _Updates())
    return updates
