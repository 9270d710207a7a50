"""What a calibration measures with: copies and sums on K devices, each timed in seconds.

``DeviceTimer`` runs them with TensorFlow. The analysis knows only this interface, so that it can be tested with
machines whose links are known.
"""

from __future__ import annotations

import abc
from typing import List, NamedTuple, Sequence, Tuple

Pair = Tuple[int, int]  # sender and receiver


class Transfer(NamedTuple):
    """One copy of ``size`` bytes from device ``src`` to device ``dst``."""

    src: int
    dst: int
    size: int


class Timer(abc.ABC):
    """Times copies and sums; each call is one run.

    Attributes:
        devices: the number of devices, K.
        largest: the most bytes that one copy can move.
        one_memory: whether all devices share one memory, as CPU devices do. Then nothing else can be shared.
        exact: whether a run takes the same time whenever it is repeated, so that one is enough.
    """

    devices: int
    largest: int
    one_memory: bool = False
    exact: bool = False

    @abc.abstractmethod
    def together(self, transfers: Sequence[Transfer]) -> List[float]:
        """Return for each copy the seconds from a common start until its receiver has all bytes.

        Copies of one sender must have the same size.
        """

    @abc.abstractmethod
    def trains(self, pairs: Sequence[Pair], count: int, size: int) -> float:
        """Return the seconds of ``count`` copies of each pair, none of which waits for another one."""

    @abc.abstractmethod
    def hops(self, count: int, size: int) -> float:
        """Return the seconds of ``count`` copies of one value, each of which waits for the one before."""

    @abc.abstractmethod
    def sums(self, operands: int, count: int, size: int) -> float:
        """Return the seconds of ``count`` sums of ``operands`` tensors on device 0, each waiting for the one before."""
