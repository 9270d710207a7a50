"""The floor: the plain sum of the same bytes, by Eigen, on one device.

Every byte of K gradients is read once, in pieces that ``AddN`` adds up on all cores, and each piece of the sum is
written once, to memory that is free again before it has left the cache: no copies, no page faults, next to no dispatch.
"""

from __future__ import annotations

from typing import Any, Sequence

import tensorflow as tf

from .case import Case, consumed, session, variables
from .models import GradientShape

_PIECE = 1 << 18  # numbers, 1 MiB
_AT_MOST = 1 << 30  # bytes of all gradients together


class Floor:
    """``step()`` adds up what is dense in ``case``, and joins the towers' rows of what is sparse; all as float32.

    Beyond 1 GiB in all it takes 1 GiB, and the time is to be multiplied by ``scale``: it is proportional.
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
    """One vector for each MiB of ``size`` bytes, and a shorter one for the rest."""
    full, rest = divmod(size // 4, _PIECE)
    return [GradientShape("piece", (length,), "float32") for length in [_PIECE] * full + [rest] * bool(rest)]
