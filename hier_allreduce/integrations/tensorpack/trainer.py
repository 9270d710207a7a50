"""The trainer: tensorpack's replicated training with this package's all-reduce and updates."""

from __future__ import annotations

from numbers import Number
from typing import Any, Callable, List, Optional, Sequence, Union

import tensorflow as tf
from tensorpack.callbacks import Callback
from tensorpack.graph_builder.training import DataParallelBuilder
from tensorpack.graph_builder.utils import override_to_local_variable
from tensorpack.input_source import FeedfreeInput, StagingInput
from tensorpack.tfutils.sesscreate import NewSessionCreator
from tensorpack.train import SingleCostTrainer

from ... import configs
from ...cluster import Cluster
from ...compat import tf1
from ...errors import HierAllreduceError
from ...graph import device_strings
from ...graph.rows import variables_in, warn_of_references
from ...planning.strategy import Strategy
from ...training.copies import CopyCheckHook
from ...training.equality import Drift, PeriodicComparison, broadcast, comparison
from ...training.options import Options, Transform, checked_options
from ...training.replicas import columns_of
from ...training.towers import Column, Pairs, Towers
from ...training.update import check_optimizer, update_towers
from .accumulation import with_ordered_accumulation
from .copies import CopyBeforeSteps, broadcast_to_hosts, set_on_all_towers
from .names import with_missing_pairs
from .sessions import creator_for_hosts, creator_for_towers

_OPTIONS = ("devices", "average", "strategy", "update", "broadcast_every", "check_replicas_every")


