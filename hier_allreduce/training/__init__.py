"""Training with the all-reduce: who updates a variable, and how the towers are kept equal.

::

                    ┌─► replicated    every tower updates its variables ──────────┐
    K×N gradients ──┼─► sharded       each variable is updated on its root ─► copies ─► equal towers
     and variables  └─► once          tower 0 calls the optimizer ─────────► copies ─┘      │
                                                                                replicas: broadcast,
                                                                                comparison

Read ``update`` first. ``optimizer`` here and tensorpack's trainer call it.
"""

from .optimizer import TowerOptimizer

__all__ = ["TowerOptimizer"]
