"""An optimizer for tower code: all-reduce, update and broadcast in one train op, without tensorpack."""

from __future__ import annotations

import logging
import warnings
from typing import Any, Dict, List, Optional, Sequence, Union

import tensorflow as tf

from ..errors import HierAllreduceError
from ..graph import (
    HostGroup,
    Lane,
    allreduce_grads_and_vars,
    builds_for_session,
    check_pairs,
    device_strings,
    outside_control_flow,
    places_of,
    tf1,
    without_autograph,
)
from ..planning import Strategy, strategy_from
from .copies import Copies, copies_in
from .main_update import update_at_mains
from .replicas import Drift, TowerUpdate, broadcast, drift, match_created
from .replicated_update import update_replicated
from .updates import Updated, UpdateOptions
from .variables import Pairs, check_variables, parse_slot_name
from .wrapped_optimizers import optimizers_with_finish, refuse_unfit, refuse_wrapper, sum_advice

_log = logging.getLogger("hier_allreduce")


class TowerOptimizer:
    """One optimizer for K towers, each with its own copy of the model.

    ::

        optimizer = hier_allreduce.TowerOptimizer(tf.compat.v1.train.AdamOptimizer(1e-3), ["/gpu:0", "/gpu:1"])
        rows = []
        for k, device in enumerate(["/gpu:0", "/gpu:1"]):
            with tf.device(device), tf.compat.v1.variable_scope(f"tower{k}"):
                loss = model(batches[k])
                rows.append(optimizer.compute_gradients(loss, var_list=…))
        train_op = optimizer.apply_gradients(rows)

        session.run(tf.compat.v1.global_variables_initializer())   # or restore a checkpoint
        session.run(optimizer.init_op)

    On one host, ``MonitoredTrainingSession(hooks=[optimizer.hook()])`` runs ``init_op`` by itself.

    With several losses, call ``apply_gradients`` for each. ``init_op``, ``broadcast_op``, ``left_out`` and
    ``check_replicas`` cover the variables of all calls in the graph, also those of other ``TowerOptimizer`` objects on
    the same devices, and variables created later, such as moving averages. Read them when all of these exist.

    Attributes:
        devices: the K devices.
        last_drift: the result of the hook's last comparison of the towers.
    """

    def __init__(
        self,
        optimizer: Any,
        devices: Sequence[Any],
        average: bool = True,
        strategy: Union[str, Strategy, None] = None,
        update: str = "replicated",
        broadcast: Union[str, int] = "start",
        check_replicas_every: int = 0,
        cluster: Optional[HostGroup] = None,
        lanes: Sequence[Lane] = (),
    ):
        """Check the options. This adds no ops.

        Args:
            optimizer: a ``tf.compat.v1.train.Optimizer``. It is called once for each tower, with ``update="main"`` only
                once, and does not get the global step.
            devices: K devices, as in :func:`hier_allreduce.allreduce_grads`.
            average, strategy, update, broadcast, check_replicas_every: see
                :class:`hier_allreduce.training.UpdateOptions`. ``strategy`` may also be the name or path of a YAML
                file. With ``update="main"`` the slots have the names of tower 0's slots, so that a ``Saver`` restores
                them on any number of towers from a checkpoint of one. They are not the optimizer's slots of tower 0's
                variables, which ``tf.train.Checkpoint`` would look for. The hook makes the comparisons of towers.
            cluster: the :class:`hier_allreduce.Cluster` of several hosts with K towers each. The gradients of all of
                them are reduced. Run ``cluster.broadcast(tf.compat.v1.global_variables())`` on all hosts before
                ``init_op``, which copies inside this host only.
            lanes: further devices over which gradients travel, as in :func:`hier_allreduce.allreduce_grads`.
                Variables and updates stay on ``devices``.

        Raises:
            HierAllreduceError: an entry of ``devices`` or ``lanes`` is not a valid device, or they are not distinct; or
                ``average`` is not a bool; or another option is invalid; or ``optimizer`` is not a v1 optimizer, cannot
                run on each variable's main only, or is tensorpack's ``AccumGradOptimizer``.
        """
        if not isinstance(optimizer, tf1.train.Optimizer):
            raise HierAllreduceError(
                f"optimizer={optimizer!r}: expected a tf.compat.v1.train.Optimizer, such as"
                " tf.compat.v1.train.AdamOptimizer(1e-3)"
            )
        self._hosts = cluster.size if cluster else 1
        strategy = strategy_from(strategy).for_optimizers(self._hosts)
        self._options = UpdateOptions(average, strategy, update, broadcast, check_replicas_every)
        if update == "main":
            refuse_wrapper(optimizer)
        refuse_unfit(optimizer)
        self.devices = device_strings(devices)
        self._lanes = places_of(self.devices, lanes).lanes
        self.last_drift: Optional[Drift] = None
        self._optimizer, self._cluster = optimizer, cluster
        self._copies: Optional[Copies] = None

    @property
    def init_op(self) -> Any:
        """Copies tower 0's variables to the other towers, unless ``broadcast`` is ``"never"``.

        Run it once the variables have their values. Variables that are local on tower 0, such as metrics, are not
        copied. Others that have to differ, such as the state of a ``tf.random.Generator``, belong outside the towers'
        scopes.

        Raises:
            HierAllreduceError: ``apply_gradients`` was not called, or variables were created since and the graph is
                finalized.
        """
        copies = self._built()
        return copies.init_op if self._options.broadcast != "never" else copies.reset_op

    @property
    def broadcast_op(self) -> Any:
        """Copies tower 0's variables to the others; errors as ``init_op``."""
        return self._built().broadcast_op

    @property
    def left_out(self) -> List[str]:
        """Names of variables that nothing keeps equal, since no copy of them was found on every tower.

        Copies have the same name within each tower's own scope; trained variables are found by their place in the rows.
        """
        return self._known().replicas().left_out

    @without_autograph
    def compute_gradients(self, *args: Any, **kwargs: Any) -> List[Any]:
        """Return one tower's N (gradient, variable) pairs: the optimizer's own ``compute_gradients``."""
        return list(self._optimizer.compute_gradients(*args, **kwargs))

    @without_autograph
    def apply_gradients(
        self, tower_grads_and_vars: Sequence[Pairs], global_step: Any = None, name: Optional[str] = None
    ) -> Any:
        """Build the train op: reduce, update every tower, count the step, and broadcast when it is due.

        Args:
            tower_grads_and_vars: K×N (gradient, variable) pairs, each tower with its own variables. A variable without
                a gradient on any tower is left alone.
            global_step: a variable to add 1 to, once a step.
            name: the name of the op.

        Returns:
            One train op.

        Raises:
            HierAllreduceError: the rows do not match the devices or each other, or name variables that others lack; or
                a variable is shared between towers, differs between them, does not fit its gradient, or is a reference
                variable; an earlier call had other copies of it, or an optimizer with work to do once a step, such as
                Adam, of which all towers read the state; or there is no graph to build in.
        """
        if not builds_for_session():
            raise HierAllreduceError(
                "a TowerOptimizer builds the train op of a graph: call tf.compat.v1.disable_eager_execution() first, or"
                " build inside `with tf.Graph().as_default():`; eagerly and in a tf.function, use"
                " hier_allreduce.allreduce_grads"
            )
        rows = check_pairs(tower_grads_and_vars, self.devices)
        check_variables(rows, self.devices)
        with outside_control_flow():  # apply_gradients may be called in a tf.cond
            copies = copies_in(tf1.get_default_graph(), self.devices)
        copies.check(rows, self._once_a_step())
        summed = len(self.devices) * self._hosts
        if not self._options.average and summed > 1:
            warnings.warn(sum_advice(self._optimizer, summed), stacklevel=3)  # without_autograph is in between
        if copies.order_advice(rows):
            warnings.warn(copies.order_advice(rows), stacklevel=3)
        updated, self._copies = self._updated(rows), copies
        with outside_control_flow():
            update, counter = self._sorted(rows, updated), self._new_counter()
            copies.add(update, counter, self._options.check_replicas_every > 0)
        ops = [tf.group(*updated.ops)]
        with tf.control_dependencies(ops):
            ops = ops if global_step is None else [tf1.assign_add(global_step, 1).op]
        if counter is not None:
            own = copies.replicas_of(update)
            with tf.control_dependencies(ops):
                is_due = tf.equal(counter.assign_add(1, read_value=True) % self._options.broadcast_steps, 0)
                ops = [tf.cond(is_due, lambda: broadcast(own, self.devices), tf.no_op)]
        return tf.group(*ops, name=name or "train_op")

    def hook(self) -> Any:
        """Return a ``SessionRunHook`` that runs ``init_op`` and compares the towers.

        With a cluster of several hosts, the hook raises a ``ClusterError`` for a session that is not the cluster's.
        """
        return _Hook(self)

    def check_replicas(self, session: Any) -> Drift:
        """Return the largest difference between this host's towers now; ``print`` shows it as a sentence.

        Raises:
            HierAllreduceError: ``apply_gradients`` was not called, or this would add ops to a finalized graph.
        """
        copies = self._built(compare=True)
        return drift(copies.replicas(), session.run(copies.differences), self._hosts)

    def _updated(self, rows: Sequence[Pairs]) -> Updated:
        average, strategy = self._options.average, self._options.strategy
        where: Dict[str, Any] = {"cluster": self._cluster, "lanes": self._lanes}
        if self._options.update == "main":
            return update_at_mains(self._optimizer, rows, self.devices, average, strategy, **where)
        reduced = allreduce_grads_and_vars(rows, self.devices, average, strategy=strategy, **where)
        return update_replicated(self._optimizer, reduced, self.devices)

    def _once_a_step(self) -> List[Any]:
        """Return the optimizers that change, once a step, what the updates of several towers read."""
        is_read = self._options.update == "replicated" and len(self.devices) > 1
        return optimizers_with_finish(self._optimizer) if is_read else []

    def _sorted(self, rows: Sequence[Pairs], updated: Updated) -> TowerUpdate:
        """Sort what the update created, except for slots: K rows of copies, and what exists once."""
        scope = tf1.get_variable_scope().name
        if self._options.update == "main":
            return TowerUpdate(rows, single=[var.op.name for var in updated.created[0]], scope=scope)
        trained = {var.op.name for row in rows for _, var in row}
        others = [
            [var for var in variables if not parse_slot_name(var.op.name, trained, ("", f"{scope}/"))]
            for variables in updated.created
        ]
        alike = match_created(others)
        matched = {id(var) for row in alike for var in row}
        single = [var.op.name for variables in others for var in variables if id(var) not in matched]
        return TowerUpdate(rows, alike, single, scope, self._once_a_step())

    def _new_counter(self) -> Any:
        """Create the counter of a train op's runs since ``init_op``, which resets it; None if nothing depends on it."""
        if not self._options.broadcast_steps:
            return None
        # in no collection, so that no saver takes it for a part of the model
        return tf1.Variable(
            0, trainable=False, collections=[], name="steps_since_init_op", dtype=tf.int64, use_resource=True
        )

    def _known(self) -> Copies:
        if self._copies is None:
            raise HierAllreduceError(
                "call apply_gradients first: which variables to initialize and compare is known only afterwards"
            )
        return self._copies

    def _built(self, compare: bool = False) -> Copies:
        """Return the copies, with the ops for all variables that exist now."""
        copies = self._known()
        copies.build(compare)
        return copies


class _Hook(tf1.train.SessionRunHook):
    """Runs ``init_op`` in every new session, and logs differences between towers."""

    def __init__(self, owner: TowerOptimizer):
        self._owner, self._steps = owner, 0
        self._check_every = owner._options.check_replicas_every

    def begin(self) -> None:
        self._owner._built(compare=self._check_every > 0)

    def after_create_session(self, session: Any, coord: Any) -> None:
        if self._owner._cluster:
            self._owner._cluster.check_session(session)
        session.run(self._owner.init_op)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._steps += 1
        if self._check_every and self._steps % self._check_every == 0:
            largest = self._owner.last_drift = self._owner.check_replicas(run_context.session)
            _log.log(logging.WARNING if largest.difference else logging.INFO, "step %d: %s", self._steps, largest)
