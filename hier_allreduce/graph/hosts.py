"""Several hosts as the graph sees them: their number, and how they add up a tensor.

``hier_allreduce.cluster`` implements both classes.
"""

from __future__ import annotations

from typing import Any, Mapping

from .gradients import Matrix


class CrossHostReduce:
    """The step that adds a host's complete sums over all hosts. This base class is for one host and does nothing.

    Attributes:
        hosts: the number of hosts.
    """

    hosts = 1

    def all_reduce(self, tensor: Any, root: int, name: str) -> Any:
        """Return the sum of all hosts' tensors; called under the root's device."""
        return tensor


class HostGroup:
    """The hosts that all-reduce together: the base class of :class:`hier_allreduce.Cluster`."""

    @property
    def size(self) -> int:
        """The number of hosts."""
        raise NotImplementedError

    def across(self, name: str, grads: Matrix, facts: Mapping[str, Any]) -> CrossHostReduce:
        """Return what adds up this host's sums of ``grads`` over all hosts.

        Args:
            name: the name of this all-reduce in errors.
            grads: this host's gradients, K×N.
            facts: what else must be equal on all hosts, as JSON.
        """
        raise NotImplementedError

    def check_session(self, session: Any) -> None:
        """Raise an error if all-reduces over several hosts cannot complete in ``session``."""
        raise NotImplementedError
