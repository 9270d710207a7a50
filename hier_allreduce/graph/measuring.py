"""The one hook of the all-reduce: what a program that is being measured does otherwise.

::

    front end ──► baseline          another library's all-reduce instead of ours
    checked_layout ──► strategy     another strategy than the program's
                   └──► planned     looks at the layout
    add_ops, baselines ──► reduced  adds a clock to the results

In all other programs the hook is a :class:`Hook` itself, which changes nothing.
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

from ..planning.chunks import Load
from ..planning.strategy import Strategy
from .layout import Layout

Rows = Sequence[Tuple[Any, ...]]


class Hook:
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
        """Return K rows of N reduced gradients, with what the hook adds to them."""
        return rows


_used: List[Hook] = [Hook()]


def hook() -> Hook:
    """Return the hook of this process."""
    return _used[-1]


def use(replacement: Hook) -> None:
    """Let the all-reduces that are built from now on use another hook."""
    _used.append(replacement)
