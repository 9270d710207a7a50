"""Hierarchical all-reduce for data-parallel training in TensorFlow graph mode, in plain TensorFlow ops.

::

    reduced = hier_allreduce.allreduce_grads(grads, ["/gpu:0", "/gpu:1", …], average=True)   # K×N in, K×N out

Importing this package imports no TensorFlow; the first use of a name that needs it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, List

from ._lazy import lazy
from ._version import __version__ as __version__

if TYPE_CHECKING:
    from .calibration import Calibration as Calibration
    from .calibration import calibrate as calibrate
    from .cluster import Cluster as Cluster
    from .errors import AuditError as AuditError
    from .errors import CalibrationError as CalibrationError
    from .errors import ClusterError as ClusterError
    from .errors import DeviceError as DeviceError
    from .errors import GradientError as GradientError
    from .errors import HierAllreduceError as HierAllreduceError
    from .errors import PlanError as PlanError
    from .errors import StrategyError as StrategyError
    from .errors import TopologyError as TopologyError
    from .errors import VariableError as VariableError
    from .graph import allreduce_grads as allreduce_grads
    from .graph import allreduce_grads_and_vars as allreduce_grads_and_vars
    from .graph import allreduce_grads_hierarchical as allreduce_grads_hierarchical
    from .graph import gpu_lanes as gpu_lanes
    from .inspect import Audit as Audit
    from .inspect import audit as audit
    from .planning import Copy as Copy
    from .planning import Plan as Plan
    from .planning import Reduce as Reduce
    from .planning import Strategy as Strategy
    from .planning import verify as verify
    from .topology import Topology as Topology
    from .training import TowerOptimizer as TowerOptimizer
    from .tuning import Tuned as Tuned
    from .tuning import save_shapes as save_shapes
    from .tuning import tune as tune

_PUBLIC = {
    "calibration": ["Calibration", "calibrate"],
    "cluster": ["Cluster"],
    "errors": [
        "AuditError",
        "CalibrationError",
        "ClusterError",
        "DeviceError",
        "GradientError",
        "HierAllreduceError",
        "PlanError",
        "StrategyError",
        "TopologyError",
        "VariableError",
    ],
    "graph": [
        "allreduce_grads",
        "allreduce_grads_and_vars",
        "allreduce_grads_hierarchical",
        "gpu_lanes",
    ],
    "inspect": ["Audit", "audit"],
    "planning": ["Copy", "Plan", "Reduce", "Strategy", "verify"],
    "topology": ["Topology"],
    "training": ["TowerOptimizer"],
    "tuning": ["Tuned", "save_shapes", "tune"],
}
__all__ = sorted(name for names in _PUBLIC.values() for name in names)
__getattr__ = lazy(__name__, _PUBLIC)


def __dir__() -> List[str]:
    return sorted([*globals(), *__all__])
