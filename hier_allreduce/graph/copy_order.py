"""Copies leave in the plan's order: control edges between what each sender sends.

Grappler sorts nodes anew, and a node with more than eight consumers keeps its edges in a hash set, so without these
edges a sender's copies leave in an order that nobody chose::

    sender    value ─► turn ─────► copy to GPU3
                         ┊ control edge
              value ─► turn ─────► copy to GPU1
"""

from __future__ import annotations

from typing import Any, List, Sequence

from ..planning import Plan, issued_before
from .compat import tf1

TURN = "PlaceholderWithDefault"  # the type of the op that takes turns: Grappler cannot see through it


class CopyOrder:
    """Gives each outgoing copy of a plan its turn; called for one copy after another, in the plan's order.

    A copy follows only copies of its own bucket, whose gradients become ready at the same time: see
    :func:`.planning.issued_before`.
    """

    def __init__(self, plan: Plan, devices: Sequence[Any]):
        self._devices = devices
        self._before = issued_before(plan)
        followed = {other for before in self._before for other in before}
        self._alone = [not before and copy not in followed for copy, before in enumerate(self._before)]
        self._turns: List[Any] = []

    def turn(self, src: int, value: Any, name: str) -> Any:
        """Return ``value`` on ``src`` once it is its turn."""
        copy = len(self._turns)
        if self._alone[copy]:
            self._turns.append(None)
            return value
        before = [self._turns[other] for other in self._before[copy]]
        with tf1.device(self._devices[src]), tf1.control_dependencies(before):
            # an identity would be dropped, and its control edges with it
            taken = tf1.placeholder_with_default(value, value.shape, name)
        self._turns.append(taken.op)
        return taken
