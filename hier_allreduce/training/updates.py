"""Options of the update after the all-reduce: what updates a variable, and how towers stay equal.

::

    update="replicated"                          update="main"
    every tower gets the reduced gradients       each variable's main gets its reduced gradient,
    and updates its own variables                updates it there once, and copies the new value to the others

With mains chosen by bytes, ``"main"`` keeps every optimizer slot once, spread over the devices, instead of K times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, NamedTuple, Union

from ..errors import HierAllreduceError
from ..graph import check_average
from ..planning import Strategy

UPDATES = ("replicated", "main")


@dataclass(frozen=True)
class UpdateOptions:
    """How K towers are updated and stay equal: options of ``TowerOptimizer`` and ``HierarchicalTrainer``.

    Attributes:
        average: True for the mean of the gradients over all towers, False for their sum. The sum comes with a warning
            that says what to change in the optimizer.
        strategy: how to reduce.
        update: ``"replicated"``: every tower updates its own variables. ``"main"``: each variable's main updates it
            once and copies the new value to the other towers, so that optimizer slots exist once instead of K times.
        broadcast: when tower 0's variables (weights, slots, moving averages) are copied to the other towers:
            ``"start"`` (tensorpack's trainers: also at the end of every epoch), ``"never"``, or a number of steps: then
            also after every so many. Each train op of ``TowerOptimizer`` counts its own steps, and copies no variable
            that another one trains.
        check_replicas_every: the number of steps between comparisons of the towers, each of which reports the largest
            difference; 0: never.

    Raises:
        HierAllreduceError: ``average`` is not a bool; or another option is invalid, or ``update="main"`` and the
            strategy cuts variables over several mains.
    """

    average: bool
    strategy: Strategy
    update: str = "replicated"
    broadcast: Union[str, int] = "start"
    check_replicas_every: int = 0

    def __post_init__(self) -> None:
        check_average(self.average)
        if self.update not in UPDATES:
            raise HierAllreduceError(f"update={self.update!r} is unknown; there are {', '.join(map(repr, UPDATES))}")
        if self.update == "main":
            _refuse_cut_variables(self.strategy)
        if self.broadcast not in ("start", "never"):
            _check_period("broadcast", self.broadcast, least=1, other='"start" or "never"')
        _check_period("check_replicas_every", self.check_replicas_every, least=0, other="or 0 (never)")

    @property
    def broadcast_steps(self) -> int:
        """The number of steps between copies of tower 0's variables; 0 if there are none during the steps."""
        return 0 if isinstance(self.broadcast, str) else self.broadcast


def _refuse_cut_variables(strategy: Strategy) -> None:
    if strategy.splits > 1:
        raise HierAllreduceError(
            f"splits={strategy.splits}: this strategy cuts gradients over several mains, but with update='main' each"
            " variable has one; leave it at 0"
        )


def _check_period(name: str, steps: Any, least: int, other: str) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < least:
        raise HierAllreduceError(f"{name}={steps!r}: expected a number of steps, {other}")


class Updated(NamedTuple):
    """Update ops and the variables that they created: an entry for each tower, or one at the mains."""

    ops: List[Any]
    created: List[List[Any]]
