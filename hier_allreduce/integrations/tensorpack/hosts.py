"""tensorpack on several hosts: the callback and the session that the trainer then needs."""

from __future__ import annotations

from typing import Any, Sequence

from tensorpack.callbacks import Callback, RunOp
from tensorpack.tfutils.common import get_global_step_var
from tensorpack.tfutils.sesscreate import NewSessionCreator

from ...cluster import Cluster
from ...compat import tf1
from ...errors import ClusterError
from .devices import creator_for_towers


def broadcast_to_hosts(cluster: Cluster, every_epoch: bool) -> Callback:
    """Return the callback that copies the chief's variables to all hosts before training.

    It copies all variables that the graph has now, when all hosts have the same: the chief's own
    callbacks may add some later.

    Args:
        cluster: the hosts.
        every_epoch: also at the end of every epoch.
    """
    get_global_step_var()  # creates it if necessary
    everywhere = cluster.broadcast(tf1.global_variables())
    callback = RunOp(everywhere, run_before=True, run_as_trigger=every_epoch, verbose=True)
    callback.name_scope = "BroadcastVariables"
    return callback


def creator_for_hosts(creator: Any, cluster: Cluster, devices: Sequence[str]) -> Any:
    """Return a session creator whose session knows the other hosts.

    Raises:
        ClusterError: ``creator`` is not a ``NewSessionCreator``.
        HierAllreduceError: a tower's device does not exist; the message names those that do.
    """
    if not isinstance(creator, NewSessionCreator):
        raise ClusterError(
            f"{type(creator).__name__} makes a session that does not know the other hosts; omit"
            " session_creator, or use NewSessionCreator(config=…)"
        )
    return _ClusterSessionCreator(cluster, creator_for_towers(creator, devices).config)


class _ClusterSessionCreator(tf1.train.SessionCreator):
    """Creates the cluster's session, and initializes all variables in it."""

    def __init__(self, cluster: Cluster, config: Any):
        self._cluster = cluster
        self._config = config

    def create_session(self) -> Any:
        # Local variables are initialized too, because all towers but the first have local ones.
        initializers = [
            tf1.global_variables_initializer(),
            tf1.local_variables_initializer(),
            tf1.tables_initializer(),
        ]
        session = self._cluster.session(tf1.get_default_graph(), self._config)
        session.run(initializers)
        return session
