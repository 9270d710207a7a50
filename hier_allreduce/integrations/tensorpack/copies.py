"""Callbacks that copy variables before epochs: of the chief to all hosts, of tower 0 to the others.

::

    epoch 1 ─► evaluation, another rate ─► chief to hosts, tower 0 to towers ─► epoch 2
"""

from __future__ import annotations

from typing import Any

from tensorpack.callbacks import RunOp
from tensorpack.tfutils.common import get_global_step_var

from ...cluster import Cluster
from ...compat import tf1


class CopyBeforeEpochs(RunOp):
    """Runs an op before training and, if it is asked to, before every later epoch.

    At an epoch's end tensorpack calls callbacks in the order of their list, and a trainer's come
    first. So what the user's callbacks change there would be copied an epoch too late.
    """

    def __init__(self, op: Any, every_epoch: bool, name: str):
        super().__init__(op, run_before=True, run_as_trigger=False, verbose=True)
        self.name_scope = name
        self._every_epoch = every_epoch

    def _before_epoch(self) -> None:
        is_first = self.epoch_num == self.trainer.loop.starting_epoch
        if self._every_epoch and not is_first:
            self._print()
            self._op.run()


def broadcast_to_hosts(cluster: Cluster, every_epoch: bool) -> CopyBeforeEpochs:
    """Return the callback that copies the chief's variables to all hosts.

    It copies all variables that the graph has now, when all hosts have the same: the chief's own
    callbacks may add some later.

    Args:
        cluster: the hosts.
        every_epoch: also before every later epoch.
    """
    get_global_step_var()  # creates it if necessary
    everywhere = cluster.broadcast(tf1.global_variables())
    return CopyBeforeEpochs(everywhere, every_epoch, "BroadcastVariables")
