"""The trainer: tensorpack's replicated training with this package's all-reduce and updates."""

from __future__ import annotations

import warnings
from typing import Any, Callable, List, Optional, Sequence, Union

import tensorflow as tf
from tensorpack.callbacks import Callback, PeriodicTrigger, RunOp
from tensorpack.graph_builder.training import DataParallelBuilder, SyncMultiGPUReplicatedBuilder
from tensorpack.graph_builder.utils import override_to_local_variable
from tensorpack.input_source import FeedfreeInput, FeedInput, QueueInput, StagingInput
from tensorpack.tfutils.sesscreate import NewSessionCreator
from tensorpack.train import SingleCostTrainer
from tensorpack.utils import logger

from ... import presets
from ...errors import HierAllreduceError
from ...graph import (
    HostGroup,
    Lane,
    allreduce_grads,
    allreduce_grads_and_vars,
    check_pairs,
    lane_memory_in,
    tf1,
)
from ...logical import fitted, lane_numbers
from ...planning import Strategy, strategy_from
from ...training import (
    Pairs,
    Replicas,
    TowerUpdate,
    Updated,
    UpdateOptions,
    all_variables,
    differences,
    drift,
    find_replicas,
    match_created,
    parse_slot_name,
    refuse_unfit,
    sum_advice,
    update_at_mains,
    update_replicated,
)
from .accumulation import with_ordered_accumulation
from .devices import (
    CheckedSessionCreator,
    config_for_towers,
    creator_for_towers,
    named_devices,
    refuse_missing_in,
    tower_devices,
)
from .variable_names import inside_wrappers, refuse_tower_names, under_tower_0s_names, with_missing_pairs

_FIELDS = {
    "devices": presets.Field(required="how many GPUs, or a list of devices"),
    **dict.fromkeys(
        ["average", "strategy", "update", "broadcast", "check_replicas_every", "lanes_per_gpu"], presets.Field()
    ),
}

_CHANGES = {key: presets.Field() for key in _FIELDS}  # of a file that is complete, none is required


