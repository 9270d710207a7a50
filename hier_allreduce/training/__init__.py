"""Training with the all-reduce: who updates a variable, and how the towers are kept equal.

::

    K×N pairs ─► all-reduce ─► update_towers       every tower updates its variables
              └► update_at_mains                   each variable is updated once, and copied
                     └► copies ─► find_copies ─► broadcast, comparison

Read ``update`` first. ``optimizer`` here and tensorpack's trainer call it.
"""

from .optimizer import TowerOptimizer

__all__ = ["TowerOptimizer"]
