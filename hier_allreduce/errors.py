"""The errors of this package. Every one is a ``ValueError``.

::

    HierAllreduceError     invalid input: gradients, devices, strategies, files, plans; before the first op is added
    ├── ClusterError       a host that is gone, silent or different; also while hosts wait for each other
    └── AuditError         TensorFlow executed something other than the plan; after the audited step

Every message says what was expected and what to do. The classes differ in the program's next step: mend the input,
start the hosts again, stop training.
"""

from __future__ import annotations


class HierAllreduceError(ValueError):
    """Invalid input, and the base of all errors of this package.

    A message may quote a file; its control characters are shown as escapes, because a terminal would obey them.
    """

    __init__ = (
        Exception.__init__
    )  # by this, a tf.function knows that it can raise the error in its class

    def __str__(self) -> str:
        return "".join(
            c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in super().__str__()
        )


class ClusterError(HierAllreduceError):
    """A host is gone or silent, or builds a different graph; or the list of hosts is invalid."""


class AuditError(HierAllreduceError):
    """TensorFlow executed other copies than the planned ones."""
