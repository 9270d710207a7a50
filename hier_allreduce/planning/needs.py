"""What candidates need at least: bounds of their seconds, so that only what may be the best is simulated.

::

    pass ═══════════════════╗           a copy into a tower waits for the kernels that are queued there, at each hop:
    bucket 2     ▔▔─────────╫▔▔         hops that cannot begin before the end of the pass are done after it,
    bucket 3              ▔▔╫─▔▔─▔▔     by streams, links and a host that do one thing at a time

A bound is the largest of three: all late copies of the busiest resource; the last bucket alone (its longest chain, or
of its copies of a level and above the time before the first one and then the busiest resource); all ops of the host.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np

from ..topology import Topology, resources
from .host import BackwardPass
from .plan import Reduce, Step

_Time = Tuple[float, float]  # seconds, and seconds for each byte of a chunk


class Need(NamedTuple):
    """What a bucket of an algorithm's chunks needs, by level.

    A copy of level 1 waits for its gradient; one of level ``l``, for the queues of towers ``l - 1`` times too.

    Attributes:
        chunks: the number of its chunks.
        ops: the number of ops that the host dispatches.
        busy: levels × resources × 2: the time of the copies of this level and above.
        first: levels × 2: the least time before the first of these copies.
        ends: values × 2: the time until each chunk is on each device.
    """

    chunks: int
    ops: int
    busy: Any
    first: Any
    ends: Any


def need_of(steps: Sequence[Step], chunks: int, topology: Topology, towers: int) -> Need:
    """Return what a bucket with these steps needs on a machine, which has the steps' lanes too."""
    counted = _Counted(topology, towers)
    for step in steps:
        counted.add(step)
    return counted.need(chunks)


class _Counted:
    """The copies of a bucket, level by level; the last resource is the host."""

    def __init__(self, topology: Topology, towers: int):
        names, self._paths = resources(topology)
        self._speeds, self._host, self._towers = topology.speeds, len(names), towers
        self._latency = {(link.src, link.dst): link.latency for link in topology.links}
        self._busy: Dict[Tuple[int, int], List[float]] = defaultdict(lambda: [0.0, 0.0])  # (level, resource) → time
        self._first: Dict[int, _Time] = {}
        self._held: Dict[Tuple[int, int], Tuple[int, _Time]] = {}  # (device, chunk) → level and time of its value
        self._ops = 0

    def add(self, step: Step) -> None:
        """Count a step's copies, and its sum."""
        sources = step.srcs if isinstance(step, Reduce) else (step.src,)
        arrived = [self._copied(src, step.dst, step.chunk) for src in sources]
        has_own = isinstance(step, Reduce) and (step.dst < self._towers or (step.dst, step.chunk) in self._held)
        level = max(level for level, _ in arrived)
        seconds, per_byte = max(time for _, time in arrived)
        added = len(sources) + has_own
        if added > 1:
            self._busy[level, self._host][0] += self._speeds.dispatch
            seconds, per_byte = seconds + self._speeds.kernel, per_byte + (added + 1) / self._speeds.memory
        if has_own:
            level = max(level, self._held.get((step.dst, step.chunk), (0, (0.0, 0.0)))[0])
        self._held[step.dst, step.chunk] = level, (seconds, per_byte)
        self._ops += 2 * len(sources) + (added > 1)

    def _copied(self, src: int, dst: int, chunk: int) -> Tuple[int, _Time]:
        """Count one copy, and return its level and when it ends at least."""
        before, (seconds, per_byte) = self._held.get((src, chunk), (0, (0.0, 0.0)))
        level = max(1, before + (src < self._towers or dst < self._towers))
        path = self._paths[src, dst]
        self._busy[level, path[0][0]][0] += self._latency[src, dst]
        for resource, cost in path:
            self._busy[level, resource][1] += cost
        self._busy[level, self._host][0] += self._speeds.dispatch  # for its arrival
        self._busy[level - 1, self._host][0] += self._speeds.dispatch  # it was issued after the level before
        first = self._first.get(level, (np.inf, np.inf))
        self._first[level] = min(first[0], seconds), min(first[1], per_byte)
        return level, (seconds + self._latency[src, dst], per_byte + max(cost for _, cost in path))

    def need(self, chunks: int) -> Need:
        """Return the totals."""
        levels = 2 + max((level for level, _ in self._busy), default=0)
        busy = np.zeros((levels, self._host + 1, 2))
        for (level, resource), time in self._busy.items():
            busy[level, resource] = time
        first = np.array([self._first.get(level, (np.inf, np.inf)) for level in range(levels)])
        ends = np.array([time for _, time in self._held.values()] or [(0.0, 0.0)])
        return Need(chunks, self._ops, busy[::-1].cumsum(0)[::-1], np.minimum.accumulate(first[::-1])[::-1], ends)


