"""``update="main"``: each variable's main updates it for all towers.

The optimizer gets the mains' variables under the names of tower 0's. So slots exist once, at the mains, and have the
names that they have on one device: a ``Saver`` and ``tf.train.Checkpoint`` restore them on any number of towers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

import tensorflow as tf

from ..compat import tf1
from ..errors import HierAllreduceError
from ..graph import begin, copy_from_mains, first_half, reduce_layout
from ..graph.names import variable_names, where
from ..planning import Strategy
from .replicas import Copies
from .update import Pairs
from .views import TowerViews, under_name_of
from .wrappers import held_by
from .writes import let_writes_wait

if TYPE_CHECKING:
    from ..cluster import Cluster


def update_at_mains(
    optimizer: Any,
    rows: Sequence[Pairs],
    devices: Sequence[Any],
    average: bool,
    strategy: Strategy,
    cluster: Optional[Cluster] = None,
) -> Tuple[Any, Copies]:
    """Reduce to the mains, update there once, and copy the new values over the same plan to all towers.

    Source: Chainer's MultiprocessParallelUpdater. There one device is the main of all variables; here mains hold about
    equal bytes.

    Arguments and errors are those of :func:`hier_allreduce.allreduce_grads_and_vars`, with ``rows`` from
    :func:`.update.check_variables`. A variable that is in its row twice, or has slots at another main, is an error too.
    Returns the op, and the copies that it updates.
    """
    names = variable_names(rows, devices)
    grads = [[grad for grad, _ in row] for row in rows]
    variables = [[var for _, var in row] for row in rows]
    first: Dict[int, int] = {}  # number of each variable
    for tower, row in enumerate(variables):
        for n, var in enumerate(row):
            if first.setdefault(id(var), n) != n:
                raise HierAllreduceError(
                    f"{where(tower, devices, n, names)}: the variable is in this row twice, and two mains would update"
                    " it; add up its gradients, or use update='replicated'"
                )
    layout = begin(grads, devices, average, strategy, cluster, names, whole=True)
    mains = layout.mains()
    views = {n: under_name_of(variables[0][n], variables[main][n]) for n, main in mains.items()}
    for n, main in mains.items():
        slots = [optimizer.get_slot(views[n], name) for name in optimizer.get_slot_names()]
        elsewhere = [
            slot.device
            for slot in slots
            if slot is not None and slot.device != variables[main][n].device
        ]
        if elsewhere:
            raise HierAllreduceError(
                f"{where(main, devices, n, names)}: this would be the variable's main, and an earlier apply_gradients"
                f" made its slots on {elsewhere[0]}; choose Strategy(main=0), or give each loss a TowerOptimizer with"
                " another optimizer"
            )
    reduced = reduce_layout(first_half(layout), average, "reduce_to_mains", cluster)
    pairs = [(reduced[main][n], views[n]) for n, main in sorted(mains.items())]
    graph = tf1.get_default_graph()
    number = len(graph.get_operations())
    with TowerViews(variables[:1], held_by(optimizer)).update_of(0):
        updated = optimizer.apply_gradients(pairs)
    let_writes_wait(
        graph.get_operations()[number:],
        [(reduced[main][n], variables[main][n]) for n, main in mains.items()],
    )
    values: List[Any] = [None] * len(names)
    for n, main in mains.items():
        with tf.control_dependencies([updated]), tf1.device(devices[main]):
            values[n] = variables[main][n].read_value()
    ops = [updated]
    for tower, copied in enumerate(copy_from_mains(values, layout)):
        with tf1.device(devices[tower]):
            ops += [
                variables[tower][n].assign(copied[n]).op
                for n, main in mains.items()
                if main != tower
            ]
    return tf.group(*ops), variables
