"""What ran: planned = executed, and what it cost. ``audit`` and ``cost`` are to be read first."""

from __future__ import annotations

from .audit import Audit, Audited, audit
from .cost import Cost, cost
from .cost_hook import CostHook

__all__ = ["Audit", "Audited", "Cost", "CostHook", "audit", "cost"]
