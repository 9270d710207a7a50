"""What can be wrong, as one small tree. Every error is a ``ValueError`` too.

::

    HierAllreduceError
    ├── GradientError     the K×N matrix: rows, counts, kinds, shapes, dtypes, order
    ├── DeviceError       a device that is none, or that does not exist
    ├── StrategyError     algorithm, groups, average, and the other choices
    ├── VariableError     variables that differ between towers, or cannot be updated as asked
    ├── PlanError         a plan that would not give every device the sum
    ├── TopologyError     a machine description that is cut, or contradicts itself
    ├── ClusterError      a host that is gone, silent or different, or a list of hosts that is wrong
    ├── AuditError        what TensorFlow executed is not what the plan says
    └── BenchError        a model, table of shapes or contender that cannot be measured

They are raised while the graph is built, before the first op is added (``AuditError`` after the step that was looked
at, ``ClusterError`` also while hosts wait for each other), and say what was expected and what to do.
"""

from __future__ import annotations


class HierAllreduceError(ValueError):
    """Base of all errors of this package."""


class GradientError(HierAllreduceError):
    """The matrix of gradients cannot be reduced as it is."""


class DeviceError(HierAllreduceError):
    """Something given as a device is not one, or the machine does not have it."""


class StrategyError(HierAllreduceError):
    """A choice of how to reduce that does not exist or does not fit the devices."""


class VariableError(HierAllreduceError):
    """The towers' variables differ, or cannot be updated in the way that was asked for."""


class PlanError(HierAllreduceError):
    """A plan after which some device would not hold every contribution exactly once."""


class TopologyError(HierAllreduceError):
    """A description of a machine that cannot be understood."""


class ClusterError(HierAllreduceError):
    """A host that is gone, silent, or builds something else; or a list of hosts that cannot be right."""


class AuditError(HierAllreduceError):
    """The executed graph moved something else than the plan says."""


class BenchError(HierAllreduceError):
    """A model, a table of shapes or a contender that does not exist or cannot be read."""
