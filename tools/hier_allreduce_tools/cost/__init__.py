"""``cost``: where the time of one step goes."""

from __future__ import annotations

from .cost import Cost, cost
from .cost_hook import CostHook

__all__ = ["Cost", "CostHook", "cost"]
