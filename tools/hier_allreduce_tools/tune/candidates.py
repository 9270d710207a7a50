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

from .journal import Built

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

_FREE: Dict[str, Any] = {"algorithm": "auto", "chunk_bytes": None, "groups": None, "main": None}
# The plain sum knows neither 16-bit copies nor control edges, whatever the program has.
_ON_TOWER_0 = {
    **_FREE,
    "algorithm": "flat",
    "chunk_bytes": 0,
    "main": 0,
    "wire_dtype": None,
    "edges": False,
}
# These change nothing else, because they are to be compared with the program as it is.
_CHANGES: Dict[str, Dict[str, Any]] = {
    **{name: {} for name in (CURRENT, *ALL_BASELINES)},
    **{dtype: {"wire_dtype": dtype} for dtype in NARROW},
    "no-edges": {"edges": False},
    "tower-0-sum": _ON_TOWER_0,
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


def candidates_for(built: Built, only: Sequence[str]) -> Tuple[List[str], Dict[str, str]]:
    """Return the candidates beside the program as it is, and why others are left out.

    ``only`` has names for ``--only``; it is empty for the usual candidates.
    """
    place = "GPUs" if built.gpus else "CPU devices"
    unfit = f"not for {built.front_end} with {built.towers} towers on {place}"
    own = {**{field.name: field.default for field in fields(Strategy)}, **built.strategy}
    candidates = []
    left_out = {}
    for name in only or [*BASELINES[built.front_end], "auto", "hierarchical"]:
        if not _fits(name, built):
            left_out[name] = unfit
        elif name not in ALL_BASELINES and {**own, **changes_of(name)} == own:
            left_out[name] = f"{CURRENT} has this strategy"
        else:
            candidates.append(name)
    return candidates, left_out


def _fits(name: str, built: Built) -> bool:
    """Return whether a program can run with a candidate."""
    if name in NARROW:
        return built.front_end != "keras"  # it does not say which values are gradients
    if name not in ALL_BASELINES:
        return True
    # An update that runs once, or sharded, has no equal among them.
    if name not in BASELINES[built.front_end] or built.update in ("once", "sharded"):
        return False
    # Of an odd number of replicas HierarchicalCopyAllReduce drops the last, a wrong sum.
    needs = {
        "tensorpack-hierarchical": built.towers == 8,
        "HierarchicalCopyAllReduce": built.towers % 2 == 0,
    }
    return needs.get(name, built.gpus or "nccl" not in name.lower())
