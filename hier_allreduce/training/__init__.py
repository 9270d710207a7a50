"""Training with the all-reduce: which tower updates a variable, and how the towers stay equal.

::

    K rows of N (gradient, variable) pairs ─► update: "replicated" or "main" ─► one train op
                                          └─► replicas: broadcast, and the largest difference between towers
"""

from __future__ import annotations

from .main_update import update_at_mains
from .optimizer import TowerOptimizer
from .replicas import Replicas, TowerUpdate, differences, drift, find_replicas, match_created
from .replicated_update import update_replicated
from .updates import Updated, UpdateOptions
from .variables import Pairs, all_variables, parse_slot_name
from .wrapped_optimizers import held_by, patched, refuse_unfit, sum_advice

__all__ = [
    "Pairs",
    "Replicas",
    "TowerOptimizer",
    "TowerUpdate",
    "UpdateOptions",
    "Updated",
    "all_variables",
    "differences",
    "drift",
    "find_replicas",
    "held_by",
    "match_created",
    "parse_slot_name",
    "patched",
    "refuse_unfit",
    "sum_advice",
    "update_at_mains",
    "update_replicated",
]
