"""The options of a training: both front ends have the same, and check them here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, List, NamedTuple, Optional, Sequence

from .. import configs
from ..graph.rows import check_cluster
from ..planning.strategy import strategy_from

if TYPE_CHECKING:
    from ..cluster import Cluster

Transform = Callable[[List[Any]], Sequence[Any]]  # N reduced gradients to N gradients

UPDATES = ("replicated", "once", "sharded")


class Options(NamedTuple):
    """What the user chose: arguments of a :class:`.TowerOptimizer`."""

    average: bool
    strategy: Any  # a Strategy, once it is checked
    update: str  # one of UPDATES
    transform: Optional[Transform]
    broadcast_every: int
    check_replicas_every: Optional[int]
    cluster: Optional[Cluster]
    scopes: Optional[Sequence[str]] = None


def checked_options(options: Options) -> Options:
    """Return the options of a front end, with the strategy that a name or a file stands for.

    Raises:
        HierAllreduceError: an option is invalid.
        ClusterError: ``cluster`` is no cluster.
    """
    average = bool(configs.one_of(options.average, "average", (True, False)))
    configs.one_of(options.update, "update", UPDATES)
    broadcasts = configs.whole_number(options.broadcast_every, "broadcast_every")
    checks = options.check_replicas_every
    if checks is not None:
        checks = configs.whole_number(checks, "check_replicas_every")
    check_cluster(options.cluster)
    return options._replace(
        average=average,
        strategy=strategy_from(options.strategy),
        broadcast_every=broadcasts,
        check_replicas_every=checks,
    )
