"""The functions people call: K×N gradients in, K×N reduced gradients out."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from ..errors import ClusterError
from ..planning import Strategy, strategy_from
from .compat import as_written
from .devices import device_strings
from .emit import CrossHostReduce, Dense, DeviceReduction, Gather, Narrow, emit, recorded
from .entries import DENSE, VALUES, Entry, entry_tensors, to_gradients
from .gradients import NARROW, Matrix, check_matrix, pairs_of, variable_names
from .layout import Layout, lay_out
from .packing import Tower

_PER_VARIABLE = Strategy(algorithm="hierarchical", mains="rotate", pack_below=0, sparse="gather")


@as_written
def allreduce_grads(
    all_grads: Sequence[Sequence[Any]],
    devices: Sequence[Any],
    average: bool = False,
    algorithm: Optional[str] = None,
    groups: Optional[Sequence[Sequence[int]]] = None,
    name: Optional[str] = None,
    strategy: Union[str, Strategy, None] = None,
    cluster: Optional[Any] = None,
) -> List[Tuple[Any, ...]]:
    """Give every tower the sum (or mean) of all towers' gradients.

    ::

        grads[tower][variable]                      result[tower][variable]
        /gpu:0   a0   b0                            /gpu:0   a0+a1   b0+b1
        /gpu:1   a1   b1             ──►            /gpu:1   a0+a1   b0+b1

    Plain dataflow: any subset of the results can be fetched, and gradients flow through.

    A float16 or bfloat16 gradient is added in float32 and rounded once for each hop; its mean is carried as a running
    mean, so that it is finite where the inputs are (see :class:`hier_allreduce.emit.Narrow` for the error bound).
    ``tf.IndexedSlices`` stay sparse: every tower gets the rows of all. None on every tower stays None.

    Args:
        all_grads: K×N, ``all_grads[tower][variable]``; rows may be any iterables.
        devices: K devices, ``devices[tower]``: strings, ``tf.DeviceSpec``, ``tf.config.LogicalDevice``.
        average: the mean instead of the sum. It is taken once, before the copies back, so that all towers hold
            the same bits.
        algorithm: ``"hierarchical"`` (groups, then across), ``"tree"`` (caffe2 muji's), ``"flat"`` (one main for
            each chunk), or ``"auto"``, the default: see :class:`Strategy`.
        groups: for ``"hierarchical"``: tuples that hold each tower number once; two halves by default.
        name: the name scope of the ops.
        strategy: all choices in one, instead of ``algorithm`` and ``groups``: a :class:`Strategy`, or the name or
            path of its YAML file.
        cluster: the :class:`hier_allreduce.Cluster` of several hosts with K towers each, which all call this alike: the
            sum, or mean, is then over the towers of all. Sparse gradients become dense.

    Returns:
        A list of K tuples of N tensors; entry (k, n) lives on ``devices[k]``.

    Raises:
        GradientError: rows do not match the devices or each other, or an entry cannot be added up.
        DeviceError: something in ``devices`` is not a device.
        StrategyError: a choice that does not exist, or ``groups`` that miss or repeat a tower.
        ClusterError: not K towers on each host, or no graph for a session.
    """
    chosen = strategy_from(strategy, algorithm=algorithm, groups=groups)
    return _reduced(check_matrix(all_grads, device_strings(devices), average), average, chosen, name, cluster)


@as_written
def allreduce_grads_hierarchical(
    all_grads: Sequence[Sequence[Any]],
    devices: Sequence[Any],
    average: bool = False,
    cluster: Optional[Any] = None,
) -> List[Tuple[Any, ...]]:
    """tensorpack's function of this name, with its schedule at K = 8, for any K ≥ 1.

    K×N in, K×N out, every variable on its own. Two groups of ⌈K/2⌉ and ⌊K/2⌋ towers add up on mains that rotate with
    the variable; one main sends its partial sum to the other and gets the total back; both copy it inside their
    groups. Source of the schedule: tensorpack ``graph_builder/utils.py``.

    Raises: as :func:`allreduce_grads`.
    """
    return allreduce_grads(all_grads, devices, average, strategy=_PER_VARIABLE, cluster=cluster)


@as_written
def allreduce_grads_and_vars(
    all_grads_and_vars: Sequence[Sequence[Tuple[Any, Any]]],
    devices: Sequence[Any],
    average: bool = False,
    algorithm: Optional[str] = None,
    groups: Optional[Sequence[Sequence[int]]] = None,
    name: Optional[str] = None,
    strategy: Union[str, Strategy, None] = None,
    cluster: Optional[Any] = None,
) -> List[List[Tuple[Any, Any]]]:
    """:func:`allreduce_grads` for K rows of N (gradient, variable) pairs, as ``compute_gradients`` gives them.

    Returns:
        K lists of N pairs: the reduced gradients with each tower's own variables.

    Raises: as :func:`allreduce_grads`; also GradientError where the towers list their variables in different orders.
    """
    chosen = strategy_from(strategy, algorithm=algorithm, groups=groups)
    places = device_strings(devices)
    pairs = pairs_of(all_grads_and_vars, places)
    names = variable_names(pairs, places)
    grads = check_matrix([[grad for grad, _ in row] for row in pairs], places, average, names)
    reduced = _reduced(grads, average, chosen, name, cluster)
    return [[(grad, var) for grad, (_, var) in zip(*rows)] for rows in zip(reduced, pairs)]


def _reduced(
    grads: Matrix, average: bool, strategy: Strategy, name: Optional[str], cluster: Optional[Any]
) -> List[Tuple[Any, ...]]:
    name = name or "hier_allreduce"
    layout, across = _laid_out(cluster, name, grads, average, strategy)
    readings = _readings(layout, grads.devices, average, strategy, across)
    with recorded(name, layout.plan, grads.devices, layout.names, across.hosts):
        rows = entry_tensors(grads, layout.entries)
        towers = [Tower(device, layout.chunks, layout.names) for device in grads.devices]
        packed = [tower.pack(row) for tower, row in zip(towers, rows)]
        reduced = emit(layout.plan, packed, grads.devices, readings)
        return [
            tuple(to_gradients(tower.unpack(got, row), layout.entries, number, grads))
            for number, (tower, got, row) in enumerate(zip(towers, reduced, rows))
        ]


def reduce_to_mains(
    grads: Matrix,
    average: bool,
    strategy: Strategy,
    name: str = "reduce_to_mains",
    cluster: Optional[Any] = None,
) -> Tuple[List[Any], Layout]:
    """The reduce half: each variable's sum (or mean) on its main only.

    Returns:
        N gradients, gradient n on the device of tower ``layout.mains()[n]``, None where there is none; and the
        layout, for :func:`copy_from_mains`.

    Raises: as :func:`allreduce_grads`; also StrategyError if the strategy cuts gradients over several mains.
    """
    layout, across = _laid_out(cluster, name, grads, average, strategy, one_main=True)
    layout.mains()
    half = layout.plan.reduce_half()
    readings = _readings(layout, grads.devices, average, strategy, across)
    with recorded(name, half, grads.devices, layout.names, across.hosts):
        rows = entry_tensors(grads, layout.entries)
        packed = [Tower(d, layout.chunks, layout.names).pack(row) for d, row in zip(grads.devices, rows)]
        reduced = emit(half, packed, grads.devices, readings, only_roots=True)
        found: Dict[int, Any] = {}
        for tower, device in enumerate(grads.devices):
            own = [chunk for chunk, root in enumerate(layout.plan.roots) if root == tower]
            main = Tower(device, [layout.chunks[c] for c in own], [layout.names[c] for c in own])
            found.update(main.unpack([reduced[tower][c] for c in own], rows[tower]))
        return to_gradients(found, layout.entries, 0, grads), layout


def copy_from_mains(
    values: Sequence[Any], layout: Layout, devices: Sequence[Any], name: str = "copy_from_mains"
) -> List[Tuple[Any, ...]]:
    """The copy half, over the same plan: N values, each on its variable's main, to every tower.

    Args:
        values: N tensors, ``values[n]`` on the device of tower ``layout.mains()[n]``, shaped as the gradients were if
            these were dense; what stands for a variable without gradients is not read.
        layout: of :func:`reduce_to_mains`.
        devices: K devices.

    Returns:
        K tuples of N tensors, entry (k, n) on ``devices[k]``; None for variables without gradients.
    """
    back = layout.way_back()
    entries = [values[entry.variable] for entry in back.entries]
    with recorded(name, back.plan, devices, back.names):
        packed: List[Any] = [None] * back.plan.chunks
        for chunk, root in enumerate(back.plan.roots):
            packed[chunk] = Tower(devices[root], [back.chunks[chunk]], [back.names[chunk]]).pack(entries)[0]
        readings = [Dense(devices, False, back.names)] * back.plan.chunks
        copied = emit(back.plan, [packed] * len(devices), devices, readings)
        rows = []
        for device, got in zip(devices, copied):
            found = Tower(device, back.chunks, back.names).unpack(got, entries)
            by_variable = {back.entries[number].variable: tensor for number, tensor in found.items()}
            rows.append(tuple(by_variable.get(n) for n in range(len(values))))
        return rows


def copy_from_tower_0(values: Sequence[Any], devices: Sequence[Any], name: str = "broadcast") -> List[Tuple[Any, ...]]:
    """N values of tower 0 on every tower, down a binomial tree.

    Args:
        values: N tensors of any dtype on ``devices[0]``.
        devices: K devices.
        name: the name scope of the ops.

    Returns:
        K tuples of N tensors, entry (k, n) on ``devices[k]``.
    """
    same = Matrix((tuple(values),) * len(devices), tuple(devices), tuple(value.op.name for value in values))
    return copy_from_mains(values, lay_out(same, Strategy(algorithm="tree", mains=0)), devices, name)


def _laid_out(
    cluster: Optional[Any], name: str, grads: Matrix, average: bool, strategy: Strategy, one_main: bool = False
) -> Tuple[Layout, CrossHostReduce]:
    """The layout, and what joins the hosts, who compare first what each of them has and has planned."""
    if cluster is None:
        return lay_out(grads, strategy, one_main), CrossHostReduce()
    if not hasattr(cluster, "across"):
        raise ClusterError(f"cluster={cluster!r}: expected a hier_allreduce.Cluster (from a file: Cluster.load)")
    layout = lay_out(grads, strategy, one_main, cluster.size, cluster.network)
    facts = {
        "average": average,
        "strategy": {field: str(value) for field, value in dataclasses.asdict(strategy).items()},
        "plan": _fingerprint(layout),
    }
    return layout, cluster.across(name, grads, facts)


def _fingerprint(layout: Layout) -> str:
    """The same on hosts with the same plan; with different ones their collectives would wait, or add what differs."""
    steps = repr((layout.plan.steps, layout.chunks)).encode()
    return f"{layout.plan.algorithm}, {layout.plan.chunks} chunks, {hashlib.sha256(steps).hexdigest()[:12]}"


def _readings(
    layout: Layout, devices: Sequence[Any], average: bool, strategy: Strategy, across: CrossHostReduce
) -> List[DeviceReduction]:
    """How each chunk is added up."""
    dense, gather, indices = (
        Dense(devices, average, layout.names, across),
        Gather(devices, average, layout.names),
        Gather(devices, False, layout.names),
    )
    narrow = {wire: Narrow(devices, average, layout.names, wire, across) for wire in NARROW}

    def reading(entry: Entry) -> DeviceReduction:
        if entry.part != DENSE:
            return gather if entry.part == VALUES else indices
        wire = strategy.wire_dtype if entry.spec.dtype == "float32" else entry.spec.dtype
        return narrow.get(str(wire), dense) if len(devices) * across.hosts > 1 else dense

    return [reading(layout.entry(chunk)) for chunk in range(len(layout.chunks))]
