"""A trace of one step of each contender: JSON for Perfetto, and the summary."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ..inspect import audit, trace_step
from ..presets import write_text
from .case import Case
from .contenders import is_ours


def write_trace(folder: str, name: str, case: Case, run_metadata: Any, graph: Any) -> None:
    """Write ``NAME.json`` and ``NAME.txt`` for a contender's traced step.

    Ours is named by chunk and variable, with the plan's prediction where there is one; a peer's copies and sums by op.

    Raises:
        AuditError: ours did not execute its plan.
        HierAllreduceError: a file cannot be written.
    """
    file = Path(folder) / re.sub(r"[^\w.=-]+", "-", name)
    if is_ours(name):
        trace = audit(run_metadata, graph).trace(f"{file}.json")
    else:
        trace = trace_step(run_metadata, case.devices)
        trace.write(f"{file}.json")
    write_text(f"{file}.txt", f"{trace}\n")
