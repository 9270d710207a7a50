"""The road of a gradient: K×N in, K×N out.

::

    all_grads ─► check ──► plan ───► pack ────► run ─────────────────────────► unpack ─► result
       K×N      columns   layout    packing    each chunk's schedule, with     packing     K×N
                   N     C chunks     K×C      Sum │ SixteenBitSum │ RowSum      K×N

``checked_layout`` checks and plans, and adds no op. So an error leaves the graph unchanged.
``add_ops`` adds the ops. Updates that run once take an all-reduce in two parts: ``sums_on`` one
tower and ``copy_from_tower_0``, or ``sums_only`` on all roots and ``copy_from_roots``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, List, Optional, Sequence, Tuple, Union

from ..compat import forget_colocation, tf1, without_autograph
from ..planning.chunks import Chunk, OwnedBytes
from ..planning.plan import copies, moves_to, reductions, run
from ..planning.strategy import Strategy, strategy_from
from .columns import (
    check_average,
    check_cluster,
    checked_columns,
    checked_pairs,
    checked_rows,
    column_of,
    grads_in,
    variables_in,
    warn_of_references,
)
from .devices import check_existence, device_strings
from .layout import Layout, lay_out
from .lead import Edge, limit_lead
from .names import check_scope, variable_names
from .packing import Packing
from .record import describe, record
from .sixteen_bit import NARROW_DTYPES, SixteenBitSum
from .sparse import RowSum, gradients, made_dense
from .substitution import Call, Caller, Rows, chosen_for
from .sums import Context, Sum

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

    The result is plain dataflow: any tensor of it can be fetched, and it has gradients. Small
    gradients share a chunk, so fetching one computes all of its chunk (``Strategy(chunk_bytes=0)``
    packs nothing).

    If the forward pass has statistics over all towers, such as synchronized batch normalization,
    every loss depends on all towers' variables. So take each tower's gradients of the sum of all
    towers' losses: ``tf.gradients(tf.add_n(losses), variables[k])``.

    A float16 or bfloat16 gradient is added in float32 and rounded once for each hop. Its mean is
    carried as a running mean, so that it is finite where the inputs are. The bound is in
    docs/how-it-works.md. ``tf.IndexedSlices`` stay sparse where that is fewer bytes: every tower
    gets the same rows, one for each index, with int64 indices on GPUs; one tower keeps its rows.
    None on every tower stays None.

    Args:
        all_grads: K×N, ``all_grads[tower][variable]``; rows may be any iterables.
        devices: K devices, ``devices[tower]``: strings, ``tf.DeviceSpec``,
            ``tf.config.LogicalDevice``.
        average: the mean instead of the sum. It is taken once, before the copies back, so that all
            towers hold the same bits.
        strategy: the name of an algorithm, such as ``"hierarchical"`` or ``"auto"``, the default;
            or a :class:`Strategy`; or the name or path of its YAML file.
        name: the name scope of the ops.
        cluster: the :class:`hier_allreduce.Cluster` of several hosts with K towers each. All hosts
            call this function with the same arguments, and the sum, or mean, is over the towers of
            all hosts. Sparse gradients become dense, and the result has no gradients.

    Returns:
        A list of K tuples of N tensors; entry (k, n) lives on ``devices[k]``.

    Raises:
        HierAllreduceError: rows do not match the devices or each other, or an entry cannot be added
            up; or something in ``devices`` is not a device, or in an eager call does not exist; or
            an unknown choice, or groups that miss or repeat a tower.
        ClusterError: not K towers on each host, or no graph for a session.
    """
    layout = layout_of(all_grads, devices, average, strategy, cluster, Caller())  # C chunks
    return add_ops(layout, name)  # K × N


