"""What the graph needs to know about several hosts: how many there are, and how they add up a tensor.

``hier_allreduce.cluster`` has the hosts themselves.
"""

from __future__ import annotations

from typing import Any, Mapping, Optional

from ..topology import Network
from .gradients import Matrix


class CrossHostReduce:
    """Adds up each complete sum of a host over all hosts. This one is for one host, and does nothing.

    Attributes:
        hosts: the number of hosts.
    """

    hosts = 1

    def all_reduce(self, tensor: Any, root: int, name: str) -> Any:
        """Return the sum of all hosts' tensors; called under the root's device."""
        return tensor


class HostGroup:
    """The hosts that all-reduce together: the base class of :class:`hier_allreduce.Cluster`.

    Attributes:
        network: what joins the hosts, or None where that is not known.
    """

    network: Optional[Network] = None

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
