"""The road of a gradient: K×N in, K×N out.

::

    all_grads ─► check ─► columns ─► lay_out ─► pack ─► run(schedule, values, Sum) ─► unpack ─► result
       K×N       matrix      N       layout    packing   planning, a Sum for each chunk  packing     K×N

Layouts hold every decision before the first op, so an error leaves the graph unchanged. Only this file knows which
``Sum`` a chunk has: plain ``sums``; beside it ``columns`` on CPU devices, ``half`` for 16 bits, ``rows`` of sparse
gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, List, Optional, Sequence, Tuple, Union

from .. import cluster as hosts_of_a_job  # imports the class at its first use
from ..compat import forget_colocation, tf1, without_autograph
from ..errors import ClusterError
from ..measured import with_candidate, with_clock
from ..planning import Strategy, run, strategy_from
from ..planning.chunks import Load
from ..planning.plan import complete_on, root_of
from .columns import Columns
from .devices import all_on_cpu, device_strings
from .half import NARROW_DTYPES, Half
from .layout import Layout, lay_out
from .lead import limit_lead
from .matrix import check_matrix, check_pairs, warn_of_references
from .names import check_scope, variable_names
from .packing import Packing
from .record import describe, log_once, record
from .rows import Rows, gradient
from .sums import Shared, Sum

if TYPE_CHECKING:
    from ..cluster import Cluster


@without_autograph
def allreduce_grads(
    all_grads: Sequence[Sequence[Any]],
    devices: Sequence[Any],
    average: bool = False,
    strategy: Union[str, Strategy, None] = None,
    name: Optional[str] = None,
    cluster: Optional[Cluster] = None,
) -> List[Tuple[Any, ...]]:
    """Return the sum (or mean) of all towers' gradients on every tower.

    ::

        grads[tower][variable]                      result[tower][variable]
        /gpu:0   a0   b0                            /gpu:0   a0+a1   b0+b1
        /gpu:1   a1   b1             ──►            /gpu:1   a0+a1   b0+b1

    The result is plain dataflow: any tensor of it can be fetched, and it has gradients. Small gradients share a chunk,
    which needs all of them (``Strategy(chunk_bytes=0)`` packs nothing).

    Statistics over all towers, in the forward pass, let every loss depend on all towers' variables. So take each
    tower's gradients of the sum of all towers' losses: ``tf.gradients(tf.add_n(losses), variables[k])``.

    A float16 or bfloat16 gradient is added in float32 and rounded once for each hop. Its mean is carried as a running
    mean, so that it is finite where the inputs are. The bound is in docs/how-it-works.md. ``tf.IndexedSlices``
    remain sparse: every tower gets the rows of all. None on every tower remains None.

    Args:
        all_grads: K×N, ``all_grads[tower][variable]``; rows may be any iterables.
        devices: K devices, ``devices[tower]``: strings, ``tf.DeviceSpec``, ``tf.config.LogicalDevice``.
        average: the mean instead of the sum. It is taken once, before the copies back, so that all towers hold
            the same bits.
        strategy: the name of an algorithm: ``"hierarchical"``, ``"tree"`` (caffe2 muji's), ``"flat"`` (one main for
            each chunk), ``"ring"``, or ``"auto"``, the default; or a :class:`Strategy`; or the name or path of its
            YAML file.
        name: the name scope of the ops.
        cluster: the :class:`hier_allreduce.Cluster` of several hosts with K towers each. All hosts call this function
            with the same arguments, and the sum, or mean, is over the towers of all hosts. Sparse gradients become
            dense, and the result has no gradients.

    Returns:
        A list of K tuples of N tensors; entry (k, n) lives on ``devices[k]``.

    Raises:
        HierAllreduceError: rows do not match the devices or each other, or an entry cannot be added up; or something in
            ``devices`` is not a device; or an unknown choice, or groups that miss or repeat a tower.
        ClusterError: not K towers on each host, or no graph for a session.
    """
    layout = begin(all_grads, device_strings(devices), average, strategy_from(strategy), cluster)
    return reduce_layout(layout, average, name, cluster)


@without_autograph
def allreduce_grads_hierarchical(
    all_grads: Sequence[Sequence[Any]], devices: Sequence[Any], average: bool = False
) -> List[Tuple[Any, ...]]:
    """Reduce as tensorpack's function of this name does at K = 8, for any K ≥ 1: K×N in, K×N out.

    Every variable travels alone, in groups of ⌈K/2⌉ and ⌊K/2⌋ towers whose mains rotate with the variable. For
    variable 0 of 8 towers: 0 ← 0 + 1 + 2 + 3; 4 ← 4 + 5 + 6 + 7; 4 ← 4 + 0; copies from 4 to 0, 5, 6, 7, and from 0 to
    1, 2, 3. Source of the schedule: tensorpack ``graph_builder/utils.py``.

    ::

        grads = allreduce_grads_hierarchical(grads, [f"/gpu:{k}" for k in range(8)], average=True)

    Raises: as :func:`allreduce_grads`.
    """
    return allreduce_grads(all_grads, devices, average, Strategy("hierarchical", chunk_bytes=0))


@without_autograph
def allreduce_grads_and_vars(
    all_grads_and_vars: Sequence[Sequence[Tuple[Any, Any]]],
    devices: Sequence[Any],
    average: bool = False,
    strategy: Union[str, Strategy, None] = None,
    name: Optional[str] = None,
    cluster: Optional[Cluster] = None,
) -> List[List[Tuple[Any, Any]]]:
    """Reduce K rows of N (gradient, variable) pairs, as ``compute_gradients`` returns them.

    ::

        rows = allreduce_grads_and_vars([optimizer.compute_gradients(loss, row) for loss, row in towers], devices)

    A ``UserWarning`` says if some variables of several towers are reference variables, which TensorFlow 1 creates by
    default: an update may overwrite one while a gradient still reads it.

    Returns:
        K lists of N pairs: the reduced gradients with each tower's variables.

    Raises: as :func:`allreduce_grads`; also where the towers list their variables in different orders.
    """
    strategy, towers = strategy_from(strategy), device_strings(devices)
    pairs = check_pairs(all_grads_and_vars, towers)
    grads = [[grad for grad, _ in row] for row in pairs]
    layout = begin(grads, towers, average, strategy, cluster, variable_names(pairs, towers))
    reduced = reduce_layout(layout, average, name, cluster)
    if len(towers) > 1:
        warn_of_references(pairs[0])
    return [[(grad, var) for grad, (_, var) in zip(*rows)] for rows in zip(reduced, pairs)]


@with_candidate
def begin(
    all_grads: Any,
    devices: Sequence[Any],
    average: bool,
    strategy: Strategy,
    cluster: Optional[Cluster] = None,
    names: Optional[Sequence[str]] = None,
    load: Optional[Load] = None,
) -> Layout:
    """Return the layout of checked gradients; no op is added.

    ``names`` are those of the N variables, by default of the gradients. With a ``load``, each variable has one main.
    Raises: as :func:`allreduce_grads`.
    """
    if cluster is not None and not isinstance(cluster, hosts_of_a_job.Cluster):
        raise ClusterError(f"cluster={cluster!r}: expected a hier_allreduce.Cluster")
    hosts = 1 if cluster is None else cluster.size
    if hosts > 1:  # they have different rows, and a collective needs equal shapes
        strategy = replace(strategy, sparse="dense")
    columns = check_matrix(all_grads, devices, average, strategy, names)
    layout = lay_out(columns, devices, strategy, hosts, load)
    if len(devices) > 1:
        log_once(describe(layout))
    return layout


@with_clock
def reduce_layout(
    layout: Layout, average: bool, name: Optional[str] = None, cluster: Optional[Cluster] = None
) -> List[Tuple[Any, ...]]:
    """Return K rows of N reduced gradients; of a first half, None on all towers but the mains."""
    name = name or "hier_allreduce"
    check_scope(name)
    if cluster is not None:
        gradients = [(column.name, column.dtype, column.shape) for column in layout.columns]
        facts = {"average": average, "layout": layout.fingerprint}
        cluster.announce(name, len(layout.devices), gradients, facts)
    return travel(layout, Shared(layout.devices, average, cluster), name)


def travel(layout: Layout, shared: Shared, name: str) -> List[Tuple[Any, ...]]:
    """Add the ops of a layout, and return K rows of N results; None where a half of an all-reduce gives none."""
    sums, packing = _sums(layout, shared), Packing(layout, shared)
    with forget_colocation(), tf1.name_scope(name) as scope:
        values = []
        for tower, device in enumerate(layout.devices):
            with tf1.device(device):
                grads = [gradient(column, tower, layout.devices) for column in layout.columns]
                values.append(packing.pack(tower, grads))
        chunks = [
            run(schedule, row, chunk)
            for schedule, row, chunk in zip(layout.schedules, zip(*values), sums)
        ]
        record(scope, layout, shared.hosts, values)
        results = []
        for tower, device in enumerate(layout.devices):
            with tf1.device(device):
                reduced = [
                    chunk.end(tower, column[tower]) if tower in complete_on(schedule) else None
                    for schedule, chunk, column in zip(layout.schedules, sums, chunks)
                ]
                results.append(tuple(packing.unpack(tower, reduced)))
        totals = [row[root_of(schedule)] for row, schedule in zip(chunks, layout.schedules)]
        if shared.hosts == 1:
            limit_lead(layout, totals)
        return results


def _sums(layout: Layout, shared: Shared) -> List[Sum]:
    """Return a ``Sum`` for each chunk, by its dtype and devices."""
    plain = Columns if all_on_cpu(layout.devices) else Sum
    sums: List[Sum] = []
    for chunk, name in zip(layout.chunks, layout.names):
        column = layout.columns[
            chunk.ranges[0].number
        ]  # all columns of a chunk have one dtype, a sparse one is alone
        wire = layout.wire_dtype(column)
        if column.is_sparse:
            sums.append(Rows(name, shared, column))
        elif wire in NARROW_DTYPES and shared.contributions > 1:
            sums.append(Half(plain(name, shared), wire, column.dtype))
        else:
            sums.append(plain(name, shared))
    return sums
