"""The cost of one step of a ``MonitoredSession``, without a change of its loop."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any, Optional, Union

import tensorflow as tf

from hier_allreduce import HierAllreduceError

from .cost import Cost, cost

tf1: Any = tf.compat.v1
_BASE: Any = tf1.train.SessionRunHook


class CostHook(_BASE):
    """Traces one step of a ``MonitoredSession`` or an estimator, and prints what it cost.

    ::

        hook = CostHook(step=100, folder="cost")
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
            …                                # step 104.4 ms; after the pass 1.9 ms: …

    No other step is traced, and training goes on if this one has no cost.

    Args:
        step: the number of the ``session.run`` that is traced, from 1; by default 100, when what
            the first steps compile and allocate is done.
        folder: gets ``cost.json`` and ``cost.png``; by default nothing is written.

    Attributes:
        cost: a :class:`Cost`, after the step; None before it.

    Raises:
        HierAllreduceError: ``step`` is below 1.
    """

    def __init__(self, step: int = 100, folder: Optional[Union[str, Path]] = None):
        self.cost: Optional[Cost] = None
        self._steps_left = operator.index(step)
        self._folder = None if folder is None else Path(folder)
        if step < 1:
            raise HierAllreduceError(f"step={step}: steps are counted from 1")

    def before_run(self, run_context: Any) -> Any:
        """Ask for a trace of the step, if it is the one."""
        self._steps_left -= 1
        if self._steps_left:
            return None
        traced = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE)
        return tf1.train.SessionRunArgs(None, options=traced)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Print the cost of the traced step, and write the files."""
        if self._steps_left:
            return
        # Whatever fails here, a step without a trace or a full disk, training goes on.
        try:
            self.cost = cost(run_values.run_metadata, run_context.session.graph)
            print(self.cost)
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / "cost.json").write_text(self.cost.to_json(), encoding="utf-8")
                self.cost.draw(self._folder / "cost.png")
        except Exception as error:
            print(f"the cost of this step is not told, or not written: {error}")
