"""What happens around the all-reduce: who updates the variables, and how the towers stay equal.

::

    K rows of N (gradient, variable) pairs ─► update: "replicated" or "main" ─► one train op
                                          └─► replicas: broadcast, and the largest difference between towers
"""

from __future__ import annotations

from .optimizer import TowerOptimizer
from .replicas import Replicas, check_period, differences, drift, find_replicas, made_alike
from .updates import (
    UPDATES,
    all_variables,
    check_update,
    held_by,
    owned,
    refuse_unfit,
    sum_advice,
    update_at_mains,
    update_replicated,
)

__all__ = [
    "UPDATES",
    "Replicas",
    "TowerOptimizer",
    "all_variables",
    "check_period",
    "check_update",
    "differences",
    "drift",
    "find_replicas",
    "held_by",
    "made_alike",
    "owned",
    "refuse_unfit",
    "sum_advice",
    "update_at_mains",
    "update_replicated",
]
