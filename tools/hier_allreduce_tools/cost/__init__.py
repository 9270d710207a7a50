"""``cost``: where the time of one step goes."""

from __future__ import annotations

from .cost import Cost, cost
from .hook import CostHook

__all__ = ["Cost", "CostHook", "cost"]