class HierarchicalTrainer(SingleCostTrainer):
    """tensorpack's ``SyncMultiGPUTrainerReplicated`` with the hierarchical all-reduce, on K ≥ 1 devices.

    Every device holds a whole copy of the model: a *tower*. Names are tensorpack's own, so that either trainer reads
    the other's checkpoints: tower 0's variables have no prefix and are saved, the others are called ``towerK/…`` and
    are local.

    ::

        tower 0 on devices[0]        tower 1 on devices[1]
        loss → gradients g0          loss → gradients g1
              └───────── all-reduce ─────────┘
        optimizer (g0+g1)/2 → W      optimizer (g0+g1)/2 → tower1/W

    It differs from tensorpack's trainer where that one goes wrong:

    - K towers share one optimizer. Its once-a-step work (Adam: advancing its beta powers) is done once a step instead
      of K times. So Adam is Adam, and the towers stay equal.
    - ``AccumGradOptimizer`` applies its sum at exactly every k-th step, in all towers.
    - Gradient processors that match variables by name, and the function of ``PostProcessOptimizer``, see tower 0's
      names in every tower: what ``ScaleGradient(("hidden/.*", 0.))`` freezes is frozen in all towers. If they keep
      state in a variable named after the one that they get, all towers would share and change it. That is refused; use
      ``update="main"``, which calls them once.
    - Sparse gradients (embeddings) stay sparse, with a row for each lookup. Processors that clip or measure gradients
      see these rows before they are added up, unless the strategy is ``Strategy(sparse="dense")``.
    - The session gets a thread for every tower, because tensorpack's staging of inputs blocks one thread for each.

    Models should use resource variables. A reference variable, TensorFlow 1.15's default, can be updated while a
    gradient still reads it. If several towers train one, a warning says so; ``update="main"`` refuses them.

    Attributes:
        devices: K strings, the device of each tower. With lanes on GPUs these are logical GPUs, with TensorFlow's
            numbers: on TensorFlow 1.15, tower 1 of 3 lanes is ``/gpu:4``.
        lanes: the lanes of all towers; empty by default.
        grads: K×N (gradient, variable) pairs once the graph is set up. They are the reduced gradients; with
            ``update="main"``, where only the main has a reduced gradient, those before the all-reduce.
        BROADCAST_EVERY_EPOCH: copy tower 0's variables (optimizer slots too) to the other towers also at the end of
            every epoch. Needed if towers have variables that are not trained, such as batch normalization's moving
            averages.
    """

    BROADCAST_EVERY_EPOCH = True
    cluster: Optional[HostGroup] = None  # of several hosts: see integrations.cluster

    def __init__(
        self,
        devices: Any,
        average: bool = True,
        strategy: Union[str, Strategy, None] = None,
        update: str = "replicated",
        broadcast: Union[str, int] = "start",
        check_replicas_every: int = 0,
        lanes_per_gpu: int = 0,
    ):
        """Check the options. This adds no ops to the current graph.

        Args:
            devices: the number of GPUs, or a list of GPU ids or TensorFlow device strings, one for each tower.
                CPU devices are created as needed, so ``["/cpu:0", …, "/cpu:7"]`` works on any machine.
            average, strategy, update, broadcast, check_replicas_every: see
                :class:`hier_allreduce.training.UpdateOptions`. ``strategy`` may also be a name or path, as in
                :func:`hier_allreduce.allreduce_grads`; by default it is ``"hierarchical"``. Checkpoints are the same
                with either ``update``. Comparisons report ``replica_drift`` to the monitors and the variable to the
                log. They include trained variables and their slots. They exclude moving averages, which tensorpack
                updates on tower 0 only.
            lanes_per_gpu: the number of lanes of each tower: logical GPUs over which gradients travel, several out of
                one GPU at a time. The session gets them, with the memory that the all-reduce needs. CPU towers get CPU
                devices as lanes. See docs/lanes.md.

        Raises:
            HierAllreduceError: ``devices`` cannot be read. A device that does not exist is refused when training
                starts, before its session does; or an invalid option, or groups that miss or repeat a tower; or
                ``average`` is not a bool.
        """
        self.devices = tower_devices(devices)
        self._logical = lane_numbers(self.devices, lanes_per_gpu) if lanes_per_gpu else None
        self.lanes: Sequence[Lane] = ()
        if self._logical:
            self.devices, self.lanes = list(self._logical.devices), self._logical.lanes
        # hierarchical as the trainer's name says, on CPU devices too
        strategy = strategy_from("hierarchical" if strategy is None else strategy)
        self._options = UpdateOptions(average, strategy, update, broadcast, check_replicas_every)
        with tf.Graph().as_default():  # a dry run, to raise errors here and not when training starts
            values = [[tf.constant(0.0)]] * len(self.devices)
            allreduce_grads(values, self.devices, average, strategy=strategy, lanes=self.lanes)
        super().__init__()

    @classmethod
    def from_config(cls, name_or_path: str, **changes: Any) -> HierarchicalTrainer:
        """Return the trainer described by ``configs/trainers/NAME.yaml`` or by the YAML file at a path.

        The keys are arguments of the constructor; ``strategy`` is a name, a path, or a mapping of a strategy's keys.

        Args:
            name_or_path: the file.
            changes: keys with other values than the file's: ``from_config("chainer", devices=4)``.

        Raises:
            HierAllreduceError: no such file or name, or an unknown key (the message suggests the nearest one); or
                ``devices`` cannot be read.
        """
        path, values = presets.load("trainers", name_or_path, _FIELDS)
        if isinstance(values.get("strategy"), dict):
            values["strategy"] = Strategy.from_values(values["strategy"], str(path))
        return cls(**{**values, **presets.check(changes, _CHANGES, "from_config")})

    def setup_graph(self, input_signature: Any, input: Any, get_cost_fn: Any, get_opt_fn: Callable[[], Any]) -> None:
        """Build everything, as tensorpack's method does.

        With several towers, a ``FeedInput`` becomes a ``QueueInput``, from which each tower takes its own batches.

        Raises:
            HierAllreduceError: an input that would give every tower the same batch, or wait forever; or an
                ``AccumGradOptimizer`` inside another wrapper, which cannot be replaced, or an optimizer that is made
                for ``tf.distribute``; or a gradient processor cannot take sparse gradients.
        """
        if isinstance(input, StagingInput) and input._nr_stage > 1:
            raise HierAllreduceError(
                f"StagingInput({type(input._input).__name__}, nr_stage={input._nr_stage}): tensorpack's holds one"
                " element for each tower, and would wait forever for room for the second; nr_stage=1 works"
            )
        if len(self.devices) > 1 and isinstance(input, FeedInput):
            input = QueueInput(input.ds)
        super().setup_graph(input_signature, input, get_cost_fn, get_opt_fn)

    def _setup_graph(self, input: Any, get_cost_fn: Any, get_opt_fn: Callable[[], Any]) -> List[Callback]:
        """Build the towers, the all-reduce and the updates, and return the callbacks: tensorpack's hook."""
        if len(self.devices) > 1 and not isinstance(input, FeedfreeInput):
            raise HierAllreduceError(
                f"{type(input).__name__} would give every tower the same batch; use QueueInput, TensorInput, or another"
                " FeedfreeInput, from which each tower takes its own batch"
            )
        rows = self._tower_rows(self._make_get_grad_fn(input, get_cost_fn, get_opt_fn))
        optimizer = with_ordered_accumulation(get_opt_fn())
        refuse_unfit(optimizer)
        summed = len(self.devices) * self._hosts
        if not self._options.average and summed > 1:
            warnings.warn(sum_advice(optimizer, summed), stacklevel=2)
        with_main = self._options.update == "main"
        updated = self._updated_at_mains(optimizer, rows) if with_main else self._updated_replicated(optimizer, rows)
        if len(self.devices) == 1:
            return []
        # at the mains, nothing that the update created has copies
        alike = [] if with_main else match_created(updated.created)
        return [*self._broadcasts(alike), *self._checks(rows)]

    def _tower_rows(self, get_grads: Callable[[], Any]) -> List[Pairs]:
        """Build the towers, and return their K×N (gradient, variable) pairs before the all-reduce."""
        towers = list(range(len(self.devices)))
        rows = DataParallelBuilder.call_for_each_tower(
            towers, get_grads, devices=self.devices, use_vs=[tower > 0 for tower in towers]
        )
        if len(rows) > 1:
            refuse_tower_names([var for _, var in rows[0]])
        return with_missing_pairs(rows)

    @property
    def _hosts(self) -> int:
        return self.cluster.size if self.cluster else 1

    def _updated_at_mains(self, optimizer: Any, rows: Sequence[Pairs]) -> Updated:
        self.grads = [list(row) for row in check_pairs(rows, tuple(self.devices))]
        # both names are tensorpack's; the scope is in the names of saved variables
        with tf1.name_scope("apply_gradients"), under_tower_0s_names(optimizer, self.grads, self.devices):
            updated = update_at_mains(
                optimizer,
                self.grads,
                self.devices,
                self._options.average,
                self._options.strategy.for_optimizers(self._hosts),
                inside_wrappers(optimizer),  # the wrappers pass all gradients on to it
                self.cluster,
                self.lanes,
            )
            self.train_op = tf.group(*updated.ops, name="train_op")
        return updated

    def _updated_replicated(self, optimizer: Any, rows: Sequence[Pairs]) -> Updated:
        self.grads = allreduce_grads_and_vars(
            rows,
            self.devices,
            self._options.average,
            strategy=self._options.strategy.for_optimizers(self._hosts),
            cluster=self.cluster,
            lanes=self.lanes,
        )
        # both names are tensorpack's; the scope is in the names of saved variables
        with tf1.name_scope("apply_gradients"), under_tower_0s_names(optimizer, self.grads, self.devices):
            updated = update_replicated(
                optimizer,
                self.grads,
                self.devices,
                # slots belong to their tower: those of all towers but the first are local, and so not saved
                lambda tower: override_to_local_variable(enable=tower > 0),
            )
            self.train_op = tf.group(*updated.ops, name="train_op")
        return updated

    def _broadcasts(self, alike: Sequence[Sequence[Any]]) -> List[Callback]:
        """Return the callbacks that copy tower 0's variables to the others.

        Args:
            alike: K rows of variables that are copies of each other but that tensorpack would not find.
        """
        if self._options.broadcast == "never":
            return []
        with tf1.name_scope("sync_variables"):
            # tensorpack finds copies by the tower's name; counters of AccumGradOptimizer do not have it
            counters = [var.assign(first.read_value()) for row in alike[1:] for var, first in zip(row, alike[0])]
            sync = tf.group(SyncMultiGPUReplicatedBuilder.get_post_init_ops(), *counters)
        at_epochs = RunOp(sync, run_before=True, run_as_trigger=self.BROADCAST_EVERY_EPOCH, verbose=True)
        at_epochs.name_scope = "SyncVariables"
        if not self._options.broadcast_steps:
            return [at_epochs]
        every = PeriodicTrigger(RunOp(sync, run_before=False), every_k_steps=self._options.broadcast_steps)
        return [at_epochs, every]

    def _checks(self, rows: Sequence[Pairs]) -> List[Callback]:
        """Return the callbacks that compare the towers."""
        every = self._options.check_replicas_every
        if not every:
            return []
        trained = {var.op.name for row in rows for _, var in row}
        variables = [var for var in all_variables() if parse_slot_name(var.op.name, trained)]
        return [PeriodicTrigger(_CheckReplicas(find_replicas([TowerUpdate(rows)], variables)), every_k_steps=every)]

    def initialize(self, session_creator: Any, session_init: Any) -> None:
        """Create the session, and check that it has the devices: tensorpack's hook.

        A ``NewSessionCreator``, also in a ``SessionCreatorAdapter``, gets CPU devices and threads as needed. Sessions
        of other creators must already have more than K threads for K towers, and ``use_per_session_threads``.

        Raises:
            HierAllreduceError: the device of a tower or a lane does not exist; the message names those that do. Or the
                lanes' memory does not fit on the GPUs.
        """
        session_creator = creator_for_towers(session_creator, self._session_config)
        named = named_devices(self.devices, self.lanes)
        if isinstance(session_creator, NewSessionCreator):
            # before the session exists: soft placement would silently move a tower to another device
            refuse_missing_in(session_creator, named)
        else:
            session_creator = CheckedSessionCreator(session_creator, named)
        super().initialize(session_creator, session_init)

    def _session_config(self, config: Any) -> Any:
        """Return a copy of a session's configuration with what towers and lanes need."""
        logical = self._logical
        if logical and logical.gpus:
            logical = fitted(logical, lane_memory_in(tf1.get_default_graph()))
        return config_for_towers(config, self.devices, logical)


class _CheckReplicas(Callback):
    """Reports the largest difference between tower 0's trained variables and the other towers'."""

    def __init__(self, replicas: Replicas):
        self._replicas, self._differences = replicas, differences(replicas)

    def _trigger(self) -> None:
        largest = drift(self._replicas, self.trainer.sess.run(self._differences))
        self.trainer.monitors.put_scalar("replica_drift", largest.difference)
        if largest.difference:
            logger.warning(str(largest))
