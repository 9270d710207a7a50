"""The road of a gradient: K×N in, K×N out.

::

    all_grads ─► check ──► plan ───► pack ────► run ─────────────────────────► unpack ─► result
       K×N      columns   layout    packing    each chunk's schedule, with     packing     K×N
                   N     C chunks     K×C      Sum │ SixteenBitSum │ SliceSum    K×N

``checked_layout`` checks and plans, and adds no op. So an error leaves the graph unchanged.
``all_reduce`` adds the ops. It and its parts are in ``collectives``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, List, Optional, Sequence, Tuple, Union

from ..compat import forget_colocation, tf1, without_autograph
from ..configs import one_of
from ..planning.strategy import Strategy, strategy_from
from .collectives import all_reduce
from .columns import checked_columns
from .devices import check_existence, device_strings, hosts_of
from .layout import Layout, lay_out
from .names import variable_names
from .rows import (
    check_cluster,
    checked_pairs,
    checked_rows,
    grads_in,
    variables_in,
    warn_of_references,
)
from .sparse import made_dense
from .substitution import Call, chosen_for

if TYPE_CHECKING:
    from ..cluster import Cluster


@without_autograph
def allreduce_grads(
    all_grads: Sequence[Sequence[Any]],
    devices: Sequence[Any],
    average: bool = False,
    strategy: Union[str, Strategy, None] = None,
    name: Optional[str] = None,
    *,
    cluster: Optional[Cluster] = None,
) -> List[List[Any]]:
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
    gets the same slices, one for each index, with int64 indices on GPUs; a lone tower keeps its.
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
        K lists of N tensors; entry (k, n) lives on ``devices[k]``.

    Raises:
        HierAllreduceError: rows do not match the devices or each other, or an entry cannot be added
            up; or something in ``devices`` is not a device, or in an eager call does not exist; or
            an unknown choice, or groups that miss or repeat a tower.
        ClusterError: not K towers on each host, or no graph for a session.
    """
    call = checked_call(all_grads, devices, average, strategy, cluster)
    layout = checked_layout(call)  # C chunks
    return all_reduce(call.rows, layout, name)  # K × N


@without_autograph
def allreduce_grads_hierarchical(
    all_grads: Sequence[Sequence[Any]],
    devices: Sequence[Any],
    average: bool = False,
) -> List[List[Any]]:
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
    # Few slices travel as they are, as they do on the original's way to its adders.
    rows = allreduce_grads(all_grads, devices, average, strategy)  # K × N
    dense_rows = []
    for device, row in zip(devices, rows):
        with forget_colocation(), tf1.device(device):
            dense_rows.append(list(map(made_dense, row)))
    return dense_rows


@without_autograph
def allreduce_grads_and_vars(
    all_grads_and_vars: Sequence[Sequence[Tuple[Any, Any]]],
    devices: Sequence[Any],
    average: bool = False,
    strategy: Union[str, Strategy, None] = None,
    name: Optional[str] = None,
    *,
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
    pairs = checked_pairs(all_grads_and_vars, devices)  # K × N pairs
    variables = list(map(variables_in, pairs))  # K × N
    call = checked_call(map(grads_in, pairs), devices, average, strategy, cluster)
    layout = checked_layout(call, variable_names(variables, devices))
    # With one tower the program races no more than without this package, so it gets no warning.
    # It comes before the ops, because a program may turn warnings into errors.
    if len(devices) > 1:
        warn_of_references(variables[0])
    reduced = all_reduce(call.rows, layout, name)  # K × N
    reduced_pairs = []
    for row, new_grads in zip(pairs, reduced):
        reduced_pairs.append([(grad, var) for grad, (_, var) in zip(new_grads, row)])
    return reduced_pairs


# ---- the road ------------------------------------------------------------------------------------


def checked_call(
    all_grads: Any,
    devices: Sequence[Any],
    average: bool,
    strategy: Union[str, Strategy, None],
    cluster: Optional[Cluster] = None,
) -> Call:
    """Return what a user asks for, with K rows of N gradients as tuples; no op is added."""
    devices = device_strings(devices)  # K
    check_existence(devices)
    check_cluster(cluster)
    rows = checked_rows(all_grads, devices)  # K × N
    average = bool(one_of(average, "average", (True, False)))
    return Call(rows, devices, average, strategy_from(strategy), cluster)


def checked_layout(
    call: Call,
    names: Optional[Sequence[str]] = None,
    variable_bytes: Optional[Sequence[int]] = None,
) -> Layout:
    """Return the layout of K rows of N gradients; no op is added.

    ``names`` are of the N variables, by default those of the gradients. With their bytes each
    variable has one root.

    Raises: as :func:`allreduce_grads`.
    """
    chosen = chosen_for(call)
    strategy = chosen.strategy or call.strategy
    # Hosts have different slices, and a collective needs equal shapes, so slices become dense.
    if hosts_of(call.cluster) > 1:
        strategy = replace(strategy, sparse="dense")
    call = call._replace(strategy=strategy)
    # Compare the K gradients of each variable: their dtype, their shape, dense or sparse.
    columns = checked_columns(call, names)  # N
    # Decide which gradients share a chunk, and by which moves each chunk travels.
    return lay_out(call, columns, variable_bytes)._replace(substitute=chosen)
