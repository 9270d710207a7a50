"""Callbacks that copy variables before steps: of the chief to all hosts, of tower 0 to the others.

::

    epoch 1 ─► evaluation, another rate ─► chief to hosts, tower 0 to towers ─► epoch 2
"""

from __future__ import annotations

from typing import Any, Iterable, Sequence

from tensorpack.callbacks import GraphVarParam, HyperParamSetter, RunOp
from tensorpack.tfutils.common import get_global_step_var

from ...cluster import Cluster
from ...compat import tf1
from ...training.towers import Column


class CopyBeforeSteps(RunOp):
    """Runs an op before the first epoch; also before all later ones, and before each k-th step.

    At an epoch's or a step's end tensorpack calls callbacks in the order of their list, and a
    trainer's come first. So what the user's callbacks change there would be copied too late.
    """

    def __init__(self, op: Any, every_epoch: bool, every_steps: int, name: str):
        super().__init__(op, run_before=False, run_as_trigger=False, verbose=True)
        self.name_scope = name
        self._every_epoch = every_epoch
        self._every_steps = every_steps
        self._steps = 0

    def _before_epoch(self) -> None:
        if self._every_epoch or self.epoch_num == self.trainer.loop.starting_epoch:
            self._print()
            self._op.run()

    def _trigger_step(self) -> None:
        self._steps += 1

    def _before_run(self, _: Any) -> None:
        if self._every_steps and self._steps and self._steps % self._every_steps == 0:
            self._op.run()


def set_on_all_towers(callbacks: Iterable[Any], columns: Sequence[Column]) -> None:
    """Let tensorpack's setters of a variable that every tower has set it on all of them."""
    copies_by_name = {column[0].name: column[1:] for column in columns}
    for callback in callbacks:
        param = getattr(callback, "param", None)
        if isinstance(callback, HyperParamSetter) and isinstance(param, GraphVarParam):

            def set_value(
                value: Any,
                set_on_tower_0: Any = param.set_value,
                copies: Sequence[Any] = copies_by_name.get(param.var_name, ()),
            ) -> None:
                set_on_tower_0(value)
                for var in copies:
                    var.load(value)

            param.set_value = set_value


def broadcast_to_hosts(cluster: Cluster, every_epoch: bool) -> CopyBeforeSteps:
    """Return the callback that copies the chief's variables to all hosts.

    It copies all variables that the graph has now, when all hosts have the same: the chief's own
    callbacks may add some later.

    Args:
        cluster: the hosts.
        every_epoch: also before every later epoch.
    """
    get_global_step_var()  # creates it if necessary
    everywhere = cluster.broadcast(tf1.global_variables())
    return CopyBeforeSteps(everywhere, every_epoch, 0, "BroadcastVariables")