class HierarchicalTrainer(SingleCostTrainer):
    """tensorpack's ``SyncMultiGPUTrainerReplicated`` with our all-reduce, on K ≥ 1 devices.

    ::

        trainer = HierarchicalTrainer(8)              # or HierarchicalTrainer(["/gpu:0", "/gpu:2"])
        launch_train_with_config(config, trainer)

    Every device holds a whole copy of the model: a *tower*. Names are tensorpack's, so that either
    trainer reads the other's checkpoints: tower 0's variables have no prefix and are saved, the
    others are called ``towerK/…`` and are local.

    It differs from tensorpack's trainer where that one goes wrong:

    - The optimizer is called once, or is one of TensorFlow's own, whose update is the same on each
      tower. Adam's once-a-step work is done once a step instead of K times. So Adam is Adam, and
      the towers remain equal, which is checked while they train.
    - ``AccumGradOptimizer`` applies its sum at exactly every k-th step.
    - Gradient processors, and the function of ``PostProcessOptimizer``, run once, on tower 0's
      variables and names, as on one device.
    - Sparse gradients (embeddings) remain sparse where that is fewer bytes. Processors that clip or
      measure gradients see one row for each index, the sum of all lookups.

    With a ``cluster``, the trainer reduces over all K·H towers of H hosts. The same program runs on
    every host::

        cluster = Cluster.from_environment(devices_per_host=8)        # TF_CONFIG or Slurm
        launch_train_with_config(config, HierarchicalTrainer(8, cluster=cluster))

    Host 0 is the chief. It alone restores the checkpoint (``session_init`` of the other hosts is
    not used), saves, evaluates and writes summaries, as tensorpack's chief-only callbacks do. Its
    variables, including optimizer slots and the global step, go to all other hosts before training
    and, with ``BROADCAST_EVERY_EPOCH``, before every epoch: also what its callbacks changed at the
    end of the last one, such as the learning rate. Meanwhile the other hosts wait, for as long as
    the cluster's ``stall_timeout`` lets them. All hosts must make the same number of steps, every
    host on its share of the data.

    Models should use resource variables. A reference variable, TensorFlow 1.15's default, can be
    updated while a gradient still reads it. If several towers train one, a warning says so; with
    ``update="once"`` or ``"sharded"``, an error.

    Attributes:
        devices: K devices, one for each tower.
        cluster: the hosts; None for one host.
        BROADCAST_EVERY_EPOCH: copy tower 0's variables (optimizer slots too) to the other towers
            also before every later epoch. Needed if towers have variables that are not trained,
            such as batch normalization's moving averages.
    """

    BROADCAST_EVERY_EPOCH = True

    def __init__(
        self,
        devices: Any,
        average: bool = True,
        strategy: Union[str, Strategy, None] = None,
        update: str = "replicated",
        transform: Optional[Transform] = None,
        broadcast_every: int = 0,
        check_replicas_every: Optional[int] = None,
        cluster: Optional[Cluster] = None,
    ):
        """The constructor checks the options, and adds no ops.

        Args:
            devices: the number of GPUs, or a list of GPU ids or TensorFlow device strings, one for
                each tower. CPU devices are created as needed, so ``["/cpu:0", …, "/cpu:7"]`` works
                on any machine.
            average, strategy, update, transform, broadcast_every: as in
                :class:`hier_allreduce.TowerOptimizer`. An optimizer with gradient processors runs
                ``"once"``; a ``transform`` clips without that.
            check_replicas_every: the same. Moving averages, which tensorpack updates on tower 0
                only, are not compared.
            cluster: the hosts, each of which has K devices.

        Raises:
            HierAllreduceError: an invalid option. A device that does not exist is an
                error when training starts, before its session does.
        """
        # A number stands for that many GPUs, as for tensorpack's trainer.
        if configs.is_whole_number(devices) and devices > 0:
            devices = list(range(devices))
        if isinstance(devices, (Number, str)):
            raise HierAllreduceError(
                f"HierarchicalTrainer({devices!r}): expected the number of GPUs, such as 8, or a"
                " list of devices, such as ['/gpu:0', '/gpu:2']"
            )
        if isinstance(devices, (list, tuple)) or getattr(devices, "ndim", False):
            is_id = configs.is_whole_number
            devices = [f"/gpu:{device}" if is_id(device) else device for device in devices]
        self.devices = list(device_strings(devices))
        self._options = checked_options(
            *(average, strategy, update, transform, broadcast_every, check_replicas_every),
            *(cluster, [f"tower{k}" if k else "" for k in range(len(self.devices))]),
        )
        super().__init__()
        self.cluster = cluster
        self.is_chief = cluster is None or cluster.is_chief

    @classmethod
    def from_config(cls, name_or_path: str, **changes: Any) -> HierarchicalTrainer:
        """Return the trainer of ``configs/trainers/NAME.yaml`` or of the YAML file at a path.

        The keys are arguments of the constructor; ``strategy`` is a name, a path, or a mapping of a
        strategy's keys. ``changes`` have other values than the file's: ``from_config("chainer",
        devices=4)``.

        Raises:
            HierAllreduceError: no such file or name, an unknown key, an invalid value, or no
                ``devices``.
        """
        path = configs.find("trainers", name_or_path)
        options = configs.read_yaml(path)
        configs.check_keys(options, _OPTIONS, str(path))
        options.update(changes)
        if "devices" not in options:
            raise HierAllreduceError(
                f"{path}: 'devices' is missing: how many GPUs, or a list of devices"
            )
        if isinstance(options.get("strategy"), dict):
            options["strategy"] = Strategy.from_values(options["strategy"], path)
        return cls(**options)

    def setup_graph(
        self, input_signature: Any, input: Any, get_cost_fn: Any, get_opt_fn: Callable[[], Any]
    ) -> None:
        """Build everything, as tensorpack's method does.

        Raises:
            HierAllreduceError: an input that would give every tower the same batch, or wait
                forever; or an optimizer or a gradient processor that cannot update towers; or
                tensorpack's layers meet Keras 3.
        """
        # tensorpack refuses neither input: one waits forever, the other trains all towers alike.
        if isinstance(input, StagingInput) and input._nr_stage > 1:
            raise HierAllreduceError(
                f"StagingInput({type(input._input).__name__}, nr_stage={input._nr_stage}):"
                " tensorpack's holds one element for each tower, and would wait forever for room"
                " for the second; nr_stage=1 works"
            )
        if len(self.devices) > 1 and not isinstance(input, FeedfreeInput):
            raise HierAllreduceError(
                f"{type(input).__name__} would give every tower the same batch; use QueueInput,"
                " TensorInput, or another FeedfreeInput, from which each tower takes other batches"
            )
        super().setup_graph(input_signature, input, get_cost_fn, get_opt_fn)

    def _setup_graph(
        self, input: Any, get_cost_fn: Any, get_opt_fn: Callable[[], Any]
    ) -> List[Callback]:
        """Build towers, all-reduce and updates, and return the callbacks: tensorpack's hook."""
        towers = range(len(self.devices))
        get_grads = self._make_get_grad_fn(input, get_cost_fn, get_opt_fn)
        use_vs = [tower > 0 for tower in towers]  # tower 0's variables have no prefix
        try:
            rows = DataParallelBuilder.call_for_each_tower(
                towers, get_grads, devices=self.devices, use_vs=use_vs
            )
        except AttributeError as error:
            if "Keras 3" not in str(error):
                raise
            # tf_keras depends on the package tensorflow, which would overwrite tensorflow-cpu.
            major, minor, _ = tf.__version__.split(".", 2)
            raise HierAllreduceError(
                f"tensorpack's layers need Keras 2 ({error}): pip install --no-deps"
                f' "tf_keras=={major}.{minor}.*", and set TF_USE_LEGACY_KERAS=1 in the environment'
                " before TensorFlow is imported"
            ) from error
        optimizer = with_ordered_accumulation(get_opt_fn())
        check_optimizer(optimizer)
        updated = self._update_towers(optimizer, with_missing_pairs(rows))
        hosts = self._options.hosts
        callbacks = self._syncing(updated) if len(self.devices) * hosts > 1 else []
        if self.cluster is None or hosts == 1:
            return callbacks
        across = broadcast_to_hosts(self.cluster, self.BROADCAST_EVERY_EPOCH)
        # By default a callback runs on the chief only, but its ops wait for all hosts.
        return [callback.set_chief_only(False) for callback in [across, *callbacks]]

    def _update_towers(self, optimizer: Any, rows: Sequence[Pairs]) -> List[Column]:
        towers = Towers(
            rows,
            self.devices,
            self._options,
            # The state of all towers but the first is local, so that it is not saved.
            scope=lambda tower: override_to_local_variable(enable=tower > 0),
            may_have_references=True,
            front_end="tensorpack",
        )
        if len(self.devices) > 1:
            warn_of_references(variables_in(rows[0]))
        # The scope is that of tensorpack's trainer, because names of saved variables have it.
        with tf1.name_scope("apply_gradients"):
            self.train_op, updated = update_towers(optimizer, towers)
        return updated

    def _syncing(self, updated: Sequence[Column]) -> List[Callback]:
        """Return the callbacks that copy tower 0's variables to the others, and compare towers."""
        with tf1.name_scope("sync_variables"):
            columns = columns_of(updated, self.devices, self._options.scopes)
            sync = broadcast(columns, self.devices)
        every = self._options.broadcast_every
        copies = CopyBeforeSteps(sync, self.BROADCAST_EVERY_EPOCH, every, "SyncVariables")
        # Moving averages stay out, because tensorpack updates them on tower 0 only.
        compare = comparison(updated, self.devices)
        return [copies, _CompareTowers(compare, self._options)]

    def setup_callbacks(self, callbacks: Any, monitors: Any) -> None:
        """Set up callbacks as tensorpack does; schedules set a variable of all towers."""
        super().setup_callbacks(callbacks, monitors)
        columns = columns_of((), self.devices, self._options.scopes)
        set_on_all_towers(self._callbacks.cbs, columns)

    def initialize(self, session_creator: Any, session_init: Any) -> None:
        """Create the session, and check that it has the devices: tensorpack's hook.

        A ``NewSessionCreator`` gets CPU devices and threads as needed. Sessions of other creators
        must already have the devices, more than K threads for K towers, and
        ``use_per_session_threads``.

        Raises:
            HierAllreduceError: the device of a tower does not exist; the message names those that
                do.
            ClusterError: as :meth:`hier_allreduce.Cluster.session`; or there are several hosts, and
                the creator is not a ``NewSessionCreator``.
        """
        if self.cluster is not None and self._options.hosts > 1:
            session_creator = creator_for_hosts(session_creator, self.cluster, self.devices)
        elif isinstance(session_creator, NewSessionCreator):
            session_creator = creator_for_towers(session_creator, self.devices)
        super().initialize(session_creator, session_init)


class _CompareTowers(Callback):
    """Ends the training with an error if towers differ, or what is copied arrives as other bits."""

    def __init__(self, compare: Callable[[Any], Drift], options: Options):
        self._comparison = PeriodicComparison(compare, options)
        # tensorpack's HookToCallback fails in TensorFlow 2.
        self._copies = CopyCheckHook(options)

    def _setup_graph(self) -> None:
        self._copies.begin()

    def _before_run(self, ctx: Any) -> Any:
        return self._copies.before_run(ctx)

    def _after_run(self, run_context: Any, run_values: Any) -> None:
        self._copies.after_run(run_context, run_values)

    def _trigger_step(self) -> None:
        self._comparison.after_step(self.trainer.sess)
