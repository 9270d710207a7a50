"""The all-reduces that ``hier-allreduce tune`` measures in a program, most promising first.

::

    facts of a first run ──► peers │ algorithms × chunk sizes │ groups of NVLink ──► Candidate, …
                                                                                └──► left out: why
"""

from __future__ import annotations

import re
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from .algorithms import BY_NAME, WITH_GROUPS, schedules_of

MIB = 1 << 20
SIZES = (8, 4, 16, 2)  # MiB of a chunk; the first ones are measured if time is short
NOW = "now"  # the program as it is
DEFAULT = "default"
NARROW = ("float16", "bfloat16")
PEERS = {
    "keras": ("NcclAllReduce", "ReductionToOneDevice", "HierarchicalCopyAllReduce"),
    "tensorpack": (
        "tensorpack-nccl",
        "tensorpack-hierarchical",
        "tensorpack-gpu",
        "tensorpack-cpu",
    ),
    "towers": ("tower-0-sum",),
}
ALONG_NVLINK = {f"{name}-nvlink": name for name in WITH_GROUPS}  # groups along NVLink
ALGORITHMS = (*BY_NAME, *ALONG_NVLINK)
NAMES = (*ALGORITHMS, DEFAULT, *NARROW, *PEERS["keras"], *PEERS["tensorpack"], *PEERS["towers"])

_FREE: Dict[str, Any] = {"algorithm": "auto", "chunk_bytes": None, "groups": None, "main": None}
_TOWER_0 = {**_FREE, "algorithm": "flat", "chunk_bytes": 0, "main": 0}
_WITH_SIZE = re.compile(r"(.+)-(\d+)MiB$")


class Candidate(NamedTuple):
    """An all-reduce to measure: the program's as it is, another strategy of ours, or a peer.

    Attributes:
        name: for ``--only`` and the table.
        peer: the name of an all-reduce that is not ours; empty for ours.
        changes: fields of :class:`hier_allreduce.Strategy`, instead of the program's.
    """

    name: str
    peer: str = ""
    changes: Dict[str, Any] = {}  # noqa: RUF012  no one changes it

    @property
    def is_new(self) -> bool:
        """Whether this is ours, and not the program as it is."""
        return not self.peer and self.name != NOW


class Candidates(NamedTuple):
    """The candidates for a program, without the program as it is; and why others are left out."""

    chosen: List[Candidate]
    left_out: Dict[str, str]


def is_name(name: str) -> bool:
    """Return whether ``--only`` may have a name, such as ``flat``, ``flat-64MiB`` or a peer's."""
    match = _WITH_SIZE.match(name)
    return name in NAMES or bool(match and match[1] in ALGORITHMS)


def candidates_for(
    facts: Dict[str, Any],
    groups: Optional[Sequence[Sequence[int]]] = None,
    only: Sequence[str] = (),
) -> Candidates:
    """Return the candidates for a program.

    Args:
        facts: of its first run: ``front_end``, ``update``, ``towers``, ``gpus``, ``bytes``,
            ``algorithm``, ``chunk_bytes``, ``is_default``.
        groups: two groups of towers along NVLink, where they differ from the halves.
        only: names of candidates, or of algorithms for all their sizes; empty for all but those
            with 16 bits, because these round.
    """
    left_out: Dict[str, str] = {}
    found = [*_peers(facts, left_out), *_ours(facts, groups, only, left_out)]
    if facts["front_end"] == "keras":
        left_out.update(dict.fromkeys(NARROW, "TensorFlow does not say which values are gradients"))
    elif only:
        found += [Candidate(name, changes={"wire_dtype": name}) for name in NARROW]
    else:
        left_out.update(dict.fromkeys(NARROW, "it rounds: --only names it"))
    if only:
        known = [*left_out, *(candidate.name for candidate in found)]
        strange = [name for name in only if not _names_one_of(name, known)]
        front_end = facts["front_end"]
        left_out.update(dict.fromkeys(strange, f"the program's front end is {front_end}"))
        left_out = {name: why for name, why in left_out.items() if _asked(name, only)}
        found = [candidate for candidate in found if _asked(candidate.name, only)]
    return Candidates(found, left_out)


