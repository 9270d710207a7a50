"""Several hosts, as the graph sees them. ``hier_allreduce.cluster`` implements this."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from .matrix import Column


class HostGroup:
    """The hosts that all-reduce together: the base class of :class:`hier_allreduce.Cluster`."""

    @property
    def size(self) -> int:
        """The number of hosts."""
        raise NotImplementedError

    def across(self, name: str, columns: Sequence[Column], facts: Mapping[str, Any]) -> Any:
        """Return an object with the number of ``hosts``, and ``all_reduce(tensor, root, name)``: the sum over hosts.

        Args:
            name: of this all-reduce, in errors.
            columns: this host's N columns.
            facts: further values that are equal on all hosts, as JSON.
        """
        raise NotImplementedError

    def check_session(self, session: Any) -> None:
        """Raise an error if all-reduces over several hosts cannot complete in ``session``."""
        raise NotImplementedError
