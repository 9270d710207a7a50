"""The all-reduces to measure, from facts that the first run of the program has written."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

from ..errors import HierAllreduceError
from ..planning import Gradient
from ..planning.candidate import Candidate
from ..planning.rule import rule

NOW = "now"
_PLANNED = {
    "algorithm": "auto",
    "chunk_bytes": None,
    "groups": None,
    "main": None,
}
_TOWER_0 = {**_PLANNED, "algorithm": "flat", "chunk_bytes": 0, "main": 0}
_NARROW = ["float16", "bfloat16"]
_NCCL = ["NcclAllReduce", "tensorpack-nccl"]
_PEERS = {
    "keras": ["NcclAllReduce", "ReductionToOneDevice", "HierarchicalCopyAllReduce"],
    "tensorpack": [
        "tensorpack-nccl",
        "tensorpack-hierarchical",
        "tensorpack-gpu",
        "tensorpack-cpu",
    ],
    "towers": ["tower-0-sum"],
}
NAMES = [
    "planned",
    "rule",
    "half-chunks",
    "double-chunks",
    *_NARROW,
    *(name for of in _PEERS.values() for name in of),
]


def candidates(facts: Dict[str, Any], only: Sequence[str] = ()) -> List[Candidate]:
    """Return the candidates for a program; the first is the program's all-reduce as it is.

    Args:
        facts: of its first run: ``front_end``, ``towers``, ``gpus``, ``bytes``, ``chunk_bytes``, ``algorithm``, and
            ``is_default``, which tells that the program itself asks for the plan.
        only: names of candidates; empty for all but those with 16 bits, which round.

    Raises:
        HierAllreduceError: a name in ``only`` that is not for this program.
    """
    front_end, towers, gpus = facts["front_end"], facts["towers"], facts["gpus"]
    by_rule = rule([Gradient(facts["bytes"] // 4, 4, "float32", True, is_flat=True)], towers)
    chunk = facts["chunk_bytes"] or by_rule.chunk_bytes
    peers = [] if facts.get("update") == "main" else _PEERS[front_end]
    found = [
        Candidate(name, name, _TOWER_0 if name == "tower-0-sum" else {})
        for name in peers
        if (gpus or name not in _NCCL) and (towers == 8 or name != "tensorpack-hierarchical")
    ]
    changes: Dict[str, Dict[str, Any]] = {
        "planned": {},
        "rule": {"algorithm": by_rule.algorithm, "chunk_bytes": by_rule.chunk_bytes},
        "half-chunks": {"chunk_bytes": chunk // 2},
        "double-chunks": {"chunk_bytes": chunk * 2},
    }
    if facts["is_default"]:
        del changes["planned"]  # it is the program's
        if (facts["algorithm"], chunk) == (by_rule.algorithm, by_rule.chunk_bytes):
            del changes["rule"]
    if only and front_end != "keras":
        changes.update({name: {"wire_dtype": name} for name in _NARROW})
    found += [Candidate(name, changes={**_PLANNED, **fields}) for name, fields in changes.items()]
    names = [candidate.name for candidate in found]
    for name in only:
        if name not in names:
            raise HierAllreduceError(
                f"{name!r} is not for this program, which has {', '.join(names)}"
            )
    return [
        Candidate(NOW),
        *(candidate for candidate in found if not only or candidate.name in only),
    ]
