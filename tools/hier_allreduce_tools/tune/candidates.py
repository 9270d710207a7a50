"""The all-reduces that ``tune`` measures in a program, most interesting first.

::

    the program as it is │ as it was │ its front end's baselines │ ours by the rule │ two groups
                                                                   └── not if their plans are equal
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from hier_allreduce.errors import HierAllreduceError
from hier_allreduce.planning.algorithms import BY_NAME, WITH_GROUPS
from .protocol import ProgramFacts

AS_IT_IS = "the program as it is"
RULE = "auto"
NARROW = ("float16", "bfloat16")
NVLINK = "-nvlink"  # the end of an algorithm's name, with groups along NVLink
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
ALGORITHMS = (RULE, *BY_NAME, *(algorithm + NVLINK for algorithm in WITH_GROUPS))
NO_EDGES = "no-edges"
CANDIDATES = (*ALGORITHMS, *NARROW, NO_EDGES, *ALL_BASELINES)
GROUPED = "hierarchical"

_FREE: Dict[str, Any] = {"algorithm": RULE, "chunk_bytes": None, "groups": None, "main": None}
# The plain sum knows neither 16-bit copies nor control edges, whatever the program has.
_TOWER_0 = {
    **_FREE,
    "algorithm": "flat",
    "chunk_bytes": 0,
    "main": 0,
    "wire_dtype": None,
    "edges": False,
}
_WITH_SIZE = re.compile(r"(.+)-(\d+)MiB$")

Groups = Sequence[Sequence[int]]


class Candidate(NamedTuple):
    """An all-reduce to measure: the program's as it is, another strategy of ours, or a baseline.

    Attributes:
        name: its name for ``--only``, in the table and in the JSON object.
        baseline: the name of an all-reduce that is not ours; empty for ours.
        changes: fields of :class:`hier_allreduce.Strategy`, instead of the program's.
        was: whether it is the program as it was: what its front end takes by itself.
    """

    name: str = AS_IT_IS
    baseline: str = ""
    changes: Dict[str, Any] = {}  # noqa: RUF012  no one changes it
    was: bool = False

    @property
    def is_as_it_is(self) -> bool:
        """Whether this is the program as it is."""
        return self.name == AS_IT_IS

    @property
    def title(self) -> str:
        """The name in the table and in sentences."""
        return f"{self.name} (as it was)" if self.was else self.name


def check_name(name: str) -> None:
    """Check a name for ``--only``, such as ``flat``, ``flat-64MiB`` or a baseline's.

    Raises:
        HierAllreduceError: it is none; the message lists them.
    """
    match = _WITH_SIZE.match(name)
    if name in CANDIDATES or (match and match[1] in ALGORITHMS):
        return
    algorithm, _, size = name.rpartition("-")
    if algorithm in ALGORITHMS and re.match(r"\d", size):
        raise HierAllreduceError(
            f"{name!r}: the size of chunks is in whole MiB, such as {algorithm}-8MiB"
        )
    raise HierAllreduceError(f"{name!r} is no candidate; there are {', '.join(CANDIDATES)}")


def strategies_for(only: Sequence[str], groups: Optional[Groups]) -> Dict[str, Dict[str, Any]]:
    """Return the changes of all candidates of ours, by their names.

    Args:
        only: names for ``--only``; empty for the usual candidates.
        groups: two groups of towers along NVLink, where they differ from the halves.
    """
    usual = [RULE, GROUPED] if groups is None else [RULE, GROUPED + NVLINK, GROUPED]
    strategies: Dict[str, Dict[str, Any]] = {}
    for name in only or usual:
        # These two change nothing else, because they are to be compared with the program as it is.
        if name in NARROW:
            strategies[name] = {"wire_dtype": name}
            continue
        if name == NO_EDGES:
            strategies[name] = {"edges": False}
            continue
        match = _WITH_SIZE.match(name)
        algorithm = match[1] if match else name
        changes = {**_FREE, "chunk_bytes": int(match[2]) << 20 if match else None}
        if algorithm.endswith(NVLINK):
            # Without groups it would be a plan of halves, under a name that says otherwise.
            if groups is None:
                continue
            changes["groups"] = [list(group) for group in groups]
            algorithm = algorithm[: -len(NVLINK)]
        if algorithm in (RULE, *BY_NAME):
            strategies[name] = {**changes, "algorithm": algorithm}
    return strategies


def _why_not(baseline: str, facts: ProgramFacts) -> str:
    """Return why a program cannot run with a baseline; empty if it can."""
    if baseline not in BASELINES[facts.front_end]:
        return f"the program's front end is {facts.front_end}"
    if facts.update != "replicated":
        return f"it has no equal of update={facts.update!r}"
    if "nccl" in baseline.lower() and not facts.gpus:
        return "NCCL needs GPUs"
    if baseline == "tensorpack-hierarchical" and facts.towers != 8:
        return f"it needs 8 towers, and there are {facts.towers}"
    # TensorFlow has two groups of K // 2 replicas, so that the sum would be a wrong one.
    if baseline == "HierarchicalCopyAllReduce" and facts.towers % 2:
        return "it drops the last of an odd number of replicas"
    return ""


def candidates_for(
    facts: ProgramFacts, strategies: Dict[str, Dict[str, Any]], only: Sequence[str] = ()
) -> Tuple[List[Candidate], Dict[str, str]]:
    """Return the candidates beside the program as it is, and why others are left out.

    Args:
        facts: what the first run has told, also about the plans of ``strategies``.
        strategies: those of :func:`strategies_for`.
        only: names for ``--only``; empty for the usual candidates.

    Raises:
        HierAllreduceError: none is left.
    """
    candidates: List[Candidate] = []
    left_out: Dict[str, str] = {}

    # The program as it was comes first, because people want to know what the change has brought.
    asked = [name for name in only if name in ALL_BASELINES]
    baselines = asked if only else BASELINES[facts.front_end]
    for baseline in sorted(baselines, key=lambda baseline: baseline != _as_it_was(facts)):
        why_not = _why_not(baseline, facts)
        if why_not:
            left_out[baseline] = why_not
        else:
            changes = _TOWER_0 if baseline == "tower-0-sum" else {}
            candidates.append(Candidate(baseline, baseline, changes, baseline == _as_it_was(facts)))

    # Two names may have one plan on K towers, and a second run of it would only take time.
    name_by_plan = {facts.plan: AS_IT_IS}
    for name in [name for name in only or strategies if name not in ALL_BASELINES]:
        plan = facts.plans.get(name, "")
        if name in NARROW and facts.front_end == "keras":
            left_out[name] = "TensorFlow does not say which values are gradients"
            continue
        if not plan:
            left_out[name] = f"nvidia-smi shows no groups of {facts.towers} GPUs but the halves"
        elif plan in name_by_plan:
            left_out[name] = f"its plan is that of {name_by_plan[plan]}"
        else:
            name_by_plan[plan] = name
            candidates.append(Candidate(name, changes=strategies[name]))
    if not candidates:
        listed = "; ".join(f"{name}: {why_not}" for name, why_not in left_out.items())
        raise HierAllreduceError(f"no candidate is for this program: {listed}")
    return candidates, left_out


def _as_it_was(facts: ProgramFacts) -> str:
    """Return the baseline that a program has before it is changed, if it names none itself."""
    if facts.front_end == "tensorpack":
        return "tensorpack-hierarchical" if facts.towers == 8 else "tensorpack-gpu"
    if facts.front_end == "keras":
        # On CPU devices Keras has a ring, which no name selects.
        return "NcclAllReduce" if facts.gpus else ""
    return "tower-0-sum"
