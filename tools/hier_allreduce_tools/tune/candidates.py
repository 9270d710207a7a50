"""The all-reduces that ``tune`` measures in a program, each known by its name.

::

    the program as it is │ its front end's baselines │ hierarchical, or what --only names
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

from hier_allreduce import HierAllreduceError, Strategy

from .journal import Run

CURRENT = "the program as it is"
# What a program used before hier_allreduce, by front ends: people want to know what the change
# brings.
BASELINES = {
    "NcclAllReduce": "keras",
    "ReductionToOneDevice": "keras",
    "HierarchicalCopyAllReduce": "keras",
    "tensorpack-hierarchical": "tensorpack",
    "tensorpack-gpu": "tensorpack",
    "tensorpack-nccl": "tensorpack",
    "tensorpack-cpu": "tensorpack",
    "tower-0-sum": "towers",
}
# The plain sum knows neither 16-bit copies nor control edges, whatever the program has.
_PLAIN = {"algorithm": "flat", "chunk_bytes": 0, "main": 0, "wire_dtype": None, "edges": False}
# A strategy in which these are defaults leaves them to the program.
_KEPT = ("sparse", "missing", "wire_dtype", "edges")


def changes_of(name: str) -> Dict[str, Any]:
    """Return the fields of :class:`hier_allreduce.Strategy` that a candidate changes.

    Raises:
        HierAllreduceError: no candidate has this name.
    """
    if name == "tower-0-sum":
        return {**changes_of("flat"), **_PLAIN}
    if name == CURRENT or name in BASELINES:
        return {}
    try:
        strategy = Strategy(name)
    except HierAllreduceError:
        strategy = Strategy.load(name)
    changes = {}
    for field, value in vars(strategy).items():
        if field not in _KEPT or value != getattr(Strategy, field):
            changes[field] = value
    return changes


def candidates_for(run: Run, only: Sequence[str]) -> Tuple[List[str], Dict[str, str]]:
    """Return the candidates, and why others are left out.

    ``run`` is one of the program; ``only`` has names for ``--only``, or none for the usual ones.
    """
    baselines = [name for name, front_end in BASELINES.items() if front_end == run.front_end]
    names = only or [*baselines, "hierarchical"]
    candidates = [CURRENT, *(name for name in names if _fits(name, run))]
    unfit = f"not for {run.front_end} with {run.towers} towers, update={run.update!r}"
    return candidates, {name: unfit for name in names if name not in candidates}


def _fits(name: str, run: Run) -> bool:
    """Return whether a program can run with a candidate."""
    if name not in BASELINES:
        # TensorFlow does not say which values are gradients, and others must not be rounded.
        return run.front_end != "keras" or not changes_of(name).get("wire_dtype")
    # An update that runs once, or sharded, has no equal among them.
    if BASELINES[name] != run.front_end or run.update in ("once", "sharded"):
        return False
    # Of an odd number of replicas HierarchicalCopyAllReduce drops the last, a wrong sum.
    needs = {
        "tensorpack-hierarchical": run.towers == 8,
        "HierarchicalCopyAllReduce": run.towers % 2 == 0,
    }
    return needs.get(name, True)