def _asked(name: str, only: Iterable[str]) -> bool:
    """Return whether ``--only`` names a candidate, or its algorithm."""
    match = _WITH_SIZE.match(name)
    return name in only or bool(match and match[1] in only)


def _names_one_of(name: str, known: Iterable[str]) -> bool:
    """Return whether a name in ``--only`` means a known candidate."""
    return any(_asked(other, [name]) for other in known)


def _peers(facts: Dict[str, Any], left_out: Dict[str, str]) -> List[Candidate]:
    """Return the peers that run in the program's front end."""
    found = []
    for name in PEERS[facts["front_end"]]:
        why_not = _why_not(name, facts)
        if why_not:
            left_out[name] = why_not
        else:
            found.append(Candidate(name, name, _TOWER_0 if name == "tower-0-sum" else {}))
    return found


def _why_not(peer: str, facts: Dict[str, Any]) -> str:
    """Return why a peer cannot run in the program; "" if it can."""
    if facts.get("update") == "main":
        return "it has no equal of update='main'"
    if "nccl" in peer.lower() and not facts["gpus"]:
        return "NCCL needs GPUs"
    if peer == "tensorpack-hierarchical" and facts["towers"] != 8:
        return f"it needs 8 towers, and there are {facts['towers']}"
    return ""


def _ours(
    facts: Dict[str, Any],
    groups: Optional[Sequence[Sequence[int]]],
    only: Sequence[str],
    left_out: Dict[str, str],
) -> List[Candidate]:
    """Return our algorithms, each with the sizes of chunks that differ for the program's bytes."""
    found = []
    if not facts["is_default"]:
        found.append(Candidate(DEFAULT, changes=_FREE))
    algorithms = _algorithms(facts["towers"], groups, left_out)
    for size in _sizes(facts["bytes"], only, left_out):
        for name, changes in algorithms.items():
            candidate = Candidate(
                f"{name}-{size}MiB", changes={**_FREE, **changes, "chunk_bytes": size * MIB}
            )
            is_now = (name, size * MIB) == (facts["algorithm"], facts["chunk_bytes"])
            if is_now and facts["gpus"]:  # chunks on CPU devices are not of one size
                left_out[candidate.name] = "it is the program as it is"
            else:
                found.append(candidate)
    return found


def _sizes(total: int, only: Sequence[str], left_out: Dict[str, str]) -> List[int]:
    """Return the usual sizes of chunks in MiB, and those in ``--only``; larger ones are equal."""
    whole = min((size for size in SIZES if size * MIB >= total), default=max(SIZES))
    for size in SIZES:
        if size > whole:
            left_out[f"chunks of {size} MiB"] = f"all gradients fit into a chunk of {whole} MiB"
    named = [int(match[2]) for match in map(_WITH_SIZE.match, only) if match]
    usual = [size for size in SIZES if size <= whole]
    return list(dict.fromkeys([*usual, *named]))


def _algorithms(
    towers: int, groups: Optional[Sequence[Sequence[int]]], left_out: Dict[str, str]
) -> Dict[str, Dict[str, Any]]:
    """Return the strategies of all algorithms whose steps differ on K towers, by their names."""
    found: Dict[str, Dict[str, Any]] = {}
    names: Dict[Tuple[Any, ...], str] = {}
    for name, algorithm in BY_NAME.items():
        first = names.setdefault(schedules_of(algorithm, towers), name)
        if first == name:
            found[name] = {"algorithm": name}
        else:
            left_out[name] = f"on {towers} towers it has the steps of {first}"
    fitting = groups is not None and sum(map(len, groups)) == towers
    for along, name in ALONG_NVLINK.items():
        if groups is not None and fitting:
            found[along] = {"algorithm": name, "groups": [list(group) for group in groups]}
        else:
            left_out[along] = "nvidia-smi shows no groups of these towers other than the halves"
    return found
