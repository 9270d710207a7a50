"""The all-reduces that ``tune`` measures in a program, most interesting first.

::

    the program as it is │ as it was │ its front end's baselines │ ours by the rule │ hierarchical
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Any, Dict, List, Sequence, Tuple

from hier_allreduce import HierAllreduceError, Strategy

from .journal import Built, Candidate

BASELINES = {
    "keras": ("NcclAllReduce", "ReductionToOneDevice", "HierarchicalCopyAllReduce"),
    "tensorpack": (
        "tensorpack-gpu",
        "tensorpack-hierarchical",
        "tensorpack-nccl",
        "tensorpack-cpu",
    ),
    "towers": ("tower-0-sum",),
}
ALL_BASELINES = tuple(chain(*BASELINES.values()))
NARROW = ("float16", "bfloat16")
NO_EDGES = "no-edges"
OTHERS = (*NARROW, NO_EDGES, *ALL_BASELINES)  # names that are no algorithm's

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
    **{dtype: {"wire_dtype": dtype} for dtype in NARROW},
    NO_EDGES: {"edges": False},
    **{baseline: {} for baseline in ALL_BASELINES},
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
    Strategy(**changes)
    return changes


def candidates_for(built: Built, only: Sequence[str]) -> Tuple[List[Candidate], Dict[str, str]]:
    """Return the candidates beside the program as it is, and why others are left out.

    ``only`` has names for ``--only``; it is empty for the usual candidates.

    Raises:
        HierAllreduceError: none is left.
    """
    original = _original_of(built)
    # The program as it was comes first, because people want to know what the change has brought.
    baselines = sorted(BASELINES[built.front_end], key=lambda name: name != original)
    names = only or [*baselines, "auto", "hierarchical"]
    reasons = {name: _why_not(name, built) for name in names}
    candidates = []
    for name in names:
        if not reasons[name]:
            baseline = name if name in ALL_BASELINES else ""
            candidates.append(Candidate(name, baseline, changes_of(name), name == original))
    left_out = {name: reason for name, reason in reasons.items() if reason}
    if not candidates:
        listed = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise HierAllreduceError(f"no candidate is for this program: {listed}")
    return candidates, left_out


def _why_not(name: str, built: Built) -> str:
    """Return why a program cannot run with a candidate; empty if it can."""
    if name in NARROW and built.front_end == "keras":
        return "TensorFlow does not say which values are gradients"
    if name not in ALL_BASELINES:
        return ""
    if name not in BASELINES[built.front_end]:
        return f"the program's front end is {built.front_end}"
    if built.update in ("once", "sharded"):
        return f"it has no equal of update={built.update!r}"
    if "nccl" in name.lower() and not built.gpus:
        return "NCCL needs GPUs"
    if name == "tensorpack-hierarchical" and built.towers != 8:
        return f"it needs 8 towers, and there are {built.towers}"
    # TensorFlow has two groups of K // 2 replicas, so that the sum would be a wrong one.
    if name == "HierarchicalCopyAllReduce" and built.towers % 2:
        return "it drops the last of an odd number of replicas"
    return ""


def _original_of(built: Built) -> str:
    """Return the baseline that a program used before hier_allreduce, if it chose none itself."""
    if built.front_end == "tensorpack":
        return "tensorpack-hierarchical" if built.towers == 8 else "tensorpack-gpu"
    if built.front_end == "keras":
        # On CPU devices Keras has a ring, which no name selects.
        return "NcclAllReduce" if built.gpus else ""
    return "tower-0-sum"
