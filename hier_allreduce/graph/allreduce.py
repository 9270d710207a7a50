"""The public functions: K×N gradients in, K×N reduced gradients out.

::

    all_grads ─► check_matrix ─► lay_out ─► Unit.tensors ─► Packer.pack ─► emit ─► Packer.unpack ─► reduced_gradients
       K×N       K×N checked     decisions     K×U             K×C         K×C        K×U               K×N
"""

from __future__ import annotations

import hashlib
import warnings
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from ..errors import ClusterError
from ..planning import Strategy, strategy_from
from .compat import forget_colocation, tf1, without_autograph
from .devices import Lane, Places, device_strings, places_of
from .emit import emit, record
from .gradients import Matrix, check_matrix, check_pairs, column_of, reference_warning
from .hosts import CrossHostReduce, HostGroup
from .lane_memory import check_lane_memory
from .layout import Layout, lay_out
from .names import variable_names
from .packing import Packer, Splitter
from .units import reduced_gradients

_PER_VARIABLE = Strategy(algorithm="hierarchical", mains="rotate", pack_below=0, sparse="gather")


@without_autograph
def allreduce_grads(
    all_grads: Sequence[Sequence[Any]],
    devices: Sequence[Any],
    average: bool = False,
    strategy: Union[str, Strategy, None] = None,
    name: Optional[str] = None,
    cluster: Optional[HostGroup] = None,
    lanes: Sequence[Lane] = (),
) -> List[Tuple[Any, ...]]:
    """Return the sum (or mean) of all towers' gradients on every tower.

    ::

        grads[tower][variable]                      result[tower][variable]
        /gpu:0   a0   b0                            /gpu:0   a0+a1   b0+b1
        /gpu:1   a1   b1             ──►            /gpu:1   a0+a1   b0+b1

    The result is plain dataflow: any part of it can be fetched, and it has gradients. Small gradients share a bucket,
    which needs all of them: to fetch one, feed the placeholders of all (``Strategy(pack_below=0)`` packs nothing).

    A float16 or bfloat16 gradient is added in float32 and rounded once for each hop. Its mean is carried as a running
    mean, so that it is finite where the inputs are. The error bound is in docs/cost-model.md. ``tf.IndexedSlices``
    stay sparse: every tower gets the rows of all. None on every tower stays None.

    Args:
        all_grads: K×N, ``all_grads[tower][variable]``; rows may be any iterables.
        devices: K devices, ``devices[tower]``: strings, ``tf.DeviceSpec``, ``tf.config.LogicalDevice``.
        average: the mean instead of the sum. It is taken once, before the copies back, so that all towers hold
            the same bits.
        strategy: how to reduce: an algorithm's name, ``"hierarchical"``, ``"tree"`` (caffe2 muji's), ``"flat"`` (one
            main for each chunk), ``"ring"`` or ``"auto"``, the default; a :class:`Strategy` for all choices; or the
            name or path of its YAML file.
        name: the name scope of the ops.
        cluster: the :class:`hier_allreduce.Cluster` of several hosts with K towers each. All hosts call this function
            with the same arguments, and the sum, or mean, is over the towers of all hosts. Sparse gradients become
            dense, and the result has no gradients.
        lanes: further devices that relay copies, each with its tower's number, such as ``gpu_lanes(…).lanes``: logical
            GPUs of each tower's GPU. Chunks travel between them, several out of one GPU at a time, and sums are formed
            on them. See docs/lanes.md.

    Returns:
        A list of K tuples of N tensors; entry (k, n) lives on ``devices[k]``.

    Raises:
        HierAllreduceError: rows do not match the devices or each other, or an entry cannot be added up; or something in
            ``devices`` or ``lanes`` is not a device; a lane is also a tower or another lane, or has too little memory;
            or an unknown choice, or groups that miss or repeat a tower.
        ClusterError: not K towers on each host, or no graph for a session.
    """
    strategy = strategy_from(strategy)
    grads = check_matrix(all_grads, places_of(device_strings(devices), lanes), average)
    return _reduced(grads, average, strategy, name, cluster)


