"""K×N gradients in, K×N reduced gradients out: a plan as TensorFlow ops.

``allreduce`` is to be read first, then ``collectives``. ``record`` says what was built.
"""

from __future__ import annotations

from .allreduce import (
    allreduce_grads,
    allreduce_grads_and_vars,
    allreduce_grads_hierarchical,
    checked_call,
    checked_layout,
)
from .collectives import all_gather, all_reduce, broadcast, reduce, reduce_scatter
from .devices import device_strings

__all__ = ["allreduce_grads", "allreduce_grads_and_vars", "allreduce_grads_hierarchical"]
__all__ += ["all_gather", "all_reduce", "broadcast", "reduce", "reduce_scatter"]
__all__ += ["checked_call", "checked_layout", "device_strings"]