@without_autograph
def allreduce_grads_hierarchical(
    all_grads: Sequence[Sequence[Any]],
    devices: Sequence[Any],
    average: bool = False,
) -> List[Tuple[Any, ...]]:
    """Reduce as tensorpack's function of this name does at K = 8, for any K ≥ 1: K×N in, K×N out.

    Every variable travels alone, through two groups of ⌈K/2⌉ and ⌊K/2⌋ towers, and the root rotates
    with the variable. For variable 0 of 8 towers: 0 ← 0 + 1 + 2 + 3; 4 ← 4 + 5 + 6 + 7; 4 ← 4 + 0;
    copies from 4 to 0, 5, 6, 7, and from 0 to 1, 2, 3. Source of the schedule: tensorpack
    ``graph_builder/utils.py``. Results are dense, but of ``tf.IndexedSlices`` whose ``dense_shape``
    no tower knows.

    ::

        grads = allreduce_grads_hierarchical(grads, [f"/gpu:{k}" for k in range(8)], average=True)

    Raises: as :func:`allreduce_grads`.
    """
    devices = device_strings(devices)  # K
    strategy = Strategy("hierarchical", chunk_bytes=0)
    # Few rows travel as rows, as they do on the original's way to its adders.
    rows = allreduce_grads(all_grads, devices, average, strategy)  # K × N
    dense_rows = []
    for device, row in zip(devices, rows):
        with forget_colocation(), tf1.device(device):
            dense_rows.append(tuple(map(made_dense, row)))
    return dense_rows


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

        rows = [optimizer.compute_gradients(loss, var_list) for loss, var_list in towers]
        rows = allreduce_grads_and_vars(rows, devices, average=True)

    A ``UserWarning`` says if some variables of several towers are reference variables, which
    TensorFlow 1 creates by default: an update may overwrite one while a gradient still reads it.

    Returns:
        K lists of N pairs: the reduced gradients with each tower's variables.

    Raises: as :func:`allreduce_grads`; also if the towers list their variables in different orders.
    """
    devices = device_strings(devices)  # K
    check_existence(devices)
    strategy = strategy_from(strategy)
    pairs = checked_pairs(all_grads_and_vars, devices)  # K × N pairs
    grads = list(map(grads_in, pairs))  # K × N
    variables = list(map(variables_in, pairs))  # K × N
    names = variable_names(variables, devices)  # N
    layout = checked_layout(grads, devices, average, strategy, cluster, names)
    # With one tower the program races no more than without this package, so it gets no warning.
    # It comes before the ops, because a program may turn warnings into errors.
    if len(devices) > 1:
        warn_of_references(variables[0])
    reduced = add_ops(layout, name)  # K × N
    reduced_pairs = []
    for row, new_grads in zip(pairs, reduced):
        reduced_pairs.append([(grad, var) for grad, (_, var) in zip(new_grads, row)])
    return reduced_pairs


# ---- the road ------------------------------------------------------------------------------------


def layout_of(
    all_grads: Any,
    devices: Sequence[Any],
    average: bool,
    strategy: Union[str, Strategy, None],
    cluster: Optional[Cluster],
    caller: Caller,
) -> Layout:
    """Return the layout of K rows of N gradients as a user gives them; no op is added."""
    devices = device_strings(devices)  # K
    check_existence(devices)
    rows = checked_rows(all_grads, devices)  # K × N
    strategy = strategy_from(strategy)
    return checked_layout(rows, devices, average, strategy, cluster, caller=caller)


def checked_layout(
    rows: Sequence[Sequence[Any]],
    devices: Sequence[Any],
    average: bool,
    strategy: Strategy,
    cluster: Optional[Cluster] = None,
    names: Optional[Sequence[str]] = None,
    owned: Optional[OwnedBytes] = None,
    caller: Caller = Caller(),  # noqa: B008  it never changes
) -> Layout:
    """Return the layout of K rows of N gradients; no op is added.

    Args:
        rows: K × N, from :func:`.columns.checked_rows`.
        devices: K devices, from :func:`.devices.device_strings`.
        average: the mean instead of the sum.
        strategy: the user's choices.
        cluster: the hosts.
        names: of the N variables; by default those of the gradients.
        owned: with it, each variable has one root.
        caller: the front end, and its update.

    Raises: as :func:`allreduce_grads`.
    """
    # Compare the K gradients of each variable: their dtype, their shape, dense or sparse.
    check_average(average)
    check_cluster(cluster)
    hosts = 1 if cluster is None else cluster.size
    call = Call(rows, tuple(devices), bool(average), strategy, hosts, *caller)
    chosen = chosen_for(call)
    strategy = chosen.strategy or strategy
    # Hosts have different rows, and a collective needs equal shapes, so rows become dense.
    if hosts > 1:
        strategy = replace(strategy, sparse="dense")
    columns = checked_columns(rows, devices, average, strategy, names)  # N columns of K gradients

    # Decide which gradients share a chunk, and by which moves each chunk travels.
    layout = lay_out(columns, devices, strategy, hosts, owned)  # C chunks with their schedules
    layout = layout._replace(average=bool(average), cluster=cluster, substitute=chosen)
    if len(devices) > 1 and chosen.reduce is None:
        layout = layout._replace(description=describe(layout))
    return layout


def add_ops(layout: Layout, name: Optional[str] = None) -> List[Tuple[Any, ...]]:
    """Add the ops of a layout, and return K rows of N reduced gradients.

    With :func:`sums_only` a gradient is None on all towers but its root.
    """
    scope = name or "hier_allreduce"
    check_scope(scope)
    # Hosts compare these lines before the first step, because a collective waits for ever if they
    # have built different sums.
    if layout.cluster is not None:
        kinds = [(column.name, column.dtype, column.shape) for column in layout.columns]
        settings = {"average": layout.average, "layout": layout.fingerprint}
        layout.cluster.ops.announce(scope, len(layout.devices), kinds, settings)
    chosen = layout.substitute
    if chosen.reduce is None:
        rows: Rows = _reduced(layout, scope)  # K × N
    else:
        rows = chosen.reduce(list(zip(*(column.grads for column in layout.columns))))
    return list(map(tuple, rows if chosen.then is None else chosen.then(rows)))


def _reduced(
    layout: Layout, name: str, values: Optional[Sequence[Sequence[Any]]] = None
) -> List[Tuple[Any, ...]]:
    """Return K rows of N results; None where the schedules bring none.

    ``values``: K×N tensors or None, to copy as they are instead of the gradients.
    """
    context = Context(layout)
    if values is None:
        sums = [_sum_of(chunk, layout, context) for chunk in layout.chunks]  # C
    else:
        sums = [Sum(chunk.name, context) for chunk in layout.chunks]
    packing = Packing(layout, context)
    with forget_colocation(), tf1.name_scope(name) as scope:
        # Pack each tower's gradients into its chunks: small ones are joined, large ones cut.
        packed = []  # K × C
        for tower, device in enumerate(layout.devices):
            with tf1.device(device):
                row = gradients(layout, tower) if values is None else values[tower]
                packed.append(packing.pack(tower, row))

        # Run each chunk's schedule: sums up to its root, the mean there, and copies from there.
        reduced = []  # C × K, None where a schedule brings no sum
        for chunk, tensors, ops in zip(layout.chunks, zip(*packed), sums):
            reduced.append(run(chunk.schedule, tensors, ops))

        # A tower's backward pass waits for its earlier sums, as `lead` says.
        edges: Sequence[Edge] = ()
        if layout.has_edges:
            totals = [tensors[chunk.root] for chunk, tensors in zip(layout.chunks, reduced)]
            edges, said = limit_lead(layout.columns, layout.chunks, totals)
            layout = layout._replace(description=f"{layout.description}; {said}")
        record(scope, layout, packed, edges)

        # Unpack each tower's chunks into its gradients, in their dtypes and shapes.
        unpacked = []  # K × N
        for tower, device in enumerate(layout.devices):
            with tf1.device(device):
                chunks = [
                    None if tensors[tower] is None else ops.as_result(tower, tensors[tower])
                    for ops, tensors in zip(sums, reduced)
                ]
                unpacked.append(tuple(packing.unpack(tower, chunks)))
        return unpacked


def _sum_of(chunk: Chunk, layout: Layout, context: Context) -> Sum:
    """Return the ``Sum`` of a chunk, by its dtype."""
    column = layout.column_of(chunk)
    wire = layout.wire_dtype(chunk)
    tensor = f"{chunk.name}.values" if column.is_sparse else chunk.name
    # Lone tensors are not added up, so they need no wider dtype.
    total = Sum(tensor, context)
    if wire in NARROW_DTYPES and context.contributions > 1:
        total = SixteenBitSum(tensor, context, wire, column.dtype)
    return RowSum(chunk.name, context, column, total) if column.is_sparse else total


# ---- its two parts -------------------------------------------------------------------------------


def sums_only(layout: Layout) -> Layout:
    """Return a layout whose results are on the roots only: result n on ``layout.roots()[n]``."""
    return layout.with_schedules(reductions)


def sums_on(layout: Layout, tower: int) -> Layout:
    """Return a layout whose results are on one tower, and on those on the way to it."""
    return layout.with_schedules(lambda schedule: moves_to(schedule, tower))


def copy_from_roots(
    tensors: Sequence[Any], layout: Layout, name: str = "copy_from_roots"
) -> List[Tuple[Any, ...]]:
    """Copy N tensors from their roots to every tower: the second part of an all-reduce.

    ``tensors[n]`` is on the device of tower ``layout.roots()[n]``, and has the shape of a dense
    gradient.

    Returns:
        K tuples of N tensors, entry (k, n) on the device of tower k; None for variables without
        gradients.
    """
    values: List[List[Any]] = [[None] * len(tensors) for _ in layout.devices]  # K × N
    for n, root in layout.roots().items():
        values[root][n] = tensors[n]
    # They are results already, so nothing is divided or sent to other hosts, and no pass waits.
    back = layout._replace(average=False, cluster=None, has_edges=False, description="")
    return _reduced(back.with_schedules(copies), name, values)


def copy_from_tower_0(tensors: Sequence[Any], devices: Sequence[Any]) -> List[Tuple[Any, ...]]:
    """Copy N tensors of any dtype from tower 0 to every tower, down a binomial tree; K×N out."""
    columns = [column_of(tensor.op.name, [tensor]) for tensor in tensors]
    nothing_yet = OwnedBytes([0] * len(columns), [0] * len(devices))
    # No backward pass waits for the copies of variables, so they take no control edges.
    strategy = Strategy(algorithm="tree", main=0, edges=False)
    layout = lay_out(columns, devices, strategy, owned=nothing_yet)
    return copy_from_roots(tensors, layout, "broadcast")
