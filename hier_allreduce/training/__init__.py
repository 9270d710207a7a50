"""Training with the all-reduce: who updates a variable, and how the towers are kept equal.

::

    K×N (gradient, variable) pairs ─► all-reduce ─► update_towers       every tower updates its variables
                                   └► update_at_mains                   each variable is updated once, and copied
                                          └► Updated ─► find_copies ─► broadcast, Drift

``update`` is to be read first. Both front ends, ``optimizer`` here and tensorpack's trainer, call it.
"""

from __future__ import annotations

from .main_update import update_at_mains
from .optimizer import TowerOptimizer
from .replicas import broadcast, differences, drift_of, find_copies
from .update import Pairs, Updated, check_options, update_towers
from .wrapped import check_optimizer, held_by, patched

__all__ = [
    "Pairs",
    "TowerOptimizer",
    "Updated",
    "broadcast",
    "check_optimizer",
    "check_options",
    "differences",
    "drift_of",
    "find_copies",
    "held_by",
    "patched",
    "update_at_mains",
    "update_towers",
]
