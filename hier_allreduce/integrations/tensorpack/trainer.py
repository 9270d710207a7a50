"""The trainer: tensorpack's replicated training with this package's all-reduce and updates."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Union

import numpy as np
import tensorflow as tf
from tensorpack.callbacks import Callback, CallbackFactory, PeriodicTrigger, RunOp
from tensorpack.graph_builder.training import DataParallelBuilder
from tensorpack.graph_builder.utils import override_to_local_variable
from tensorpack.input_source import FeedfreeInput, StagingInput
from tensorpack.tfutils.sesscreate import NewSessionCreator
from tensorpack.train import SingleCostTrainer
from tensorpack.utils import logger

from ... import configs
from ..._lazy import keras_2_install
from ...cluster import Cluster
from ...compat import tf1
from ...errors import ClusterError, HierAllreduceError
from ...graph import allreduce_grads_and_vars, device_strings
from ...graph.measuring import hook
from ...planning import Strategy, strategy_from
from ...training.replicas import Drift, ReplicatedVariables, broadcast, comparison, find_copies
from ...training.sharded_update import update_at_mains
from ...training.update import Pairs, check_options, check_variables, update_towers
from ...training.wrappers import check_optimizer
from .accumulation import with_ordered_accumulation
from .devices import creator_for_towers
from .hosts import broadcast_to_hosts, creator_for_hosts
from .names import with_missing_pairs
from .peers import reduced_by_peer

_OPTIONS = ("devices", "average", "strategy", "update", "broadcast_every", "check_replicas_every")
# options of tensorpack's trainer, and ours
_THEIRS = {"mode": "strategy='hierarchical'", "gpus": "devices"}


class HierarchicalTrainer(SingleCostTrainer):
    """tensorpack's ``SyncMultiGPUTrainerReplicated`` with our all-reduce, on K ≥ 1 devices.

    ::

        trainer = HierarchicalTrainer(8)              # or HierarchicalTrainer(["/gpu:0", "/gpu:2"])
        launch_train_with_config(config, trainer)

    Every device holds a whole copy of the model: a *tower*. Names are tensorpack's, so that either
    trainer reads the other's checkpoints: tower 0's variables have no prefix and are saved, the
    others are called ``towerK/…`` and are local.

    It differs from tensorpack's trainer where that one goes wrong:

    - K towers share one optimizer. Its once-a-step work (Adam: advancing its beta powers) is done
      once a step instead of K times. So Adam is Adam, and the towers remain equal.
    - ``AccumGradOptimizer`` applies its sum at exactly every k-th step, in all towers.
    - Gradient processors that match variables by name, and the function of
      ``PostProcessOptimizer``, see tower 0's names in every tower. So
      ``ScaleGradient(("hidden/.*", 0.))`` freezes these layers in all towers. A processor with a
      variable, which all towers would change, is an error; use ``update="main"``, which calls it
      once.
    - Sparse gradients (embeddings) remain sparse, with a row for each lookup. Processors that clip
      or measure gradients see these rows before they are added up, unless the strategy is
      ``Strategy(sparse="dense")``.

    With a ``cluster``, the trainer reduces over all K·H towers of H hosts. The same program runs on
    every host::

        cluster = Cluster.from_environment(devices_per_host=8)        # TF_CONFIG or Slurm
        launch_train_with_config(config, HierarchicalTrainer(8, cluster=cluster))

    Host 0 is the chief. It alone restores the checkpoint (``session_init`` of the other hosts is
    not used), saves, evaluates and writes summaries, as tensorpack's chief-only callbacks do. Its
    variables, including optimizer slots and the global step, go to all other hosts before training
    and, with ``BROADCAST_EVERY_EPOCH``, at the end of every epoch. The other hosts wait for as long
    as it lives. All hosts must make the same number of steps, every host on its share of the data.

    Models should use resource variables. A reference variable, TensorFlow 1.15's default, can be
    updated while a gradient still reads it. If several towers train one, a warning says so; with
    ``update="main"``, an error.

    Attributes:
        devices: K devices, one for each tower.
        cluster: the hosts; None for one host.
        BROADCAST_EVERY_EPOCH: copy tower 0's variables (optimizer slots too) to the other towers
            also at the end of every epoch. Needed if towers have variables that are not trained,
            such as batch normalization's moving averages.
    """

    BROADCAST_EVERY_EPOCH = True

    def __init__(
        self,
        devices: Any,
        average: bool = True,
        strategy: Union[str, Strategy, None] = None,
        update: str = "replicated",
        broadcast_every: int = 0,
        check_replicas_every: int = 0,
        cluster: Optional[Cluster] = None,
        **unknown: Any,
    ):
        """Check the options. This adds no ops to the current graph.

        Args:
            devices: the number of GPUs, or a list of GPU ids or TensorFlow device strings, one for
                each tower. CPU devices are created as needed, so ``["/cpu:0", …, "/cpu:7"]`` works
                on any machine.
            average, strategy, broadcast_every: as in :class:`hier_allreduce.TowerOptimizer`.
            update: the same. Checkpoints are the same with both values, but counters of gradients'
                accumulation exist once with ``"main"``.
            check_replicas_every: the same. Comparisons report ``replica_drift`` to the monitors and
                the variable to the log. They exclude moving averages, which tensorpack updates on
                tower 0 only.
            cluster: the hosts, each of which has K devices.
            unknown: options of tensorpack's trainer, or misspelled ones; the error names ours.

        Raises:
            HierAllreduceError: an invalid or unknown option. A device that does not exist is an
                error when training starts, before its session does.
        """
        for name, value in unknown.items():
            if name in _THEIRS:
                raise HierAllreduceError(
                    f"{name}={value!r} is tensorpack's; HierarchicalTrainer has {_THEIRS[name]}"
                )
        options = [*_OPTIONS, "cluster"]
        configs.check_keys(unknown, options, "HierarchicalTrainer")
        check_options(
            average,
            update,
            broadcast_every=broadcast_every,
            check_replicas_every=check_replicas_every,
        )
        if configs.is_whole_number(devices):
            devices = list(range(devices))
        if isinstance(devices, np.ndarray) and devices.ndim:
            devices = list(devices)
        if isinstance(devices, (list, tuple)):
            is_id = configs.is_whole_number
            devices = [f"/gpu:{each}" if is_id(each) else each for each in devices]
        self.devices = list(device_strings(devices))
        self._strategy = strategy_from(strategy)
        self._average = average
        self._update = update
        self._broadcast_every = int(broadcast_every)
        self._check_every = int(check_replicas_every)
        super().__init__()
        if not isinstance(cluster, (Cluster, type(None))):
            raise ClusterError(f"cluster={cluster!r}: expected a hier_allreduce.Cluster")
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
        values = configs.read_yaml(path)
        configs.check_keys(values, _OPTIONS, str(path))
        values.update(changes)
        if "devices" not in values:
            raise HierAllreduceError(
                f"{path}: 'devices' is missing: how many GPUs, or a list of devices"
            )
        if isinstance(values.get("strategy"), dict):
            values["strategy"] = Strategy.from_values(values["strategy"], path)
        return cls(**values)

    def setup_graph(
        self, input_signature: Any, input: Any, get_cost_fn: Any, get_opt_fn: Callable[[], Any]
    ) -> None:
        """Build everything, as tensorpack's method does.

        Raises:
            HierAllreduceError: an input that would give every tower the same batch, or wait
                forever; or an optimizer or a gradient processor that cannot update towers; or
                tensorpack's layers meet Keras 3.
        """
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
            install = keras_2_install(tf.__version__)
            raise HierAllreduceError(
                f"tensorpack's layers need Keras 2 ({error}): {install}, and"
                " set TF_USE_LEGACY_KERAS=1 in the environment before TensorFlow is imported"
            ) from error
        optimizer = with_ordered_accumulation(get_opt_fn())
        check_optimizer(optimizer)
        copies = self._update_towers(optimizer, with_missing_pairs(rows))
        callbacks = self._syncing(copies) if len(self.devices) > 1 else []
        if self.cluster is None or self.cluster.size == 1:
            return callbacks
        across = broadcast_to_hosts(self.cluster, self.BROADCAST_EVERY_EPOCH)
        return [each.set_chief_only(False) for each in [across, *callbacks]]

    def _update_towers(self, optimizer: Any, rows: Sequence[Pairs]) -> ReplicatedVariables:
        average = self._average
        strategy = self._strategy
        peer = hook().peer("tensorpack", self._update)
        if self._update == "main":
            pairs: Sequence[Pairs] = check_variables(rows, self.devices)
        elif peer:
            pairs = reduced_by_peer(peer, rows, self.devices, average)
        else:
            pairs = allreduce_grads_and_vars(
                rows, self.devices, average, strategy, cluster=self.cluster
            )
        # the scope of tensorpack's trainer, which is in the names of saved variables
        with tf1.name_scope("apply_gradients"):
            if self._update == "main":
                op, copies = update_at_mains(
                    optimizer, pairs, self.devices, average, strategy, self.cluster
                )
            else:
                # the state of all towers but the first is local, and so not saved
                op, copies = update_towers(
                    optimizer,
                    pairs,
                    self.devices,
                    scope=lambda tower: override_to_local_variable(enable=tower > 0),
                )
            self.train_op = tf.group(op, name="train_op")
        return copies

    def _syncing(self, copies: ReplicatedVariables) -> List[Callback]:
        """Return the callbacks that copy tower 0's variables to the others, and compare them."""
        with tf1.name_scope("sync_variables"):
            sync = broadcast(find_copies(copies, self.devices), self.devices)
        at_epochs = RunOp(
            sync, run_before=True, run_as_trigger=self.BROADCAST_EVERY_EPOCH, verbose=True
        )
        at_epochs.name_scope = "SyncVariables"
        callbacks = [at_epochs]
        if self._check_every:
            compare = comparison(copies, self.devices)
            check = CallbackFactory(trigger=lambda callback: self._report(compare(self.sess)))
            callbacks.append(PeriodicTrigger(check, every_k_steps=self._check_every))
        if self._broadcast_every:
            callbacks.append(
                PeriodicTrigger(RunOp(sync, run_before=False), every_k_steps=self._broadcast_every)
            )
        return callbacks

    def _report(self, drift: Drift) -> None:
        self.monitors.put_scalar("replica_drift", drift.difference)
        if drift.difference:
            logger.warning(str(drift))

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
        if self.cluster is not None and self.cluster.size > 1:
            session_creator = creator_for_hosts(session_creator, self.cluster, self.devices)
        elif isinstance(session_creator, NewSessionCreator):
            session_creator = creator_for_towers(session_creator, self.devices)
        super().initialize(session_creator, session_init)