@without_autograph
def allreduce_grads_hierarchical(
    all_grads: Sequence[Sequence[Any]], devices: Sequence[Any], average: bool = False
) -> List[Tuple[Any, ...]]:
    """Reduce as tensorpack's function of this name does at K = 8, for any K ≥ 1.

    K×N in, K×N out; every variable travels alone. Two groups of ⌈K/2⌉ and ⌊K/2⌋ towers add up on mains that rotate
    with the variable. One main sends its partial sum to the other and gets the total back; both copy it inside their
    groups. Source of the schedule: tensorpack ``graph_builder/utils.py``. For dense float32 gradients and K = 8 these
    are the same ops::

        def in_two_quads(all_grads, devices, average=False):
            columns = []
            for variable, grads in enumerate(zip(*all_grads)):
                root = (variable + 4) % 8  # the main whose sum is complete first
                other = (root + 4) % 8  # the main of the other quad
                partial = {}
                for main in (root, other):
                    quad = [tower for tower in range(8) if tower // 4 == main // 4]
                    with tf.device(devices[main]):
                        partial[main] = tf.add_n([grads[tower] for tower in quad])
                with tf.device(devices[root]):
                    total = tf.add(partial[root], partial[other])
                    if average:
                        total = tf.multiply(total, 1 / 8)
                with tf.device(devices[other]):
                    result = {root: total, other: tf.identity(total)}
                for tower in range(8):
                    if tower not in result:
                        with tf.device(devices[tower]):
                            near = root if tower // 4 == root // 4 else other
                            result[tower] = tf.identity(result[near])
                columns.append([result[tower] for tower in range(8)])
            return list(zip(*columns))  # K×N

    Raises: as :func:`allreduce_grads`.
    """
    return allreduce_grads(all_grads, devices, average, _PER_VARIABLE)


@without_autograph
def allreduce_grads_and_vars(
    all_grads_and_vars: Sequence[Sequence[Tuple[Any, Any]]],
    devices: Sequence[Any],
    average: bool = False,
    strategy: Union[str, Strategy, None] = None,
    name: Optional[str] = None,
    cluster: Optional[HostGroup] = None,
    lanes: Sequence[Lane] = (),
) -> List[List[Tuple[Any, Any]]]:
    """Reduce K rows of N (gradient, variable) pairs, as ``compute_gradients`` returns them.

    A ``UserWarning`` says if some variables of several towers are reference variables, which TensorFlow 1 creates by
    default: an update may overwrite one while a gradient still reads it.

    Returns:
        K lists of N pairs: the reduced gradients with each tower's own variables.

    Raises: as :func:`allreduce_grads`; also where the towers list their variables in different orders.
    """
    strategy = strategy_from(strategy)
    places = places_of(device_strings(devices), lanes)
    pairs = check_pairs(all_grads_and_vars, places.towers)
    names = variable_names(pairs, places.towers)
    grads = check_matrix([[grad for grad, _ in row] for row in pairs], places, average, names)
    reduced = _reduced(grads, average, strategy, name, cluster)
    warning = reference_warning(pairs[0]) if len(places.towers) > 1 else ""
    if warning:
        warnings.warn(warning, stacklevel=3)  # without_autograph is in between
    return [[(grad, var) for grad, (_, var) in zip(*rows)] for rows in zip(reduced, pairs)]


def _reduced(
    grads: Matrix, average: bool, strategy: Strategy, name: Optional[str], cluster: Optional[HostGroup]
) -> List[Tuple[Any, ...]]:
    """Reduce a checked matrix."""
    name = name or "hier_allreduce"
    layout, across = _laid_out(grads, average, strategy, name, cluster)
    reduced = _run(layout, average, name, across)
    return [tuple(row.get(variable) for variable in range(len(grads.columns))) for row in reduced]


