"""An optimizer for tower code: all-reduce, update and broadcast in one train op, without tensorpack."""

from __future__ import annotations

import logging
import warnings
import weakref
from typing import Any, List, Optional, Sequence, Set, Union

import tensorflow as tf

from ..errors import VariableError
from ..graph import (
    allreduce_grads_and_vars,
    as_written,
    device_strings,
    is_for_a_session,
    pairs_of,
    tf1,
    unconditionally,
)
from ..planning import Strategy, strategy_from
from .replicas import Drift, Replicas, broadcast, check_period, differences, drift, find_replicas, made_alike
from .updates import (
    Pairs,
    Updated,
    all_variables,
    check_update,
    check_variables,
    owned,
    refuse_unfit,
    refuse_wrapper,
    sum_advice,
    update_at_mains,
    update_replicated,
)

_log = logging.getLogger("hier_allreduce")
# of each graph, the names of what an optimizer has once for all towers: no other optimizer is to miss it on some
_exist_once: weakref.WeakKeyDictionary[Any, Set[str]] = weakref.WeakKeyDictionary()


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

    ``MonitoredTrainingSession(hooks=[optimizer.hook()])`` runs ``init_op`` by itself, on one host.

    Attributes:
        devices: the K devices.
        init_op: run it after the variables have their values: copies tower 0's to the other towers (unless
            ``broadcast_every`` is -1), but for local ones such as metrics. What else is to differ, the state of a
            ``tf.random.Generator``, belongs outside of the towers' scopes. There once ``apply_gradients`` was called.
        broadcast_op: copies tower 0's variables to the others.
        left_out: names of variables that only some towers have, which nothing keeps equal.
        last_drift: what the hook's last look at the towers found.
    """

    def __init__(
        self,
        optimizer: Any,
        devices: Sequence[Any],
        average: bool = True,
        strategy: Union[str, Strategy, None] = None,
        update: str = "replicated",
        broadcast_every: int = 0,
        check_replicas_every: int = 0,
        cluster: Any = None,
    ):
        """Check the choices; nothing is built yet.

        Args:
            optimizer: a ``tf.compat.v1.train.Optimizer``. It is called once for each tower, with ``update="main"`` only
                once, and is not given the global step.
            devices: K devices, as in :func:`hier_allreduce.allreduce_grads`.
            average: the mean of the gradients, or their sum (with a warning on what to change in ``optimizer``).
            strategy: how to reduce.
            update: ``"replicated"``: every tower updates its variables; ``"main"``: each variable's main does, once,
                and copies the new value to the others. The second keeps optimizer slots once instead of K times:
                under the names of tower 0's, so that a ``Saver`` of them reads on any number of towers what one has
                written; but they are not the optimizer's slots of tower 0's variables, which ``tf.train.Checkpoint``
                would look for.
            broadcast_every: copy tower 0's variables (weights, slots, moving averages) to the others every so
                many steps; 0: at the start only; -1: never.
            check_replicas_every: let the hook look for differences between towers every so many steps; 0: never.
            cluster: the :class:`hier_allreduce.Cluster` of several hosts with K towers each: the gradients are those of
                all. Run ``cluster.broadcast(tf.compat.v1.global_variables())`` on all hosts before ``init_op``, which
                copies inside this host.

        Raises:
            DeviceError: something in ``devices`` is not a device.
            StrategyError: a choice that does not exist.
            VariableError: ``optimizer`` is no v1 optimizer, cannot run on each variable's main only, or is tensorpack's
                ``AccumGradOptimizer``.
        """
        if not isinstance(optimizer, tf1.train.Optimizer):
            raise VariableError(
                f"optimizer={optimizer!r}: expected a tf.compat.v1.train.Optimizer, such as"
                " tf.compat.v1.train.AdamOptimizer(1e-3)"
            )
        self._hosts = cluster.size if cluster else 1
        self._strategy = strategy_from(strategy).for_optimizers(self._hosts)
        if check_update(update, self._strategy) == "main":
            refuse_wrapper(optimizer)
        refuse_unfit(optimizer)
        self.devices = device_strings(devices)
        self.init_op: Any = None
        self.broadcast_op: Any = None
        self.left_out: List[str] = []
        self.last_drift: Optional[Drift] = None
        self._optimizer, self._average, self._update = optimizer, average, update
        self._broadcast_every = check_period("broadcast_every", broadcast_every, never=-1)
        self._check_every = check_period("check_replicas_every", check_replicas_every)
        self._cluster = cluster
        self._replicas = Replicas([], [])
        self._differences: Any = None

    @as_written
    def compute_gradients(self, *args: Any, **kwargs: Any) -> List[Any]:
        """The optimizer's own ``compute_gradients``, for one tower: N (gradient, variable) pairs."""
        return list(self._optimizer.compute_gradients(*args, **kwargs))

    @as_written
    def apply_gradients(
        self, tower_grads_and_vars: Sequence[Pairs], global_step: Any = None, name: Optional[str] = None
    ) -> Any:
        """Reduce, update every tower, count the step, and broadcast when it is time.

        Args:
            tower_grads_and_vars: K×N (gradient, variable) pairs, each tower with its own variables. A variable without
                a gradient on any tower is left alone.
            global_step: a variable to add 1 to, once.
            name: of the op.

        Returns:
            One train op.

        Raises:
            GradientError: the rows do not match the devices or each other, or name variables that others lack.
            VariableError: a variable is shared between towers, differs between them, does not fit its gradient, or is a
                reference variable; or there is no graph.
        """
        if not is_for_a_session():
            raise VariableError(
                "a TowerOptimizer builds the train op of a graph: call tf.compat.v1.disable_eager_execution() first, or"
                " build inside `with tf.Graph().as_default():`; eagerly and in a tf.function, use"
                " hier_allreduce.allreduce_grads"
            )
        rows = pairs_of(tower_grads_and_vars, self.devices)
        check_variables(rows, self.devices)
        summed = len(self.devices) * self._hosts
        if not self._average and summed > 1:
            warnings.warn(sum_advice(self._optimizer, summed), stacklevel=3)  # as_written is in between
        before, metrics = all_variables(), tf1.local_variables()
        updated = self._updated(rows)
        with unconditionally():  # the step may be in a tf.cond
            self._find_replicas(rows, before, metrics, updated)
        ops = [tf.group(*updated.ops)]
        with tf.control_dependencies(ops):
            ops = ops if global_step is None else [tf1.assign_add(global_step, 1).op]
        counter = self._counter()
        with tf.control_dependencies(ops):
            if counter is not None:
                now = tf.equal(counter.assign_add(1, read_value=True) % self._broadcast_every, 0)
                ops = [tf.cond(now, lambda: broadcast(self._replicas, self.devices), tf.no_op)]
        return tf.group(*ops, name=name or "train_op")

    def hook(self) -> Any:
        """A ``SessionRunHook`` that runs ``init_op`` and looks for differences between towers.

        With a cluster of several hosts it refuses sessions that are not the cluster's, with a ``ClusterError``.
        """
        return _Hook(self)

    def check_replicas(self, session: Any) -> Drift:
        """The largest difference between this host's towers now; print it.

        Raises:
            VariableError: ``apply_gradients`` was not called, or this would add ops to a finalized graph.
        """
        self._refuse_unbuilt()
        if self._differences is None:
            if session.graph.finalized:
                raise VariableError(
                    "the session's graph is finalized, and comparing the towers needs new ops; give"
                    " TowerOptimizer(check_replicas_every=…), which adds them in apply_gradients"
                )
            with session.graph.as_default():
                self._differences = differences(self._replicas)
        return drift(self._replicas, session.run(self._differences), self._hosts)

    def _updated(self, rows: Sequence[Pairs]) -> Updated:
        if self._update == "main":
            return update_at_mains(
                self._optimizer, rows, self.devices, self._average, self._strategy, cluster=self._cluster
            )
        reduced = allreduce_grads_and_vars(
            rows, self.devices, self._average, strategy=self._strategy, cluster=self._cluster
        )
        return update_replicated(self._optimizer, reduced, self.devices)

    def _find_replicas(
        self, rows: Sequence[Pairs], before: Sequence[Any], metrics: Sequence[Any], updated: Updated
    ) -> None:
        """Find what must agree between towers, and build the ops that see to it."""
        scope, trained = tf1.get_variable_scope().name, {var.op.name for row in rows for _, var in row}
        created = [var for own in updated.created for var in own]
        loose = [[var for var in own if not owned(var.op.name, trained, scope)] for own in updated.created]
        alike = made_alike(loose) if self._update == "replicated" else []
        copies = {id(var) for row in alike for var in row}
        # at the mains all of it is there once; on every tower what is no variable's slot, nor made by every update
        single = created if self._update == "main" else [var for own in loose for var in own if id(var) not in copies]
        once = _exist_once.setdefault(tf1.get_default_graph(), set())
        once.update(var.op.name for var in single)
        everything = [*(var for row in rows for _, var in row), *before, *created]
        shared = [var for var in everything if var.op.name in once] + tf1.get_collection(tf1.GraphKeys.GLOBAL_STEP)
        self._replicas = find_replicas(rows, everything, shared, alike, scope, private=metrics)
        self.left_out = self._replicas.left_out
        self.broadcast_op = broadcast(self._replicas, self.devices)
        self.init_op = self.broadcast_op if self._broadcast_every >= 0 else tf.no_op()
        self._differences = differences(self._replicas) if self._check_every else None

    def _counter(self) -> Any:
        """How many steps were made; in no collection, so that no saver takes it for a part of the model."""
        if self._broadcast_every < 1:
            return None
        with unconditionally():
            counter = tf1.Variable(
                0, trainable=False, collections=[], name="steps_since_init_op", dtype=tf.int64, use_resource=True
            )
            self.init_op = tf.group(self.init_op, counter.initializer)
        return counter

    def _refuse_unbuilt(self) -> None:
        if self.init_op is None:
            raise VariableError("call apply_gradients first: what to initialise and compare is known only then")


class _Hook(tf1.train.SessionRunHook):
    """Runs ``init_op`` in every new session, and reports differences between towers to the log."""

    def __init__(self, owner: TowerOptimizer):
        self._owner, self._steps = owner, 0

    def begin(self) -> None:
        self._owner._refuse_unbuilt()

    def after_create_session(self, session: Any, coord: Any) -> None:
        if self._owner._cluster:
            self._owner._cluster.check_session(session)
        session.run(self._owner.init_op)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._steps += 1
        if self._owner._check_every and self._steps % self._owner._check_every == 0:
            found = self._owner.last_drift = self._owner.check_replicas(run_context.session)
            _log.log(logging.WARNING if found.difference else logging.INFO, "step %d: %s", self._steps, found)
