"""Programs that train with hier_allreduce, measured and described.

::

    $ hier-allreduce tune -o best.yaml -- python train.py     the program's fastest all-reduce
    $ hier-allreduce doctor                                   this machine's GPUs and problems
    .cost.CostHook(…), .cost.tensorpack.CostCallback(…)       where the time of one step goes

Importing this package imports no TensorFlow; that of ``cost`` does.
"""

from __future__ import annotations

from .entry import main

__all__ = ["main"]
