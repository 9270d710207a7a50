"""The all-reduces that ``tune`` measures in a program, each known by its name.

::

    the program as it is │ its front end's baselines │ ours by the rule │ hierarchical
"""

from __future__ import annotations

import re
from dataclasses import fields
from itertools import chain
from typing import Any, Dict, List, Sequence, Tuple

from hier_allreduce import HierAllreduceError, Strategy

from .journal import Run

CURRENT = "the program as it is"
# What a program used before hier_allreduce comes first: people want to know what the change brings.
BASELINES = {
    "keras": ("NcclAllReduce", "ReductionToOneDevice", "HierarchicalCopyAllReduce"),
    "tensorpack": (
        "tensorpack-hierarchical",
        "tensorpack-gpu",
        "tensorpack-nccl",
        "tensorpack-cpu",
    ),
    "towers": ("tower-0-sum",),
}
ALL_BASELINES = tuple(chain(*BASELINES.values()))
NARROW = ("float16", "bfloat16")
OTHERS = (*NARROW, "no-edges", *ALL_BASELINES)  # names that are no algorithm's

_DEFAULTS: Dict[str, Any] = {field.name: field.default for field in fields(Strategy)}
# An algorithm keeps these of the program's strategy; all else is left to the rule.
_KEPT = ("sparse", "missing", "wire_dtype", "edges")
_FREE = {field: default for field, default in _DEFAULTS.items() if field not in _KEPT}
# The plain sum knows neither 16-bit copies nor control edges, whatever the program has.
_PLAIN = {"algorithm": "flat", "chunk_bytes": 0, "main": 0, "wire_dtype": None, "edges": False}
# These change nothing else, because they are to be compared with the program as it is.
_CHANGES: Dict[str, Dict[str, Any]] = {
    **{name: {} for name in (CURRENT, *ALL_BASELINES)},
    **{dtype: {"wire_dtype": dtype} for dtype in NARROW},
    "no-edges": {"edges": False},
    "tower-0-sum": {**_FREE, **_PLAIN},
}
_NAME = re.compile(r"^(.*?)(?:-(\d+)MiB)?$")


def changes_of(name: str) -> Dict[str, Any]:
    """Return the fields of :class:`hier_allreduce.Strategy` that a candidate changes.

    Raises:
        HierAllreduceError: no candidate has this name.
    """
    if name in _CHANGES:
        return _CHANGES[name]
    algorithm, mebibytes = _NAME.findall(name)[0]
    changes = {**_FREE, "algorithm": algorithm}
    if mebibytes:
        changes["chunk_bytes"] = int(mebibytes) << 20
    try:
        Strategy(**changes)
    except HierAllreduceError as error:
        raise HierAllreduceError(f"{error}, or one of {', '.join(OTHERS)}") from None
    return changes


def candidates_for(run: Run, only: Sequence[str]) -> Tuple[List[str], Dict[str, str]]:
    """Return the candidates beside the program as it is, and why others are left out.

    ``run`` is one of the program; ``only`` has names for ``--only``, or none for the usual ones.
    """
    place = "GPUs" if run.gpus else "CPU devices"
    unfit = f"not for {run.front_end} with {run.towers} towers on {place}"
    own = {**_DEFAULTS, **run.strategy}
    candidates = []
    left_out = {}
    for name in only or [*BASELINES[run.front_end], "auto", "hierarchical"]:
        if not _fits(name, run):
            left_out[name] = unfit
        elif name not in ALL_BASELINES and {**own, **changes_of(name)} == own:
            left_out[name] = f"{CURRENT} has this strategy"
        else:
            candidates.append(name)
    return candidates, left_out


def _fits(name: str, run: Run) -> bool:
    """Return whether a program can run with a candidate."""
    if name in NARROW:
        return run.front_end != "keras"  # it does not say which values are gradients
    if name not in ALL_BASELINES:
        return True
    # An update that runs once, or sharded, has no equal among them.
    if name not in BASELINES[run.front_end] or run.update in ("once", "sharded"):
        return False
    # Of an odd number of replicas HierarchicalCopyAllReduce drops the last, a wrong sum.
    needs = {
        "tensorpack-hierarchical": run.towers == 8,
        "HierarchicalCopyAllReduce": run.towers % 2 == 0,
    }
    return needs.get(name, run.gpus or "nccl" not in name.lower())