class Needs:
    """The needs of n candidates of one machine, as arrays."""

    def __init__(self, needs: Sequence[Need], dispatch: float):
        self._needs, self._dispatch = needs, dispatch
        self._chunks = np.array([need.chunks for need in needs])
        self._ops = np.array([need.ops for need in needs])
        self._levels = max(len(need.busy) for need in needs)
        self._busy = np.zeros((len(needs), self._levels, *needs[0].busy.shape[1:]))
        for number, need in enumerate(needs):
            self._busy[number, : len(need.busy)] = need.busy

    def fewest_levels(self) -> List[int]:
        """Return the candidates whose copies wait the fewest times for queues."""
        levels = [len(need.busy) for need in self._needs]
        return [number for number, own in enumerate(levels) if own == min(levels)]

    def single(self, of: Sequence[int], size: float, shares: Sequence[float], backward: BackwardPass) -> Any:
        """Return bounds in seconds, 3 × n: of n candidates in buckets of these shares of ``size`` bytes.

        The three are: the late copies of the busiest resource; the last bucket alone; and the ops of the host.
        """
        late = self._late(of, size, shares, backward).sum(1).max(-1)
        by_host = self._by_host(self._ops[of] * len(shares), backward)
        return np.stack([late, self._last(of, size * shares[-1]), by_host])

    def mixed(
        self,
        size: float,
        shares: Sequence[float],
        backward: BackwardPass,
        last: int,
        early: Sequence[int],
        late: Sequence[int],
    ) -> Any:
        """Return bounds in seconds, 3 × early × late: of one candidate, and another one for the ``last`` buckets."""
        before = len(shares) - last
        first = self._late(early, size, shares, backward)[:, :before].sum(1)
        rest = self._late(late, size, shares, backward)[:, before:].sum(1)
        together = (first[:, None] + rest[None]).max(-1)
        by_host = self._by_host(self._ops[early][:, None] * before + self._ops[late][None] * last, backward)
        alone = np.broadcast_to(self._last(late, size * shares[-1])[None], by_host.shape)
        return np.stack([together, alone, by_host])

    def _late(self, of: Sequence[int], size: float, shares: Sequence[float], backward: BackwardPass) -> Any:
        """Return candidates × buckets × resources: seconds of the copies that cannot begin before the pass ends."""
        before_end = backward.seconds * (1 - np.cumsum(shares))
        levels = np.ones(len(shares), int)
        if backward.backlog:
            levels += np.ceil(before_end / backward.backlog - 1e-9).astype(int)
        busy = self._busy[np.asarray(of)[:, None], np.minimum(levels, self._levels - 1)]
        chunk_bytes = size * np.asarray(shares) / self._chunks[of][:, None]
        return busy[..., 0] + busy[..., 1] * chunk_bytes[..., None]

    def _last(self, of: Sequence[int], size: float) -> Any:
        """Return seconds that the last bucket takes, whatever else there is."""
        bounds = []
        for need in (self._needs[number] for number in of):
            at = np.array([1.0, size / need.chunks])
            bounds.append(max((need.ends @ at).max(), (need.first[1:-1] @ at + (need.busy[1:-1] @ at).max(1)).max()))
        return np.array(bounds)

    def _by_host(self, ops: Any, backward: BackwardPass) -> Any:
        """Return seconds: ops use up the lead and then make the pass longer, or come after it."""
        return ops * self._dispatch - backward.backlog if backward.seconds else ops * 0.0
