"""The functions people call: K×N gradients in, K×N reduced gradients out."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

from .algorithms import ALGORITHMS
from .devices import device_strings
from .emit import emit
from .errors import GradientError, StrategyError
from .gradients import Matrix, matrix, variable_names, where
from .plan import Plan, verify


def allreduce_grads(
    all_grads: Sequence[Sequence[Any]],
    devices: Sequence[Any],
    average: bool = False,
    algorithm: str = "hierarchical",
    groups: Optional[Sequence[Sequence[int]]] = None,
    name: Optional[str] = None,
) -> List[Tuple[Any, ...]]:
    """Give every tower the sum (or mean) of all towers' gradients.

    ::

        grads[tower][variable]                      result[tower][variable]
        /gpu:0   a0   b0                            /gpu:0   a0+a1   b0+b1
        /gpu:1   a1   b1             ──►            /gpu:1   a0+a1   b0+b1

    Plain dataflow: any subset of the results can be fetched, and gradients flow through.

    Args:
        all_grads: K×N, ``all_grads[tower][variable]``; rows may be any iterables.
        devices: K devices, ``devices[tower]``: strings, ``tf.DeviceSpec``, ``tf.config.LogicalDevice``.
        average: the mean instead of the sum. It is taken once, before the copies back, so that all towers hold
            the same bits.
        algorithm: ``"hierarchical"`` (groups, then across), ``"tree"`` (caffe2 muji's), or ``"flat"`` (one main for
            each variable).
        groups: for ``"hierarchical"``: tuples that hold each tower number once; two halves by default.
        name: the name scope of the ops.

    Returns:
        A list of K tuples of N tensors; entry (k, n) lives on ``devices[k]``.

    Raises:
        GradientError: rows do not match the devices or each other, or an entry cannot be added up.
        DeviceError: something in ``devices`` is not a device.
        StrategyError: unknown ``algorithm``, or ``groups`` that miss or repeat a tower.
    """
    places = device_strings(devices)
    grads = matrix(all_grads, places, average)
    return _reduced(grads, average, algorithm, groups, name)


def allreduce_grads_hierarchical(
    all_grads: Sequence[Sequence[Any]], devices: Sequence[Any], average: bool = False
) -> List[Tuple[Any, ...]]:
    """tensorpack's function of this name, with its schedule at K = 8, for any K ≥ 1.

    K×N in, K×N out. Two groups of ⌈K/2⌉ and ⌊K/2⌋ towers add up on mains that rotate with the variable; one main
    sends its partial sum to the other and gets the total back; both copy it inside their groups. Source of the
    schedule: tensorpack ``graph_builder/utils.py``.

    Raises: as :func:`allreduce_grads`.
    """
    return allreduce_grads(all_grads, devices, average, algorithm="hierarchical")


def allreduce_grads_and_vars(
    all_grads_and_vars: Sequence[Sequence[Tuple[Any, Any]]], devices: Sequence[Any], average: bool = False, **how: Any
) -> List[List[Tuple[Any, Any]]]:
    """:func:`allreduce_grads` for K rows of N (gradient, variable) pairs, as ``compute_gradients`` gives them.

    Returns:
        K lists of N pairs: the reduced gradients with each tower's own variables.

    Raises: as :func:`allreduce_grads`; also GradientError where the towers list their variables in different orders.
    """
    places = device_strings(devices)
    pairs = [list(row) for row in all_grads_and_vars]
    for tower, row in enumerate(pairs):
        for variable, pair in enumerate(row):
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                place = where(tower, places, variable)
                raise GradientError(
                    f"{place}: expected a (gradient, variable) pair; allreduce_grads takes gradients alone"
                )
    names = variable_names(pairs, places)
    grads = matrix([[grad for grad, _ in row] for row in pairs], places, average, names)
    reduced = _reduced(grads, average, **how)
    return [[(grad, var) for grad, (_, var) in zip(*rows)] for rows in zip(reduced, pairs)]


def _reduced(
    grads: Matrix, average: bool, algorithm: str = "hierarchical", groups: Any = None, name: Optional[str] = None
) -> List[Tuple[Any, ...]]:
    plan = make_plan(algorithm, len(grads.devices), len(grads.names), groups)
    result = emit(plan, grads.rows, grads.devices, average, name or "hier_allreduce", grads.names)
    return [tuple(row) for row in result]


def make_plan(algorithm: str, devices: int, variables: int, groups: Any = None) -> Plan:
    """The verified plan with one chunk for each variable, mains rotating with the variable."""
    if algorithm not in ALGORITHMS:
        raise StrategyError(f"algorithm={algorithm!r} is unknown; there are {', '.join(map(repr, ALGORITHMS))}")
    return verify(ALGORITHMS[algorithm](devices, range(variables), groups))
