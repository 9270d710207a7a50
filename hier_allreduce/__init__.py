"""Hierarchical all-reduce for data-parallel training in TensorFlow, in plain TensorFlow ops.

::

    devices = ["/gpu:0", "/gpu:1", …]
    reduced = hier_allreduce.allreduce_grads(grads, devices, average=True)   # K×N in, K×N out

Importing this package imports no TensorFlow; the first use of a name that needs it does.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any, List

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from .auditing.audit import audit as audit
    from .cluster import Cluster as Cluster
    from .errors import AuditError as AuditError
    from .errors import ClusterError as ClusterError
    from .errors import HierAllreduceError as HierAllreduceError
    from .graph import allreduce_grads as allreduce_grads
    from .graph import allreduce_grads_and_vars as allreduce_grads_and_vars
    from .graph import allreduce_grads_hierarchical as allreduce_grads_hierarchical
    from .graph.copy_check import CopyCheck as CopyCheck
    from .graph.copy_check import copy_check as copy_check
    from .graph.record import AllReduce as AllReduce
    from .graph.record import SentTensor as SentTensor
    from .graph.record import all_reduces as all_reduces
    from .graph.substitution import Call as Call
    from .graph.substitution import Substitute as Substitute
    from .graph.substitution import substitute as substitute
    from .planning.plan import Copy as Copy
    from .planning.plan import Reduce as Reduce
    from .planning.plan import check as check
    from .planning.strategy import Strategy as Strategy
    from .training import TowerOptimizer as TowerOptimizer

_MODULE_BY_NAME = {
    "AllReduce": "graph.record",
    "AuditError": "errors",
    "Call": "graph.substitution",
    "Cluster": "cluster",
    "ClusterError": "errors",
    "Copy": "planning.plan",
    "CopyCheck": "graph.copy_check",
    "HierAllreduceError": "errors",
    "Reduce": "planning.plan",
    "SentTensor": "graph.record",
    "Strategy": "planning.strategy",
    "Substitute": "graph.substitution",
    "TowerOptimizer": "training",
    "all_reduces": "graph.record",
    "allreduce_grads": "graph",
    "allreduce_grads_and_vars": "graph",
    "allreduce_grads_hierarchical": "graph",
    "audit": "auditing",
    "check": "planning.plan",
    "copy_check": "graph.copy_check",
    "substitute": "graph.substitution",
}
__all__ = list(_MODULE_BY_NAME)
# Its lines are of the level INFO; logging.basicConfig(level="INFO") shows them.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_MODULE_BY_NAME[name]}", __name__)
    # The package keeps it, so that later uses do not call this function.
    globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__() -> List[str]:
    return sorted([*globals(), *__all__])
