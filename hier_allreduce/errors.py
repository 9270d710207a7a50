"""The errors of this package, as one small tree. Every error is also a ``ValueError``.

::

    HierAllreduceError
    ├── GradientError     the K×N matrix: rows, counts, kinds, shapes, dtypes, order
    ├── DeviceError       not a valid device string, or no such device on this machine
    ├── StrategyError     algorithm, groups, average, and the other choices
    ├── VariableError     variables that differ between towers, or cannot be updated as requested
    ├── PlanError         a plan that would not give every device the sum
    ├── TopologyError     a machine description that is cut, or contradicts itself
    ├── ClusterError      a host that is gone, silent or different, or an invalid list of hosts
    ├── CalibrationError  measured times that are too noisy to be used
    ├── AuditError        TensorFlow executed something other than the plan
    └── BenchError        a model, table of shapes or contender that cannot be measured

They are raised while the graph is built, before the first op is added. ``AuditError`` is raised after the audited step,
``ClusterError`` also while hosts wait for each other. Every message says what was expected and what to do.
"""

from __future__ import annotations


class HierAllreduceError(ValueError):
    """The base of all errors of this package.

    A message may quote a file; its control characters are shown as escapes, because a terminal would obey them.
    """

    def __str__(self) -> str:
        return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in super().__str__())


class GradientError(HierAllreduceError):
    """The K×N matrix of gradients cannot be reduced as it is."""


class DeviceError(HierAllreduceError):
    """A device string is invalid, or this machine has no such device."""


class StrategyError(HierAllreduceError):
    """A choice of how to reduce does not exist, or does not fit the devices."""


class VariableError(HierAllreduceError):
    """The towers' variables differ, or cannot be updated as requested."""


class PlanError(HierAllreduceError):
    """After this plan some device would not hold every contribution exactly once."""


class TopologyError(HierAllreduceError):
    """The description of a machine cannot be understood."""


class ClusterError(HierAllreduceError):
    """A host is gone or silent, or builds a different graph; or the list of hosts is invalid."""


class CalibrationError(HierAllreduceError):
    """Copies or sums cannot be measured, or their times are too noisy to be used."""


class AuditError(HierAllreduceError):
    """The executed graph moved something other than what the plan says."""


class BenchError(HierAllreduceError):
    """A model, a table of shapes or a contender does not exist or cannot be read."""
