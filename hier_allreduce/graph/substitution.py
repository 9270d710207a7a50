"""The seam through which a program that is measured takes another all-reduce.

::

    checked_layout ──► choose(Call) ──► Substitute.strategy        plans with another strategy
    all_reduce     ──► Substitute.reduce, instead of our ops       another library's all-reduce
                   ──► Substitute.then                             adds a clock to the results

Only :func:`substitute` sets it. Without it nothing here does anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

from ..planning.strategy import Strategy
from .devices import hosts_of

if TYPE_CHECKING:
    from ..cluster import Cluster

Rows = Sequence[Sequence[Any]]  # K×N gradients


class Call(NamedTuple):
    """An all-reduce that a program is about to build; it has no op yet.

    ::

        hier_allreduce.substitute(lambda call: print(call.hosts) or hier_allreduce.Substitute())
    """

    rows: Rows  # K×N gradients
    devices: Tuple[Any, ...]  # K
    average: bool  # the mean instead of the sum
    strategy: Strategy  # the program's
    cluster: Optional[Cluster] = None  # the hosts; None for one
    front_end: str = "towers"  # or "keras", "tensorpack"
    update: str = ""  # "replicated", "once" or "sharded"; empty if the program itself updates
    arguments: Tuple[Any, ...] = ()  # of "keras": those of CrossDeviceOps.batch_reduce

    @property
    def hosts(self) -> int:
        """H, the number of hosts."""
        return hosts_of(self.cluster)


class Substitute(NamedTuple):
    """What is built instead; each field left out means: as without it.

    ::

        Substitute(strategy=Strategy("tree"))      # the same all-reduce, with another plan
        Substitute(reduce=lambda rows: rows)       # none, to measure a step without it
    """

    strategy: Optional[Strategy] = None  # to plan with
    reduce: Optional[Callable[[Rows], Rows]] = None  # K×N gradients to K×N sums or means
    then: Optional[Callable[[Rows], Rows]] = None  # adds ops to K×N reduced gradients


Choose = Callable[[Call], Substitute]
_chosen: List[Choose] = []


def substitute(choose: Optional[Choose]) -> None:
    """Let a function choose what is built in the place of every all-reduce from now on.

    It is for programs that measure, such as ``hier-allreduce tune``::

        tree = hier_allreduce.Strategy("tree")
        hier_allreduce.substitute(lambda call: hier_allreduce.Substitute(strategy=tree))

    Args:
        choose: gets a :class:`Call`, returns a :class:`Substitute`, and adds no op. It may raise an
            error, which the program then gets. None ends the substitution.
    """
    _chosen[:] = [] if choose is None else [choose]


def chosen_for(call: Call) -> Substitute:
    """Return what is built instead of an all-reduce."""
    return _chosen[0](call) if _chosen else Substitute()
