"""Inside the user's program: the trace of one step, which tells what that step cost.

The program makes its steps itself, so :func:`trace_step` wraps ``Session.run`` until that step is
over. A ``tf.function``, and so Keras, runs no session, and has no such trace.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any, Callable, Optional

from hier_allreduce.compat import tf1
from hier_allreduce.errors import AuditError


def trace_step(step: int, clock: Path, tell: Callable[[str], None]) -> None:
    """Trace one of the program's steps when the program makes it.

    Args:
        step: its number, counted from 1.
        clock: the file that gets a line at every step.
        tell: gets the step's cost in a line.
    """
    run = tf1.Session.run

    def traced_run(
        session: Any,
        fetches: Any,
        feed_dict: Optional[Any] = None,
        options: Optional[Any] = None,
        run_metadata: Optional[Any] = None,
    ) -> Any:
        # The lines of the clock are counted, because a program runs more than its steps.
        made = clock.read_bytes().count(b"\n") if clock.exists() else 0
        if made >= step:
            tf1.Session.run = run
        # TensorFlow traces one run at a time, and other threads fill queues while a step runs.
        may_be_step = threading.current_thread() is threading.main_thread()
        if made != step - 1 or not may_be_step:
            return run(session, fetches, feed_dict, options, run_metadata)
        # The program's own options are copied, because it may use them again without a trace.
        with_trace = tf1.RunOptions()
        with_trace.CopyFrom(options or with_trace)
        with_trace.trace_level = tf1.RunOptions.FULL_TRACE
        metadata = tf1.RunMetadata() if run_metadata is None else run_metadata
        fetched = run(session, fetches, feed_dict, with_trace, metadata)
        # It is not imported before, because this module loads while the all-reduce is imported.
        from ..cost import cost

        # The run may be none of a step, because a program may fill a queue before its first one.
        with contextlib.suppress(AuditError):
            tell(cost(metadata, session.graph).summary)
        return fetched

    tf1.Session.run = traced_run
