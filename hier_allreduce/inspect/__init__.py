"""What TensorFlow executed, beside what was planned.

::

    RunMetadata ─► partitions ─► executed, built_sums ─► Audit         copies and sums, counted
                        └──────► tracing ─► Trace                      and when they happened
    Prediction ─────────────────────────────┘ bars, trace_file         beside when they should

``Audit.__str__`` and ``Trace.__str__`` are the reports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy
from .trace import predicted_trace

if TYPE_CHECKING:
    from .auditing import Audit as Audit
    from .auditing import audit as audit
    from .first_step import audit_first_step as audit_first_step
    from .partitions import executed_copies as executed_copies
    from .tracing import trace_step as trace_step

__all__ = ["Audit", "audit", "audit_first_step", "executed_copies", "predicted_trace", "trace_step"]
__getattr__ = lazy(
    __name__,
    {
        "auditing": ["Audit", "audit"],
        "first_step": ["audit_first_step"],
        "partitions": ["executed_copies"],
        "tracing": ["trace_step"],
    },
)
