"""tensorpack on several hosts: a :class:`HierarchicalTrainer` on every host, a ``Cluster`` between them."""

from __future__ import annotations

from typing import Any, Callable, List

from tensorpack.callbacks import Callback, RunOp
from tensorpack.tfutils.common import get_global_step_var
from tensorpack.tfutils.sesscreate import NewSessionCreator

from ..cluster import Cluster
from ..compat import tf1
from ..errors import ClusterError
from .tensorpack import HierarchicalTrainer
from .tensorpack.devices import creator_for_towers

__all__ = ["HierarchicalClusterTrainer"]


class HierarchicalClusterTrainer(HierarchicalTrainer):
    """:class:`HierarchicalTrainer` on K devices of each of H hosts: reduces over all K·H towers.

    ::

        cluster = Cluster.from_environment(devices_per_host=8)    # TF_CONFIG or Slurm; the same program on every host
        launch_train_with_config(config, HierarchicalClusterTrainer(8, cluster))

    Host 0 is the chief. It alone restores the checkpoint (``session_init`` of the other hosts is not used), saves,
    evaluates and writes summaries, as tensorpack's chief-only callbacks do. Its variables, including optimizer slots
    and the global step, go to all other hosts before training and, with ``BROADCAST_EVERY_EPOCH``, at the end of every
    epoch. The other hosts wait for as long as it lives.

    All hosts must make the same number of steps, every host on its share of the data.
    """

    cluster: Cluster

    def __init__(self, devices: Any, cluster: Cluster, **choices: Any):
        """Check the options. This adds no ops to the current graph.

        Args:
            devices: the devices of this host, as in :class:`HierarchicalTrainer`.
            cluster: the hosts.
            choices: all other options of :class:`HierarchicalTrainer`.

        Raises:
            HierAllreduceError: as :class:`HierarchicalTrainer`.
        """
        super().__init__(devices, **choices)
        self.cluster = cluster
        self.is_chief = cluster.is_chief

    def _setup_graph(
        self, input: Any, get_cost_fn: Any, get_opt_fn: Callable[[], Any]
    ) -> List[Callback]:
        inside = super()._setup_graph(input, get_cost_fn, get_opt_fn)
        if self.cluster.size == 1:
            return inside
        get_global_step_var()  # creates it if necessary
        # now, while all hosts have the same variables: the chief's own callbacks may add some
        everywhere = self.cluster.broadcast(tf1.global_variables())
        callback = RunOp(
            everywhere, run_before=True, run_as_trigger=self.BROADCAST_EVERY_EPOCH, verbose=True
        )
        callback.name_scope = "BroadcastVariables"
        return [each.set_chief_only(False) for each in [callback, *inside]]

    def initialize(self, session_creator: Any, session_init: Any) -> None:
        """Create the session, once all hosts have joined and built the same graph: tensorpack's hook.

        Raises:
            ClusterError: as :meth:`hier_allreduce.Cluster.session`; or ``session_creator`` is not a
                ``NewSessionCreator``.
            HierAllreduceError: a tower's device does not exist; the message names those that do.
        """
        if self.cluster.size > 1:
            if not isinstance(session_creator, NewSessionCreator):
                raise ClusterError(
                    f"{type(session_creator).__name__} makes a session that does not know the other hosts; omit"
                    " session_creator, or use NewSessionCreator(config=…)"
                )
            config = creator_for_towers(session_creator, self.devices).config
            session_creator = _ClusterSessionCreator(self.cluster, config)
        super().initialize(session_creator, session_init)


class _ClusterSessionCreator(tf1.train.SessionCreator):
    """Creates the cluster's session, and initializes all variables in it."""

    def __init__(self, cluster: Cluster, config: Any):
        self._cluster, self._config = cluster, config

    def create_session(self) -> Any:
        initializers = [
            tf1.global_variables_initializer(),
            tf1.local_variables_initializer(),
            tf1.tables_initializer(),
        ]
        session = self._cluster.session(tf1.get_default_graph(), self._config)
        session.run(initializers)
        return session
