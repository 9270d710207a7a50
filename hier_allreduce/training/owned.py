"""Updates on owners: one tower updates a variable for all of them.

::

    "once"       tower 0 owns all variables    reduce ─────────► apply_gradients ─► broadcast
    "sharded"    each root owns some           reduce-scatter ─► apply_gradients ─► all-gather

The optimizer is called once, so its state exists once, under the names of one device. With "once"
it sees what it would see there: tower 0's variables, the global step, all arguments. With "sharded"
the slots are spread over the towers.

Sources: Chainer's MultiprocessParallelUpdater, which reduces to the main GPU, updates there, and
broadcasts the parameters; ZeRO stage 1 (Rajbhandari and others, 2020).
"""

from __future__ import annotations

from collections import abc
from typing import Any, Dict, List, Set, Tuple

import tensorflow as tf

from ..compat import slots_in_any_scope, tf1
from ..errors import HierAllreduceError
from ..graph import all_gather, reduce, reduce_scatter
from ..graph.layout import Layout
from ..graphs import needed_by
from .replicas import columns_of, hold_owners
from .towers import Applied, Pairs, Towers, added_ops


def apply_once(
    optimizer: Any, towers: Towers, layout: Layout, arguments: Dict[str, Any]
) -> Applied:
    """Call any optimizer on tower 0, with all ``arguments`` of its ``apply_gradients``."""
    hold_owners(optimizer, towers, dict.fromkeys(range(len(towers.columns)), (0,)))
    grads = towers.transformed(0, reduce(towers.grads, layout, 0))
    with tf1.device(towers.devices[0]), towers.scope(0):
        ends, added = _called(optimizer, list(zip(grads, towers.variables[0])), arguments)
    return Applied(ends, added, [grads])


def apply_sharded(
    optimizer: Any, towers: Towers, layout: Layout, arguments: Dict[str, Any]
) -> Applied:
    """Update each variable on its root, by one of the ``KNOWN`` optimizers, and count the step.

    Roots have about equal bytes of this update.
    """
    variables, roots = towers.variables, layout.roots()
    hold_owners(optimizer, towers, {n: (root,) for n, root in roots.items()})
    # A transform may need all gradients of a tower, such as their norm.
    is_plain = towers.options.transform is None
    reduced = reduce_scatter(towers.grads, layout) if is_plain else towers.reduce(layout)
    pairs = []
    for n, on_tower_0 in enumerate(variables[0]):
        # Tower 0 updates what has no root, because a transform may return a gradient for it.
        root = roots.get(n, 0)
        # Slots have its names, because a checkpoint is to be that of one device.
        pairs.append((reduced[root][n], _named_like(on_tower_0, variables[root][n])))
    ends, added = _called(optimizer, pairs, arguments)
    return Applied(ends, added, reduced, roots, lambda values: all_gather(values, layout))


def _called(optimizer: Any, pairs: Pairs, arguments: Dict[str, Any]) -> Tuple[List[Any], Set[Any]]:
    """Call the optimizer; return what it returns, flat, and the ops that this needs."""
    with slots_in_any_scope(), added_ops() as added:
        updated = optimizer.apply_gradients(pairs, **arguments)
    if updated is None:
        name = type(optimizer).__name__
        raise HierAllreduceError(f"{name}.apply_gradients returned None, not the op of its update")
    ends: List[Any] = tf.nest.flatten(updated)
    # An op that no step runs, such as a reset, is left alone, because the user runs it. A function
    # runs all of its ops that have state, whatever the optimizer returns.
    if getattr(tf1.get_default_graph(), "_add_control_dependencies", False):
        ends += [op for op in added if op.op_def is not None and op.op_def.is_stateful]
    return ends, added & needed_by(getattr(end, "op", end) for end in ends)


def on_tower_0(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Return arguments with tower 0's variables for any tower's: a program knows all of them."""
    own_by_id: Dict[int, Any] = {}
    for column in columns_of():
        own_by_id.update(dict.fromkeys(map(id, column), column[0]))
    return {key: _on_tower_0(argument, own_by_id) for key, argument in arguments.items()}


def _on_tower_0(argument: Any, own_by_id: Dict[int, Any]) -> Any:
    """Return an argument, or a container of them, with tower 0's variables for any tower's."""
    if isinstance(argument, dict):
        items = argument.items()
        return {_on_tower_0(key, own_by_id): _on_tower_0(held, own_by_id) for key, held in items}
    # An iterator can be read once, so what it gives becomes a list.
    if isinstance(argument, (abc.Iterator, abc.KeysView, abc.ValuesView, abc.ItemsView)):
        argument = list(argument)
    if isinstance(argument, (list, tuple, set, frozenset)):
        make = getattr(argument, "_make", type(argument))  # of a namedtuple
        return make([_on_tower_0(member, own_by_id) for member in argument])
    return own_by_id.get(id(argument), argument)


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
