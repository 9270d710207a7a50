"""What a program that ``tune`` measures does otherwise than one that only trains.

::

    front end ──► baseline          another library's all-reduce instead of ours
    checked_layout ──► strategy     another strategy than the program's
                   └──► planned     looks at the layout
    add_ops, baselines ──► reduced  adds a clock to the results

All other programs have a :class:`Measurement` itself, which changes nothing.
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

from ..planning.chunks import Load
from ..planning.strategy import Strategy
from .layout import Layout

Rows = Sequence[Tuple[Any, ...]]


class Measurement:
    """What a program does at four moments of an all-reduce; a subclass does something else."""

    def baseline(self, front_end: str, update: str = "replicated") -> str:
        """Return which all-reduce of another library a front end uses; ``""`` for ours.

        Args:
            front_end: ``"keras"`` or ``"tensorpack"``; towers ask nothing.
            update: how the program updates its variables.
        """
        return ""

    def strategy(self, strategy: Strategy, hosts: int) -> Strategy:
        """Return the strategy to plan with, instead of the program's."""
        return strategy

    def planned(self, layout: Layout, strategy: Strategy, load: Optional[Load]) -> None:
        """Look at a layout, and at what it was made from; no op exists yet."""

    def reduced(self, rows: Rows) -> Rows:
        """Return K rows of N reduced gradients, with what is added to them."""
        return rows


_used: List[Measurement] = [Measurement()]


def measurement() -> Measurement:
    """Return the measurement of this process."""
    return _used[-1]


def use(replacement: Measurement) -> None:
    """Let the all-reduces that are built from now on use another measurement."""
    _used.append(replacement)
