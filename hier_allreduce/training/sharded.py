"""``update="sharded"``: each variable's root updates it for all towers, and has its slots.

::

    K×N gradients ─► sums on roots ─► each root: its variables' update ─► new values to all towers

Slots exist once, spread over the towers, under tower 0's names, so that checkpoints are those of
one device. Source: ZeRO stage 1 (Rajbhandari and others, 2020).
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Dict, List, Sequence, Tuple
from weakref import WeakKeyDictionary

import tensorflow as tf

from ..compat import outer_graph
from ..errors import HierAllreduceError
from ..graph import all_gather
from ..graph.layout import Layout
from ..planning.chunks import OwnedBytes
from .towers import ReplicatedVariables, Towers, check_slots, ops_of_update, warn_of_moved_updates


def update_sharded(optimizer: Any, towers: Towers) -> Tuple[Any, ReplicatedVariables]:
    """Update each variable on its root, by one of the ``KNOWN`` optimizers, and copy it.

    Roots have about equal bytes, also if a graph has several such updates. Returns the op, and the
    replicas: the variables.

    Raises:
        HierAllreduceError: a variable is in its row twice, or has slots on another tower; or the
            transform gives one a gradient that has none on any tower.
    """
    variables = towers.variables
    _check_each_is_once(towers)
    # Updates of one graph share its devices, so each one counts the bytes of those before it.
    shards: _Shards = _shards_by_graph.setdefault(outer_graph(), _Shards())
    load = shards.load(optimizer, variables[0], towers.devices)
    layout = towers.lay_out(load)
    roots = layout.roots()
    # Slots have the names of tower 0, because a checkpoint is to be that of one device.
    named = {n: _named_like(variables[0][n], variables[root][n]) for n, root in roots.items()}
    for n, root in roots.items():
        check_slots(optimizer, {n: named[n]}, root, towers.devices)
    shards.add(layout, load)

    reduced = towers.reduce_to_roots(layout)
    _check_have_roots(reduced, roots, towers)
    reads = towers.reads(reduced)
    pairs = [(reduced[root][n], named[n]) for n, root in sorted(roots.items())]
    with ops_of_update() as added:
        updated = optimizer.apply_gradients(pairs)
    # A root writes its own variable, while gradients on it may still read the old value.
    on_roots = [variables[root][n] for n, root in roots.items()]
    reads.hold_writes(on_roots, added)
    warn_of_moved_updates(optimizer, on_roots, added)

    # A value leaves its root once it is written, with the others of its chunk.
    new_values: List[Any] = [None] * len(layout.columns)
    for n, root in roots.items():
        new_values[n] = reads.new_value(variables[root][n], towers.devices[root], added, [updated])
    copied = all_gather(new_values, layout)
    columns = list(zip(*variables))
    assigned = reads.assign_copies(columns, roots, copied, towers.devices)
    return tf.group(updated, *assigned), variables


def _check_each_is_once(towers: Towers) -> None:
    """Check that no row has a variable twice."""
    for tower, variables in enumerate(towers.variables):
        place_by_id: Dict[int, int] = {}
        for n, var in enumerate(variables):
            if place_by_id.setdefault(id(var), n) != n:
                raise HierAllreduceError(
                    f"{towers.place(tower, n)}: the variable is in this row twice, and two roots"
                    " would update it; add up its gradients, or use update='replicated'"
                )


def _check_have_roots(
    reduced: Sequence[Sequence[Any]], roots: Dict[int, int], towers: Towers
) -> None:
    """Check that each variable whose gradient a transform returned has a root to update it."""
    for tower, grads in enumerate(reduced):
        for n, grad in enumerate(grads):
            if grad is not None and n not in roots:
                raise HierAllreduceError(
                    f"{towers.place(tower, n)}: transform returned a gradient, but no tower has one"
                    " to reduce, so the variable has no root that would update it; return None for"
                    " it, or use update='replicated'"
                )


# ---- names of slots ------------------------------------------------------------------------------

_named_by_class: Dict[Any, Any] = {}  # classes that TensorFlow takes for a variable's class


class _Named:
    """A variable under the names of its copy on tower 0, by which TensorFlow names its slots."""

    _tower_0: Any

    @property
    def name(self) -> Any:
        return self._tower_0.name

    @property
    def op(self) -> Any:
        return self._tower_0.op

    @property
    def _shared_name(self) -> Any:
        return self._tower_0._shared_name


def _named_like(tower_0: Any, var: Any) -> Any:
    """Return ``var`` under the names of its copy on tower 0."""
    variable_class: Any = type(var)
    if variable_class not in _named_by_class:
        bases = (_Named, variable_class)
        _named_by_class[variable_class] = type(f"Named{variable_class.__name__}", bases, {})
    # No constructor is called, because it would add a variable to the graph.
    named: Any = object.__new__(_named_by_class[variable_class])
    vars(named).update(vars(var), _tower_0=tower_0, _save_slice_info=tower_0._save_slice_info)
    return named


# ---- bytes on the roots --------------------------------------------------------------------------


class _Shards:
    """The bytes of variables that each device updates in one graph, over all sharded updates."""

    def __init__(self) -> None:
        self._bytes_by_device: Counter = Counter()
        self._loads: Dict[Any, OwnedBytes] = {}  # by the ids of optimizer and variables

    def load(self, optimizer: Any, variables: Sequence[Any], devices: Sequence[Any]) -> OwnedBytes:
        """Return the bytes of N variables, and of all earlier ones on each of K devices.

        An optimizer that updates the same variables again gets the same load, because their slots
        cannot move. It is known by its id, because its slots would keep the graph alive.
        """
        ids = tuple(map(id, variables))
        key = id(optimizer), ids, tuple(devices)
        if key not in self._loads:
            sizes = [var.dtype.size * (var.shape.num_elements() or 0) for var in variables]
            self._loads[key] = OwnedBytes(
                sizes, [self._bytes_by_device[device] for device in devices]
            )
        return self._loads[key]

    def add(self, layout: Layout, load: OwnedBytes) -> None:
        """Count the variables of one more update."""
        for n, root in layout.roots().items():
            self._bytes_by_device[layout.devices[root]] += load.variables[n]


_shards_by_graph: WeakKeyDictionary = WeakKeyDictionary()
