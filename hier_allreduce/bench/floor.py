"""The floor: Eigen's plain sum of the same bytes on one device, a lower bound for CPU devices.

``AddN`` adds up the K gradients in pieces on all cores. It reads every byte once and writes each piece of the sum once,
to memory that is freed while it is still in the cache. There are no copies, no page faults and almost no dispatch.
"""

from __future__ import annotations

from typing import Any, Sequence

import tensorflow as tf

from .case import Case, consumed, session, variables
from .models import GradientShape

_PIECE = 1 << 18  # float32 numbers: 1 MiB
_AT_MOST = 1 << 30  # bytes of all towers' gradients


class Floor:
    """A graph whose ``step()`` adds up the dense gradients of ``case`` and concatenates the sparse ones, in float32.

    If all gradients together exceed 1 GiB, a step adds up 1 GiB. Multiply its time by ``scale``: it is proportional.
    """

    name = "floor"

    def __init__(self, case: Case):
        self.scale = max(1.0, len(case.devices) * case.tower_bytes / _AT_MOST)
        dense, sparse = (_pieces(int(size / self.scale)) for size in case.dense_and_sparse_bytes)
        plain = Case((*dense, *sparse), ("/cpu:0",) * len(case.devices), case.average)
        graph = tf.Graph()
        with graph.as_default():
            grads, fill = variables(plain)
            columns = list(zip(*grads))
            with tf.device("/cpu:0"):
                results = [_sum(column, case.average) for column in columns[: len(dense)]]
                results += [tf.concat(column, 0) for column in columns[len(dense) :]]
            step = consumed([results], plain)
        self._session = session(graph, plain, optimize=False)  # Grappler would split the AddN
        self._session.run(fill)
        self.step = self._session.make_callable(step)

    def close(self) -> None:
        """Free the gradients."""
        self._session.close()


def _sum(column: Sequence[Any], average: bool) -> Any:
    total = tf.add_n(column)
    return total * (1.0 / len(column)) if average else total


def _pieces(size: int) -> Sequence[GradientShape]:
    """Return one vector for each MiB of ``size`` bytes, and a shorter one for the rest."""
    full, rest = divmod(size // 4, _PIECE)
    lengths = [_PIECE] * full
    if rest:
        lengths.append(rest)
    return [GradientShape("piece", (length,), "float32") for length in lengths]
