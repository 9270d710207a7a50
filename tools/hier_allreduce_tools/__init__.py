"""Programs that train with hier_allreduce, measured and described.

::

    $ hier-allreduce tune -o best.yaml -- python train.py     the program's fastest all-reduce
    $ hier-allreduce doctor                                   this machine's GPUs and problems
    CostHook(…), CostCallback(…), .cost.cost(…)               where the time of one step goes

Importing this package imports no TensorFlow; the first use of a name of ``cost`` does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .entry import main

if TYPE_CHECKING:
    from .cost import CostHook as CostHook
    from .cost.tensorpack import CostCallback as CostCallback

__all__ = ["CostCallback", "CostHook", "main"]
# The function ``cost`` is not among them, because its folder has that name here.
_MODULES = {"CostCallback": "cost.tensorpack", "CostHook": "cost"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
