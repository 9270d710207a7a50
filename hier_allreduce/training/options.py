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

    @property
    def hosts(self) -> int:
        """H, the number of hosts."""
        return 1 if self.cluster is None else self.cluster.size


def checked_options(options: Options) -> Options:
    """Return the options of a front end, with the strategy that a name or a file stands for.

    Raises:
        HierAllreduceError: an option is invalid.
        ClusterError: ``cluster`` is no cluster.
    """
    average = configs.switch(options.average, "average")
    configs.one_of(options.update, "update", UPDATES)
    configs.function(
        options.transform,
        "transform",
        "from N reduced gradients to N gradients, such as"
        " lambda grads: tf.clip_by_global_norm(grads, 1.0)[0]",
    )
    every = configs.whole_number(options.broadcast_every, "broadcast_every")
    if options.check_replicas_every is not None:
        configs.whole_number(options.check_replicas_every, "check_replicas_every")
    check_cluster(options.cluster)
    strategy = strategy_from(options.strategy)
    return options._replace(average=average, strategy=strategy, broadcast_every=every)
