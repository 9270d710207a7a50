"""The strategies that ``tune`` tries: one choice changed, then the best together."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from pathlib import Path
from typing import Any, Dict, Iterator, NamedTuple, Sequence, Tuple

from ..errors import HierAllreduceError
from ..planning import NAMES, Strategy

# a field of Strategy → the values that differ from its default; a field that is added here is tuned
CHOICES: Dict[str, Tuple[Any, ...]] = {
    "algorithm": ("hierarchical", "tree"),
    "mains": ("rotate", 0),
    "pack_below": (0, 4 << 10, 16 << 10, 256 << 10, 1 << 20),
    "splits": (1, 8),
}
DEFAULT = "default"
MINUTES = 5.0  # for trying them


def one_choice() -> Dict[str, Strategy]:
    """Return strategies that differ from the default in one choice, by a name that says it: ``pack_below=4K``."""
    return {
        f"{field}={_short(value)}": Strategy(**{field: value}) for field, values in CHOICES.items() for value in values
    }


class Candidate(NamedTuple):
    """A strategy, and how many lanes of each tower it goes over."""

    strategy: Strategy
    lanes: int = 0

    def choices(self) -> Dict[str, Any]:
        """Return what differs from the default, by name."""
        return {**changed(self.strategy), **({"lanes": self.lanes} if self.lanes else {})}


def first_candidates(
    topologies: Sequence[str] = (), wire_dtypes: Sequence[str] = (), lanes: int = 0
) -> Dict[str, Candidate]:
    """Return the default strategy and those that differ from it in one choice.

    Args:
        topologies: machines for whose links strategies are planned too, by every algorithm: names or files, or
            ``"this machine"``.
        wire_dtypes: 16-bit dtypes in which gradients may travel.
        lanes: of each tower; the default strategy and the planned ones are tried over them too.

    Raises:
        HierAllreduceError: no such machine or dtype.
    """
    strategies = {DEFAULT: Strategy(), "algorithm=flat": Strategy(algorithm="flat"), **one_choice()}
    planned = {name: strategy for topology in topologies for name, strategy in _planned(topology)}
    strategies.update(planned)
    strategies.update({f"wire_dtype={dtype}": Strategy(wire_dtype=dtype) for dtype in wire_dtypes})
    found = {name: Candidate(strategy) for name, strategy in strategies.items()}
    if lanes:
        found[f"lanes={lanes}"] = Candidate(Strategy(), lanes)
        found.update({f"{name}, lanes={lanes}": Candidate(planned[name], lanes) for name in planned})
    return found


def _planned(topology: str) -> Iterator[Tuple[str, Strategy]]:
    named = "this machine" if topology == "this machine" else Path(topology).name
    for algorithm in NAMES:
        yield f"{algorithm} for {named}", Strategy(algorithm=algorithm, topology=topology)
    yield f"auto for {named}, idle", Strategy(topology=topology, backward=0)


def combined(best: Dict[str, Candidate]) -> Dict[str, Candidate]:
    """Return each pair of candidates as one that makes the choices of both, where these do not contradict."""
    found: Dict[str, Candidate] = {}
    for (name, first), (other_name, second) in combinations(best.items(), 2):
        changes, others = first.choices(), second.choices()
        if not changes or not others or changes.keys() & others.keys():
            continue
        together = {**changes, **others}
        lanes = together.pop("lanes", 0)
        try:
            found[f"{name}, {other_name}"] = Candidate(Strategy(**together), lanes)
        except HierAllreduceError:  # for instance groups of mains with a topology, which plans them
            continue
    return found


def changed(strategy: Strategy) -> Dict[str, Any]:
    """Return the fields of a strategy that differ from the default, by name."""
    return {
        field.name: getattr(strategy, field.name)
        for field in dataclasses.fields(Strategy)
        if getattr(strategy, field.name) != field.default
    }


def _short(value: Any) -> str:
    """Return a choice as text; bytes as ``4K`` or ``1M``."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if isinstance(value, int) and value and value % unit == 0:
            return f"{value // unit}{name}"
    return str(value)
