"""The floor: the plain sum of the same bytes, without a graph.

Every byte of K gradients is read once and one sum is written once, on all cores of the process. No all-reduce in one
memory can beat it: no dispatch, no copies, and the result's memory is there already.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

# Numbers: half a MiB of the sum stays in a core's cache while the gradients are added to it. Shorter blocks take
# longer, since threads wait for the interpreter between them.
_BLOCK = 1 << 17
_AT_MOST = 1 << 30  # bytes of all gradients together


class Floor:
    """Adds up one float32 vector of ``tower_bytes`` bytes from each of ``towers`` towers.

    Beyond 1 GiB in all it adds up 1 GiB, and the time is to be multiplied by ``scale``: it is proportional.
    """

    name = "floor"

    def __init__(self, tower_bytes: int, towers: int, average: bool):
        size = max(1, min(tower_bytes, _AT_MOST // towers) // 4)
        self.scale = max(1.0, tower_bytes / (4 * size))
        self._grads = [np.full(size, tower, np.float32) for tower in range(towers)]
        self._sum = np.zeros(size, np.float32)
        self._factor = np.float32(1 / towers) if average else None
        self._cores = len(os.sched_getaffinity(0))
        self._workers = ThreadPoolExecutor(self._cores)

    def step(self) -> None:
        """One sum, or mean."""
        list(self._workers.map(self._every_block_from, range(self._cores)))

    def _every_block_from(self, first: int) -> None:
        for begin in range(first * _BLOCK, self._sum.size, self._cores * _BLOCK):
            part = slice(begin, begin + _BLOCK)
            total = self._sum[part]
            np.copyto(total, self._grads[0][part])
            for grad in self._grads[1:]:
                np.add(total, grad[part], out=total)
            if self._factor is not None:
                np.multiply(total, self._factor, out=total)
