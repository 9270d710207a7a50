"""K×N gradients in, K×N reduced gradients out: a plan as TensorFlow ops.

``allreduce`` is to be read first. ``record`` is for the audit.
"""

from __future__ import annotations

from .allreduce import (
    add_ops,
    allreduce_grads,
    allreduce_grads_and_vars,
    allreduce_grads_hierarchical,
    checked_layout,
    copy_from_roots,
    copy_from_tower_0,
    layout_of,
    sums_on,
    sums_only,
)
from .devices import device_strings

__all__ = ["add_ops", "allreduce_grads", "allreduce_grads_and_vars"]
__all__ += ["allreduce_grads_hierarchical", "checked_layout", "copy_from_roots"]
__all__ += ["copy_from_tower_0", "device_strings", "layout_of", "sums_on", "sums_only"]
