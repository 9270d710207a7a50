"""Hierarchical all-reduce for data-parallel training in TensorFlow graph mode, in plain TensorFlow ops.

::

    reduced = hier_allreduce.allreduce_grads(grads, ["/gpu:0", "/gpu:1", …], average=True)   # K×N in, K×N out

Importing this package imports no TensorFlow; the first use of a name that needs it does.
"""

from __future__ import annotations

import importlib
from typing import Any, List

__version__ = "0.1.0"

_HOME = {
    "allreduce_grads": "allreduce",
    "allreduce_grads_hierarchical": "allreduce",
    "allreduce_grads_and_vars": "allreduce",
    "TowerOptimizer": "optimizer",
    "audit": "auditing",
    "Audit": "auditing",
    "Cluster": "cluster",
    "Plan": "plan",
    "Reduce": "plan",
    "Copy": "plan",
    "verify": "plan",
    "Strategy": "strategy",
    "HierAllreduceError": "errors",
    "GradientError": "errors",
    "DeviceError": "errors",
    "StrategyError": "errors",
    "VariableError": "errors",
    "PlanError": "errors",
    "TopologyError": "errors",
    "AuditError": "errors",
    "ClusterError": "errors",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> List[str]:
    return sorted([*globals(), *__all__])
