"""One K×N matrix of gradients in, one K×N matrix of reduced gradients out: a plan as TensorFlow ops.

``allreduce`` is to be read first. ``record`` is for the audit.
"""

from __future__ import annotations

from .allreduce import (
    allreduce_grads,
    allreduce_grads_and_vars,
    allreduce_grads_hierarchical,
    begin,
    reduce_layout,
)
from .devices import device_strings
from .mains import copy_from_mains, copy_from_tower_0, first_half

__all__ = [
    "allreduce_grads",
    "allreduce_grads_and_vars",
    "allreduce_grads_hierarchical",
]
__all__ += [
    "begin",
    "copy_from_mains",
    "copy_from_tower_0",
    "device_strings",
    "first_half",
    "reduce_layout",
]
