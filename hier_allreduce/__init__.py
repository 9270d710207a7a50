"""Hierarchical all-reduce for data-parallel training in TensorFlow, in plain TensorFlow ops.

::

    devices = ["/gpu:0", "/gpu:1", …]
    reduced = hier_allreduce.allreduce_grads(grads, devices, average=True)   # K×N in, K×N out

Importing this package imports no TensorFlow; the first use of a name that needs it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, List

from ._lazy import lazy
from ._version import __version__ as __version__

if TYPE_CHECKING:
    from .auditing.audit import audit as audit
    from .auditing.cost import cost as cost
    from .auditing.cost_hook import CostHook as CostHook
    from .cluster import Cluster as Cluster
    from .errors import AuditError as AuditError
    from .errors import ClusterError as ClusterError
    from .errors import HierAllreduceError as HierAllreduceError
    from .graph import allreduce_grads as allreduce_grads
    from .graph import allreduce_grads_and_vars as allreduce_grads_and_vars
    from .graph import allreduce_grads_hierarchical as allreduce_grads_hierarchical
    from .planning.plan import Copy as Copy
    from .planning.plan import Reduce as Reduce
    from .planning.plan import check as check
    from .planning.strategy import Strategy as Strategy
    from .training import TowerOptimizer as TowerOptimizer

_PUBLIC = {
    "auditing": ["CostHook", "audit", "cost"],
    "cluster": ["Cluster"],
    "errors": ["AuditError", "ClusterError", "HierAllreduceError"],
    "graph": ["allreduce_grads", "allreduce_grads_and_vars", "allreduce_grads_hierarchical"],
    "planning.plan": ["Copy", "Reduce", "check"],
    "planning.strategy": ["Strategy"],
    "training": ["TowerOptimizer"],
}
__all__ = sorted(name for public in _PUBLIC.values() for name in public)
__getattr__ = lazy(__name__, _PUBLIC)


def __dir__() -> List[str]:
    return sorted([*globals(), *__all__])
