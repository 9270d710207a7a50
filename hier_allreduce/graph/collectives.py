"""Five collectives over K towers: one movement, of which each takes a part of the schedules.

::

    all_reduce        K×N ─► pack ─► reduce ─► mean ─► copy ─► unpack ─► K×N
    reduce            K×N ───────────────────────────► N on one tower
    reduce_scatter    K×N ───────────────────────────► N, each on its root      all owners update,
    all_gather        N, each on its root ───────────► K×N                      and all get all
    broadcast         N on tower 0 ──────────────────► K×N

A :class:`.layout.Layout` says how the tensors travel.
"""

from __future__ import annotations

from functools import partial
from typing import Any, List, Optional, Sequence

from ..compat import forget_colocation, tf1
from ..formatting import count
from ..planning.chunks import Chunk
from ..planning.plan import copies, moves_to, reductions, run
from ..planning.strategy import Strategy
from .columns import column_of
from .layout import Layout, lay_out
from .lead import limit_lead
from .packing import pack, unpack
from .record import record
from .sixteen_bit import NARROW_DTYPES, SixteenBitSum
from .sparse import SliceSum, gradient_of
from .substitution import Call
from .sums import Context, Sum

Rows = List[List[Any]]  # K×N tensors; None where a collective brings none


def all_reduce(grads: Sequence[Sequence[Any]], layout: Layout, name: Optional[str] = None) -> Rows:
    """Reduce K×N gradients to K rows of N, as far as the layout's schedules bring them."""
    scope = name or "hier_allreduce"
    # Hosts compare these lines before the first step, because a collective waits for ever if they
    # have built different sums.
    if layout.cluster is not None:
        kinds = [(column.name, column.dtype, column.shape) for column in layout.columns]
        plan = f"{layout.plan.algorithm}, {count(len(layout.chunks), 'chunk')}, {layout.digest}"
        settings = {"devices": len(layout.devices), "average": layout.average, "layout": plan}
        layout.cluster.ops.announce(scope, kinds, settings)
    chosen = layout.substitute
    rows: Sequence[Sequence[Any]]
    if chosen.reduce is not None:
        rows = chosen.reduce(grads)
    else:
        context = Context(layout)
        rows = _moved(grads, [_sum_of(chunk, context) for chunk in layout.chunks], context, scope)
    return list(map(list, rows if chosen.then is None else chosen.then(rows)))


def reduce(
    grads: Sequence[Sequence[Any]], layout: Layout, tower: int, name: str = "reduce"
) -> List[Any]:
    """Reduce K×N gradients to N on one tower."""
    return all_reduce(grads, layout.with_schedules(partial(moves_to, tower=tower)), name)[tower]


def reduce_scatter(
    grads: Sequence[Sequence[Any]], layout: Layout, name: str = "reduce_scatter"
) -> Rows:
    """Reduce K×N gradients, each to its root, ``layout.roots()[n]``; elsewhere it is None."""
    return all_reduce(grads, layout.with_schedules(reductions), name)


def all_gather(tensors: Sequence[Any], layout: Layout, name: str = "all_gather") -> Rows:
    """Copy N tensors from their roots to every tower; those of no root are None everywhere.

    ``tensors[n]`` is on the device of tower ``layout.roots()[n]``, and has the shape of a dense
    gradient.
    """
    rows: Rows = [[None] * len(tensors) for _ in layout.devices]
    for n, root in layout.roots().items():
        rows[root][n] = tensors[n]
    # They are no gradients: none is sparse, or zeros where a tower has none. They are results, so
    # nothing is divided or sent to other hosts, and no pass waits.
    columns = [
        column._replace(towers=(), wire=column.dtype, is_sparse=False) for column in layout.columns
    ]
    back = layout._replace(columns=columns, average=False, cluster=None, edges=False)
    context = Context(back.with_schedules(copies))
    sums = [Sum(chunk.name, context) for chunk in layout.chunks]
    return _moved(rows, sums, context, name)


def broadcast(
    tensors: Sequence[Any],
    devices: Sequence[Any],
    name: str = "broadcast",
    like: Strategy = Strategy(),  # noqa: B008  it never changes
) -> Rows:
    """Copy N tensors of any dtype from tower 0 to every tower, down a binomial tree.

    They are packed as gradients are by the strategy ``like``, and not cut.
    """
    columns = [column_of(tensor.op.name, [tensor]) for tensor in tensors]
    down_a_tree = Strategy("tree", main=0, chunk_bytes=like.chunk_bytes, chunks=like.chunks)
    call = Call((tensors,), tuple(devices), False, down_a_tree)
    return all_gather(tensors, lay_out(call, columns, whole=True), name)


# ---- the movement --------------------------------------------------------------------------------


def _moved(
    grads: Sequence[Sequence[Any]], sums: Sequence[Sum], context: Context, name: str
) -> Rows:
    """Move K×N tensors by the schedules of their C chunks: pack, run, unpack."""
    layout = context.layout
    columns = list(zip(layout.columns, zip(*grads)))  # N
    with forget_colocation(), tf1.name_scope(name) as scope:
        # Pack each tower's tensors into its chunks: small ones are joined, large ones cut.
        packed = []  # K × C
        for tower, device in enumerate(layout.devices):
            with tf1.device(device):
                row = [gradient_of(*column, tower, layout.devices) for column in columns]
                packed.append(pack(context, tower, row))

        # Run each chunk's schedule: sums up to its root, the mean there, and copies from there.
        moved = []  # C × K, None where a schedule brings nothing
        for chunk, tensors, ops in zip(layout.chunks, zip(*packed), sums):
            moved.append(run(chunk.schedule, tensors, ops.reduce, ops.at_root, ops.copy))

        # A tower's backward pass waits for its earlier sums, as `lead` says.
        at_roots = [totals[chunk.root] for chunk, totals in zip(layout.chunks, moved)]
        edges = limit_lead(grads, layout, at_roots)
        record(layout, scope, packed, moved, edges)

        # Unpack each tower's chunks into its tensors, in their dtypes and shapes.
        rows: Rows = []
        for tower, device in enumerate(layout.devices):
            with tf1.device(device):
                chunks = [
                    None if totals[tower] is None else ops.as_result(own, totals[tower])
                    for ops, own, totals in zip(sums, packed[tower], moved)
                ]
                rows.append(unpack(context, tower, chunks))
        return rows


def _sum_of(chunk: Chunk, context: Context) -> Sum:
    """Return the ``Sum`` of a chunk, by its dtype."""
    # All its columns have one dtype, and a sparse one is alone.
    column = context.layout.columns[chunk.first]
    tensor = f"{chunk.name}.values" if column.is_sparse else chunk.name
    # Lone tensors are not added up, so they need no wider dtype.
    total = Sum(tensor, context)
    if column.wire in NARROW_DTYPES and context.contributions > 1:
        total = SixteenBitSum(tensor, context, column.wire)
    return SliceSum(chunk.name, context, total) if column.is_sparse else total
