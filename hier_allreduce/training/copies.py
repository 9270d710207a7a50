"""What the towers of a graph have copies of: it grows with each train op, and with variables created later.

::

    apply_gradients(rows of a loss)     ─►┐
    apply_gradients(rows of another)    ─►├─ Copies ─► init_op, broadcast_op, left_out, differences
    variables that exist when asked     ─►┘
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import tensorflow as tf

from ..errors import HierAllreduceError
from ..graph import outside_control_flow, tf1
from .replicas import Replicas, TowerUpdate, broadcast, differences, find_replicas, trained_places
from .variables import Pairs, all_variables, parse_slot_name, scopes_in
from .wrapped_optimizers import refuse_shared_state


def copies_in(graph: Any, devices: Tuple[Any, ...]) -> Copies:
    """Return the copies of the towers on these devices, as all optimizers of the graph know them."""
    # in the graph itself: a dictionary of graphs would keep it alive, as its variables refer to it
    by_devices: Dict[Any, Copies] = getattr(graph, "_hier_allreduce_copies", {})
    graph._hier_allreduce_copies = by_devices
    if devices not in by_devices:
        by_devices[devices] = Copies(graph, devices, by_devices)
    return by_devices[devices]


class Copies:
    """The copies of variables on K towers of one graph, and the ops that copy and compare them.

    Attributes:
        broadcast_op: copies tower 0's variables to the others.
        reset_op: resets the counters of all train ops.
        init_op: does both.
        differences: see :func:`.differences`; None until somebody compares the towers.
    """

    def __init__(self, graph: Any, devices: Tuple[Any, ...], by_devices: Mapping[Any, Copies]):
        self._graph, self._devices, self._by_devices = graph, devices, by_devices
        self._updates: List[TowerUpdate] = []
        self._counters: List[Any] = []
        self._seen: Any = None
        self._replicas = Replicas([], [])
        self._built_for: Any = None
        self.broadcast_op: Any = None
        self.reset_op: Any = None
        self.init_op: Any = None
        self.differences: Any = None

    def check(self, rows: Sequence[Pairs], once_a_step: Sequence[Any]) -> None:
        """Check that an update fits those that the graph has.

        Raises:
            HierAllreduceError: as :func:`.trained_places` and :func:`.refuse_shared_state`.
        """
        trained_places([*self._updates, TowerUpdate(rows)])
        refuse_shared_state(once_a_step, [held for update in self._all_updates() for held in update.once_a_step])

    def order_advice(self, rows: Sequence[Pairs]) -> str:
        """Say how to run a train op for K rows of pairs if an earlier one changes the same variables; else ""."""
        trained = {name for update in self._updates for name in _changed(update.rows)}
        again = [name for name in _changed(rows) if name in trained]
        if not again or len(rows) == 1:
            return ""
        others = f" and {len(again) - 1} more" if again[1:] else ""
        return (
            f"an earlier apply_gradients trains {again[0]!r}{others} too. If one step ran both train ops, the"
            " towers would apply them in different orders and diverge: run them in different steps, or call this"
            " apply_gradients inside `with tf.control_dependencies([the earlier train op]):`"
        )

    def add(self, update: TowerUpdate, counter: Optional[Any] = None, compare: bool = False) -> None:
        """Add an update, and the counter of its train op's runs if it has one; build the ops that need both."""
        self._updates.append(update)
        self._counters += [] if counter is None else [counter]
        self.build(compare)

    def replicas(self) -> Replicas:
        """Return the copies among the variables that exist now."""
        seen = [len(self._updates), *map(id, self._variables())]
        if seen != self._seen:
            self._seen, self._replicas = seen, self._find(self._updates)
        return self._replicas

    def replicas_of(self, update: TowerUpdate) -> Replicas:
        """Return the copies that one update may write while others run: not what they train and what belongs to it."""
        own = {var.op.name for row in update.rows for _, var in row}
        trained = own | {var.op.name for var in self._graph.get_collection(tf1.GraphKeys.TRAINABLE_VARIABLES)}
        names = [var.op.name for var in self._variables()]
        owners = [parse_slot_name(name, trained, scopes_in(name)) for name in names]
        return self._find([update], [name for name, parts in zip(names, owners) if parts and parts.variable not in own])

    def build(self, compare: bool = False) -> None:
        """Build the ops for all variables that exist now, unless they are there; those that compare only if asked once.

        Raises:
            HierAllreduceError: the graph is finalized.
        """
        replicas = self.replicas()
        wanted = [var.op.name for var in replicas.rows[0]], len(self._counters)
        is_new, compare = wanted != self._built_for, compare or self.differences is not None
        if not is_new and (self.differences is not None or not compare):
            return
        self._refuse_finalized(is_new)
        with self._graph.as_default(), outside_control_flow():
            if is_new:
                self._built_for, self.broadcast_op = wanted, broadcast(replicas, self._devices)
                self.reset_op = tf.group(*(counter.initializer for counter in self._counters))
                self.init_op = tf.group(self.broadcast_op, self.reset_op)
            if compare:
                self.differences = differences(replicas)

    def _refuse_finalized(self, is_new: bool) -> None:
        if self._graph.finalized and is_new:
            raise HierAllreduceError(
                "the graph is finalized, and variables created after apply_gradients need new ops that copy them; use"
                " TowerOptimizer.hook(), or read TowerOptimizer.init_op once the last variable is created"
            )
        if self._graph.finalized:
            raise HierAllreduceError(
                "the session's graph is finalized, and comparing the towers needs new ops; use"
                " TowerOptimizer(check_replicas_every=…), which adds them in apply_gradients"
            )

    def _find(self, updates: Sequence[TowerUpdate], without: Iterable[str] = ()) -> Replicas:
        steps, metrics = map(self._graph.get_collection, (tf1.GraphKeys.GLOBAL_STEP, tf1.GraphKeys.LOCAL_VARIABLES))
        single = [name for update in self._all_updates() for name in update.single]
        shared = {*without, *single, *(var.op.name for var in steps)}
        return find_replicas(updates, self._variables(), shared, {var.op.name for var in metrics})

    def _variables(self) -> List[Any]:
        with self._graph.as_default():
            return [*(var for update in self._updates for row in update.rows for _, var in row), *all_variables()]

    def _all_updates(self) -> List[TowerUpdate]:
        return [update for copies in self._by_devices.values() for update in copies._updates]


def _changed(rows: Sequence[Pairs]) -> List[str]:
    """Return the names of tower 0's variables that have a gradient."""
    columns = zip(*rows)
    return [column[0][1].op.name for column in columns if any(grad is not None for grad, _ in column)]
