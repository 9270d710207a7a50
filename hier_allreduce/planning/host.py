"""The host during an all-reduce: it dispatches one op after another, some time ahead of the kernels of a backward pass.

::

    host    ─ kernels ─ op ─ kernels ─ op op ─ …       one op takes ``dispatch`` seconds
    tower       ══════════════════════════════════     runs what the host dispatched ``backlog`` seconds before
            |◄ backlog ►|                              every op of the all-reduce takes a part of this lead
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

# bytes of gradients for each second of a backward pass: ResNet-50's 102 MB in 60 ms, as in docs/cost-model.md
GRADIENTS_PER_SECOND = 102e6 / 60e-3


class BackwardPass(NamedTuple):
    """A backward pass during which gradients become ready, evenly over its bytes.

    Attributes:
        seconds: of the whole pass; 0 is an idle machine, on which all gradients are there.
        backlog: how many seconds of kernels the host has queued on a tower's compute stream.
    """

    seconds: float = 0.0
    backlog: float = 0.0


IDLE = BackwardPass()
BACKLOG = 10e-3  # seconds


def backward_pass(size: int, seconds: Optional[float] = None) -> BackwardPass:
    """Return a pass of so many seconds, by default of what is assumed for ``size`` bytes of gradients; 0 is idle."""
    seconds = size / GRADIENTS_PER_SECOND if seconds is None else seconds
    return BackwardPass(seconds, BACKLOG) if seconds else IDLE


class Host:
    """The host's time.

    Its ops for the all-reduce are paid from the lead: once they have taken more than ``backlog`` seconds, each further
    one makes the backward pass longer.

    Attributes:
        end: when the kernels of the backward pass are done.
    """

    def __init__(self, dispatch: float, backward: BackwardPass):
        self._dispatch, self._backward = dispatch, backward
        self._free = -math.inf
        self._left = backward.backlog  # of the lead
        self.end = backward.seconds

    def dispatched(self, now: float) -> float:
        """Return when the host gets to an op that is ready ``now``, and spend the time that the op takes."""
        start = max(now, self._free)
        self._free = start + self._dispatch
        if start < self.end:
            self._left -= self._dispatch
            self.end = self._backward.seconds + max(0.0, -self._left)
        return start

    def issues(self, ready: float) -> float:
        """Return when the host can issue what reads a gradient that a kernel makes at ``ready``, with no op before."""
        late = self.end - self._backward.seconds
        return ready - self._backward.backlog + late

    def queued(self, now: float) -> float:
        """Return when the kernels are done that are queued on a tower now."""
        return min(self.end, now + self._backward.backlog)
