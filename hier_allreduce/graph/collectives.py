"""Five collectives over K towers: one movement, of which each takes a part of the schedules.

::

    all_reduce        K×N ─► pack ─► reduce ─► mean ─► copy ─► unpack ─► K×N
    reduce            K×N ───────────────────────────► N on one tower
    reduce_scatter    K×N ───────────────────────────► N, each on its root      all owners update,
    all_gather        N, each on its root ───────────► K×N                      and all get all
    broadcast         N on tower 0 ──────────────────► K×N

The first three take the gradients of a :class:`.layout.Layout`; the others take tensors.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, List, Optional, Sequence

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


def all_reduce(layout: Layout, name: Optional[str] = None) -> Rows:
    """Reduce the gradients of a layout to K rows of N, the same on every tower."""
    return _reduced(layout, name or "hier_allreduce")


def reduce(layout: Layout, tower: int, name: str = "reduce") -> List[Any]:
    """Reduce the gradients of a layout to N on one tower."""
    return _reduced(layout.with_schedules(partial(moves_to, tower=tower)), name)[tower]


def reduce_scatter(layout: Layout, name: str = "reduce_scatter") -> Rows:
    """Reduce each gradient of a layout to its root, ``layout.roots()[n]``; elsewhere it is None."""
    return _reduced(layout.with_schedules(reductions), name)


def all_gather(tensors: Sequence[Any], layout: Layout, name: str = "all_gather") -> Rows:
    """Copy N tensors from their roots to every tower; those of no root are None everywhere.

    ``tensors[n]`` is on the device of tower ``layout.roots()[n]``, and has the shape of a dense
    gradient.
    """
    rows: Rows = [[None] * len(tensors) for _ in layout.devices]
    for n, root in layout.roots().items():
        rows[root][n] = tensors[n]
    # They are results already, so nothing is divided or sent to other hosts, and no pass waits.
    back = layout._replace(average=False, cluster=None, has_edges=False).with_schedules(copies)
    context = Context(back)
    return _moved(
        rows.__getitem__, [Sum(chunk.name, context) for chunk in back.chunks], context, name
    )


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
    # No backward pass waits for the copies of variables, so they take no control edges.
    down_a_tree = Strategy(
        algorithm="tree", main=0, chunk_bytes=like.chunk_bytes, chunks=like.chunks, edges=False
    )
    call = Call((), tuple(devices), False, down_a_tree)
    return all_gather(tensors, lay_out(call, columns, whole=True), name)


# ---- the movement --------------------------------------------------------------------------------


def _reduced(layout: Layout, scope: str) -> Rows:
    """Return K rows of N reduced gradients, as far as the layout's schedules bring them."""
    # Hosts compare these lines before the first step, because a collective waits for ever if they
    # have built different sums.
    if layout.cluster is not None:
        kinds = [(column.name, column.dtype, column.shape) for column in layout.columns]
        plan = f"{layout.plan.algorithm}, {count(len(layout.chunks), 'chunk')}, {layout.digest}"
        settings = {"devices": len(layout.devices), "average": layout.average, "layout": plan}
        layout.cluster.ops.announce(scope, kinds, settings)
    chosen = layout.substitute
    if chosen.reduce is not None:
        rows = chosen.reduce(list(zip(*(column.grads for column in layout.columns))))
    else:
        context = Context(layout)
        sums = [_sum_of(chunk, layout, context) for chunk in layout.chunks]  # C
        rows = _moved(
            lambda tower: [gradient_of(column, tower, layout.devices) for column in layout.columns],
            sums,
            context,
            scope,
        )
    return list(map(list, rows if chosen.then is None else chosen.then(rows)))


def _moved(
    row_of: Callable[[int], Sequence[Any]], chunk_ops: Sequence[Sum], context: Context, name: str
) -> Rows:
    """Move N tensors of each tower by the schedules of their chunks: pack, run, unpack.

    ``row_of`` returns the tensors of a tower, and is called under its device. ``chunk_ops`` has the
    operations of each chunk.
    """
    layout = context.layout
    with forget_colocation(), tf1.name_scope(name) as scope:
        # Pack each tower's tensors into its chunks: small ones are joined, large ones cut.
        packed = []  # K × C
        for tower, device in enumerate(layout.devices):
            with tf1.device(device):
                packed.append(pack(context, tower, row_of(tower)))

        # Run each chunk's schedule: sums up to its root, the mean there, and copies from there.
        moved = []  # C × K, None where a schedule brings nothing
        for chunk, tensors, ops in zip(layout.chunks, zip(*packed), chunk_ops):
            moved.append(run(chunk.schedule, tensors, ops.reduce, ops.at_root, ops.copy))

        # A tower's backward pass waits for its earlier sums, as `lead` says.
        edges = None
        if layout.has_edges:
            totals = [tensors[chunk.root] for chunk, tensors in zip(layout.chunks, moved)]
            edges = limit_lead(layout.columns, layout.chunks, totals)
        record(scope, layout, packed, moved, edges)

        # Unpack each tower's chunks into its tensors, in their dtypes and shapes.
        rows: Rows = []
        for tower, device in enumerate(layout.devices):
            with tf1.device(device):
                chunks = [
                    None if tensors[tower] is None else ops.as_result(tower, tensors[tower])
                    for ops, tensors in zip(chunk_ops, moved)
                ]
                rows.append(unpack(context, tower, chunks))
        return rows


def _sum_of(chunk: Chunk, layout: Layout, context: Context) -> Sum:
    """Return the ``Sum`` of a chunk, by its dtype."""
    column = layout.column_of(chunk)
    tensor = f"{chunk.name}.values" if column.is_sparse else chunk.name
    # Lone tensors are not added up, so they need no wider dtype.
    total = Sum(tensor, context)
    if column.wire in NARROW_DTYPES and context.contributions > 1:
        total = SixteenBitSum(tensor, context, column.wire, column.dtype)
    return SliceSum(chunk.name, context, column, total) if column.is_sparse else total
