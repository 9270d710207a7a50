"""The all-reduces by their names: ours, ours by an algorithm, ours without edges, baselines."""

from __future__ import annotations

from typing import Any, Iterable

from baselines import BASELINES, Build, Matrix
from ratios import OURS, WITHOUT_EDGES

from hier_allreduce import HierAllreduceError, Strategy, allreduce_grads

MIB = 1 << 20


def all_reduce(name: str) -> Build:
    """Return a baseline, or ours by :func:`strategy_of`."""
    if name in BASELINES:
        return BASELINES[name]
    strategy = strategy_of(name)

    def build(grads: Matrix, devices: Any, average: bool) -> Matrix:
        return allreduce_grads(grads, devices, average, strategy)

    return build


def strategy_of(name: str) -> Strategy:
    """Return the strategy of ours, or of an algorithm with chunks of so many MiB: ``tree/8``.

    With ``" without edges"`` ours adds no control edges; with ``" rows"`` or ``" dense"`` sparse
    gradients travel so.
    """
    sparse = "auto"
    for ending, choice in ((" rows", "rows"), (" dense", "dense")):
        if name.endswith(ending):
            name, sparse = name[: -len(ending)], choice
    has_edges = not name.endswith(WITHOUT_EDGES)
    name = name.replace(WITHOUT_EDGES, "")
    algorithm, _, size = name.partition("/")
    return Strategy(
        "auto" if algorithm == OURS else algorithm,
        chunk_bytes=int(float(size) * MIB) if size else None,
        edges=has_edges,
        sparse=sparse,
    )


def check_names(names: Iterable[str]) -> None:
    """Check the names of ``--only`` before anything is measured.

    Raises:
        SystemExit: there is no such all-reduce.
    """
    for name in names:
        try:
            all_reduce(name)
        except HierAllreduceError as error:
            raise SystemExit(f"--only: {name!r}: {error}") from None
