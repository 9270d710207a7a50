"""The trainer: tensorpack's replicated training with this package's all-reduce and updates."""

from __future__ import annotations

from functools import partial
from itertools import chain
from numbers import Integral
from typing import Any, Callable, List, Optional, Sequence, Union

from tensorpack.callbacks import Callback
from tensorpack.graph_builder.training import DataParallelBuilder
from tensorpack.graph_builder.utils import override_to_local_variable
from tensorpack.input_source import FeedfreeInput, StagingInput
from tensorpack.tfutils.common import get_global_step_var
from tensorpack.tfutils.sesscreate import NewSessionCreator, ReuseSessionCreator
from tensorpack.train import SingleCostTrainer

from ...cluster import Cluster
from ...compat import tf1
from ...errors import HierAllreduceError
from ...graph import device_strings
from ...planning.strategy import Strategy
from ...training.equality import broadcast, comparison
from ...training.hook import TowersHook
from ...training.options import Options, Transform, checked_options
from ...training.replicas import columns_of, kept, unsaid_among
from ...training.towers import Column, Pairs, Towers
from ...training.update import update_towers
from .accumulation import with_ordered_accumulation
from .sessions import creator_for_towers


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

        cluster = Cluster.from_environment()        # TF_CONFIG or Slurm
        launch_train_with_config(config, HierarchicalTrainer(8, cluster=cluster))

    Host 0 is the chief. It alone restores the checkpoint (``session_init`` of the other hosts is
    not used), saves, evaluates and writes summaries, as tensorpack's chief-only callbacks do. Its
    variables, including optimizer slots and the global step, go to all other hosts before training
    and, with ``BROADCAST_EVERY_EPOCH``, before every epoch: also what its callbacks changed at the
    end of the last one, such as the learning rate. Meanwhile the other hosts wait, for as long as
    the cluster's ``stall_timeout`` lets them. All hosts must make the same number of steps, every
    host on its share of the data.

    Several towers need resource variables. A reference variable, TensorFlow 1.15's default, can be
    updated while a gradient still reads it, so it is an error.

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
        if isinstance(devices, Integral):
            devices = range(devices)
        named = [f"/gpu:{one}" if isinstance(one, Integral) else one for one in devices]
        self.devices = list(device_strings(named))
        scopes = tuple(f"tower{k}" if k else "" for k in range(len(self.devices)))
        steps = broadcast_every, check_replicas_every
        chosen = Options(average, strategy, update, transform, *steps, cluster, scopes)
        self._options = checked_options(chosen)
        super().__init__()
        self.cluster = cluster
        self.is_chief = cluster is None or cluster.is_chief

    def _setup_graph(
        self, input: Any, get_cost_fn: Any, get_opt_fn: Callable[[], Any]
    ) -> List[Callback]:
        """Build towers, all-reduce and updates, and return the callbacks: tensorpack's hook."""
        towers = range(len(self.devices))
        # tensorpack refuses neither input: one waits forever, the other trains all towers alike.
        if isinstance(input, StagingInput) and input._nr_stage > 1:
            raise HierAllreduceError(
                f"StagingInput(nr_stage={input._nr_stage}): tensorpack's has room for one element"
                " of each tower, and would wait forever; nr_stage=1 works"
            )
        if len(towers) > 1 and not isinstance(input, FeedfreeInput):
            raise HierAllreduceError(
                f"{type(input).__name__} would give every tower the same batch; use QueueInput,"
                " TensorInput, or another FeedfreeInput, from which each tower takes other batches"
            )
        rows = DataParallelBuilder.call_for_each_tower(
            towers,
            self._make_get_grad_fn(input, get_cost_fn, get_opt_fn),
            devices=self.devices,
            use_vs=[tower > 0 for tower in towers],  # tower 0's variables have no prefix
        )
        optimizer = with_ordered_accumulation(get_opt_fn())
        kept().devices, kept().scopes = tuple(self.devices), {self._options.scopes: True}
        completed = _with_missing_pairs(rows, columns_of())
        # The state of all towers but the first is local, so that it is not saved.
        scope = lambda tower: override_to_local_variable(enable=tower > 0)  # noqa: E731
        ready = Towers(completed, self.devices, self._options, scope, "tensorpack")
        # The scope is that of tensorpack's trainer, because names of saved variables have it.
        with tf1.name_scope("apply_gradients"):
            self.train_op = update_towers(optimizer, ready, {})
        self._copies = []
        if self.cluster is not None:
            get_global_step_var()  # creates it if necessary
            # The variables of now are the same on all hosts: the chief's callbacks may add some.
            self._copies.append(self.cluster.broadcast(tf1.global_variables()))
        columns = columns_of()
        self._copies.append(broadcast(columns, unsaid_among(columns)))
        # What callbacks load into a variable of tower 0, as setters of a rate do, reaches all.
        for first, *others in columns:
            first.load = partial(_load, first.load, others)
        return []

    def initialize_hooks(self) -> None:
        """Create the session of the steps, which copies and compares: tensorpack's hook."""
        hook = TowersHook(
            self._options,
            # Moving averages stay out, because tensorpack updates them on tower 0 only.
            lambda: (comparison(list(kept().columns.values())), self._copies),
            # What callbacks set at an epoch's end is copied before the first step of the next one.
            lambda: self.BROADCAST_EVERY_EPOCH and self.local_step == 0,
        )
        hooks = [hook, *self._callbacks.get_hooks()]
        self.hooked_sess = tf1.train.MonitoredSession(ReuseSessionCreator(self.sess), hooks)

    def initialize(self, session_creator: Any, session_init: Any) -> None:
        """Create the session, and check that it has the devices: tensorpack's hook.

        A ``NewSessionCreator`` gets CPU devices and threads as needed, and a cluster's session.
        Sessions of other creators must already have the devices, more than K threads for K towers,
        and ``use_per_session_threads``; of several hosts, they come from
        :meth:`hier_allreduce.Cluster.session`.

        Raises:
            HierAllreduceError: the device of a tower does not exist; the message names those that
                do.
            ClusterError: as :meth:`hier_allreduce.Cluster.session`; or there are several hosts, and
                the creator's session does not know the others.
        """
        if isinstance(session_creator, NewSessionCreator):
            session_creator = creator_for_towers(session_creator, self.devices)
            if self.cluster is not None:
                session = self.cluster.session(tf1.get_default_graph(), session_creator.config)
                # Local variables, too, because all towers but the first have local ones.
                session.run(tf1.global_variables_initializer())
                session.run(tf1.train.Scaffold.default_local_init_op())
                session_creator = ReuseSessionCreator(session)
        super().initialize(session_creator, session_init)


def _with_missing_pairs(rows: Sequence[Pairs], columns: Sequence[Column]) -> List[Pairs]:
    """Add (None, variable) for each variable of a tower that has a gradient only on other towers.

    tensorpack leaves out variables without a gradient, tower by tower, so that the K rows would not
    match.
    """
    grads = {id(var): grad for grad, var in chain(*rows)}
    trained = [column for column in columns if not grads.keys().isdisjoint(map(id, column))]
    paired = set(map(id, chain(*trained)))
    completed: List[Pairs] = []
    for tower, pairs in enumerate(rows):
        copies = [column[tower] for column in trained]
        # What has no copies stays in its row, and the check of the rows names it.
        own = [pair for pair in pairs if id(pair[1]) not in paired]
        completed.append([*((grads.get(id(var)), var) for var in copies), *own])
    return completed


def _load(load_on_tower_0: Any, copies: Sequence[Any], value: Any, session: Any = None) -> None:
    """Load a value into a variable of tower 0, and into its copies."""
    load_on_tower_0(value, session)
    for var in copies:
        var.load(value, session)
