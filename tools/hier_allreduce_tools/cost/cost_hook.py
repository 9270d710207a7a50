"""The cost of one step of a ``MonitoredSession``, without a change of its loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional, Union

from hier_allreduce.compat import tf1
from hier_allreduce.errors import AuditError, HierAllreduceError
from hier_allreduce.graph.record import log_once
from .cost import Cost, cost

_BASE: Any = tf1.train.SessionRunHook


class CostHook(_BASE):  # type: ignore[misc]
    """Traces one step of a ``MonitoredSession`` or an estimator, and logs what it cost.

    ::

        hook = hier_allreduce.CostHook(step=100, folder="cost")
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
            …                      # hier_allreduce: step 103.7 ms; after the pass 3.1 ms: …

    The line goes to the logger ``hier_allreduce``, or to standard error if the program has set up
    no logging. No other step is traced, and training goes on if this one could not be.

    Args:
        step: the number of the ``session.run`` that is traced, from 1; by default 100, when what
            the first steps compile and allocate is done.
        folder: gets ``cost.txt`` with all tables, ``cost.json`` and, with matplotlib, ``cost.png``.
            Without it nothing is written.

    Attributes:
        cost: a :class:`Cost`, after the step; None before it.

    Raises:
        HierAllreduceError: ``step`` is no whole number from 1 on.
    """

    def __init__(self, step: int = 100, folder: Optional[Union[str, Path]] = None):
        if not isinstance(step, int) or isinstance(step, bool) or step < 1:
            raise HierAllreduceError(f"step={step!r}: expected the number of a step, from 1 on")
        self.cost: Optional[Cost] = None
        self._steps_left = step
        self._folder = None if folder is None else Path(folder)

    def before_run(self, run_context: Any) -> Any:
        """Ask for a trace of the step, if it is the one."""
        self._steps_left -= 1
        if self._steps_left:
            return None
        traced = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE)
        return tf1.train.SessionRunArgs(None, options=traced)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Log the cost of the traced step, and write the files."""
        if self._steps_left:
            return
        try:
            self.cost = cost(run_values.run_metadata, run_context.session.graph)
        except AuditError as error:
            log_once(f"no cost of this step: {error}")
            return
        log_once(self.cost.summary)
        if self._folder is None:
            return
        # Whatever fails here, a full disk or an old matplotlib, training goes on.
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / "cost.txt").write_text(f"{self.cost}\n", encoding="utf-8")
            (self._folder / "cost.json").write_text(self.cost.to_json() + "\n", encoding="utf-8")
            self.cost.draw(self._folder / "cost.png")
        except Exception as error:
            log_once(f"not all of {self._folder} is written: {error}")
