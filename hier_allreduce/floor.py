"""The floor: the plain sum of the same bytes, without a graph.

Every byte of K gradients is read once and one sum is written once, on all cores of the process: no dispatch, no
copies, and the result's memory is there already. Only an all-reduce whose results are dropped while they are still in
the cache can take less.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Iterator

import numpy as np

# Numbers: half a MiB of the sum stays in a core's cache while the gradients are added to it. Shorter blocks take
# longer, since threads wait for the interpreter between them.
_BLOCK = 1 << 17
_AT_MOST = 1 << 30  # bytes of all gradients together


class Floor:
    """Adds up what is dense, and puts the rows of what is sparse one tower's behind the other's; all as float32.

    Beyond 1 GiB in all it takes 1 GiB, and the time is to be multiplied by ``scale``: it is proportional.

    Args:
        dense_bytes: of one tower.
        sparse_bytes: of one tower: values and indices of the rows it has.
        towers: K.
        average: the mean instead of the sum.
    """

    name = "floor"

    def __init__(self, dense_bytes: int, sparse_bytes: int, towers: int, average: bool):
        self.scale = max(1.0, towers * (dense_bytes + sparse_bytes) / _AT_MOST)
        dense, sparse = (int(size / self.scale) // 4 for size in (dense_bytes, sparse_bytes))
        self._grads = [np.full(dense, tower, np.float32) for tower in range(towers)]
        self._sum = np.zeros(dense, np.float32)
        self._rows = np.ones(towers * sparse, np.float32)
        self._gathered = np.zeros(towers * sparse, np.float32)
        self._factor = np.float32(1 / towers) if average else None
        self._cores = len(os.sched_getaffinity(0))
        self._workers = ThreadPoolExecutor(self._cores)

    def step(self) -> None:
        """One sum, or mean."""
        list(self._workers.map(self._every_block_from, range(self._cores)))

    def _every_block_from(self, first: int) -> None:
        for part in self._blocks(first, self._sum.size):
            total = self._sum[part]
            np.copyto(total, self._grads[0][part])
            for grad in self._grads[1:]:
                np.add(total, grad[part], out=total)
            if self._factor is not None:
                np.multiply(total, self._factor, out=total)
        for part in self._blocks(first, self._gathered.size):
            np.copyto(self._gathered[part], self._rows[part])

    def _blocks(self, first: int, size: int) -> Iterator[slice]:
        return (slice(begin, begin + _BLOCK) for begin in range(first * _BLOCK, size, self._cores * _BLOCK))