def _run(layout: Layout, average: bool, name: str, across: Optional[CrossHostReduce] = None) -> List[Dict[int, Any]]:
    """Add the ops of a layout: of an all-reduce, or of one half of it.

    Returns:
        K dicts of what each tower gets, by variable.
    """
    towers, across = layout.places.towers, across or CrossHostReduce()
    with forget_colocation(), tf1.name_scope(name) as scope:
        units = []
        for tower, device in enumerate(towers):
            with tf1.device(device):
                units.append([unit.tensors(tower, towers) for unit in layout.units])
        splitters = [Splitter(device) for device in towers]
        packers = [Packer(splitter, layout.chunks, layout.names) for splitter in splitters]
        packed = [packer.pack(own, layout.given(tower)) for tower, (packer, own) in enumerate(zip(packers, units))]
        reduced = emit(layout, packed, average, across)
        record(scope, layout, packed, reduced, across.hosts)
        results = []
        for tower, own in enumerate(units):
            unpacked = packers[tower].unpack(reduced[tower], own)
            results.append(reduced_gradients(layout.units, unpacked, tower, splitters[tower]))
        return results


def reduce_to_mains(
    grads: Matrix,
    average: bool,
    strategy: Strategy,
    name: str = "reduce_to_mains",
    cluster: Optional[HostGroup] = None,
) -> Tuple[List[Any], Layout]:
    """Reduce each variable to its main only: the first half of an all-reduce.

    Returns:
        N gradients, gradient n on the device of tower ``layout.mains()[n]``, None for variables without gradients; and
        the layout, for :func:`copy_from_mains`.

    Raises: as :func:`allreduce_grads`; also HierAllreduceError if the strategy cuts gradients over several mains.
    """
    layout, across = _laid_out(grads, average, strategy, name, cluster, one_main=True)
    mains = layout.mains()
    rows = _run(layout.reduce_half(), average, name, across)
    return [rows[mains[n]][n] if n in mains else None for n in range(len(grads.columns))], layout


def copy_from_mains(values: Sequence[Any], layout: Layout, name: str = "copy_from_mains") -> List[Tuple[Any, ...]]:
    """Copy N values, each on its variable's main, to every tower: the second half of an all-reduce, by the same plan.

    Args:
        values: N tensors, ``values[n]`` on the device of tower ``layout.mains()[n]``, with the shapes of dense
            gradients. Those of variables without gradients are not read.
        layout: from :func:`reduce_to_mains`.

    Returns:
        K tuples of N tensors, entry (k, n) on the device of tower k; None for variables without gradients.
    """
    copied = _run(layout.copy_half(values), False, name)
    return [tuple(row.get(variable) for variable in range(len(values))) for row in copied]


def copy_from_tower_0(values: Sequence[Any], devices: Sequence[Any], name: str = "broadcast") -> List[Tuple[Any, ...]]:
    """Copy N values of tower 0 to every tower, down a binomial tree.

    Args:
        values: N tensors of any dtype on ``devices[0]``.
        devices: K devices.
        name: the name scope of the ops.

    Returns:
        K tuples of N tensors, entry (k, n) on ``devices[k]``.
    """
    columns = [column_of(n, value.op.name, [value] * len(devices)) for n, value in enumerate(values)]
    matrix = Matrix(tuple(columns), Places(tuple(devices)))
    return copy_from_mains(values, lay_out(matrix, Strategy(algorithm="tree", mains=0), one_main=True), name)


def _laid_out(
    grads: Matrix,
    average: bool,
    strategy: Strategy,
    name: str,
    cluster: Optional[HostGroup],
    one_main: bool = False,
) -> Tuple[Layout, CrossHostReduce]:
    """Return the layout, and what adds up over the hosts; before the first step they compare what is noted here."""
    if not isinstance(cluster, (HostGroup, type(None))):
        raise ClusterError(f"cluster={cluster!r}: expected a hier_allreduce.Cluster (from a file: Cluster.load)")
    layout = lay_out(grads, strategy, one_main, cluster.size if cluster else 1)
    check_lane_memory(layout)
    if cluster is None:
        return layout, CrossHostReduce()
    facts = {
        "average": average,
        "strategy": strategy.facts(),
        "plan": _fingerprint(layout),
    }
    return layout, cluster.across(name, grads, facts)


def _fingerprint(layout: Layout) -> str:
    """Return a text that differs between hosts with different plans, whose collectives would wait or mix chunks."""
    steps = repr((layout.plan.steps, layout.chunks)).encode()
    return f"{layout.plan.algorithm}, {layout.plan.chunks} chunks, {hashlib.sha256(steps).hexdigest()[:12]}"
