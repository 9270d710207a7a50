"""The cost of one step of a tensorpack training."""

from __future__ import annotations

from pathlib import Path
from typing import Optional, Union

from tensorpack.callbacks import Callback
from tensorpack.utils import logger

from .cost import Cost
from .hook import CostHook


class CostCallback(Callback):
    """Traces one step of a training, and prints what it cost: a :class:`.CostHook` for tensorpack.

    ::

        from hier_allreduce_tools.cost.tensorpack import CostCallback

        config = TrainConfig(callbacks=[CostCallback()], …)

    It needs an all-reduce of ours on named devices: of another trainer's step it prints an error,
    and training goes on. Arguments, attributes and errors are those of :class:`.CostHook`, but
    that ``folder`` is by default the one of tensorpack's logger, if that has one.
    """

    _chief_only = False  # each host may have it

    def __init__(self, step: int = 100, folder: Optional[Union[str, Path]] = None):
        # tensorpack's HookToCallback fails on TensorFlow 2
        self._hook = CostHook(step, folder or logger.get_logger_dir())
        self._before_run = self._hook.before_run
        self._after_run = self._hook.after_run

    @property
    def cost(self) -> Optional[Cost]:
        """The cost of the step, once it was traced."""
        return self._hook.cost
