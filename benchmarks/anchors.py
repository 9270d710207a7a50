"""The emulator beside real GPUs: cells whose steps were timed on a real chip, too.

``results/real`` has the real cells. One with ``no_anchor`` says why the emulator does not have it.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from hier_allreduce.formatting import table

REAL = Path(__file__).parent / "results" / "real"
NO_LONGER = "flat_tree"  # an algorithm that left the package for examples/algorithms.py


class Place(NamedTuple):
    """What a real cell and an emulated one have in common."""

    machine: str
    model: str
    pass_ms: float
    host: float


class Anchor(NamedTuple):
    """Exposed milliseconds of an all-reduce: the medians of real runs, and the emulated median."""

    place: Place
    name: str
    real_ms: List[float]
    emulated_ms: float

    @property
    def error(self) -> float:
        """The emulated time, divided by the median of the real ones, minus 1."""
        return self.emulated_ms / statistics.median(self.real_ms) - 1


def place_of(cell: Dict[str, Any]) -> Place:
    """Return where a cell belongs."""
    return Place(*(cell[key] for key in Place._fields))


def real_medians() -> Dict[Place, Dict[str, List[float]]]:
    """Return the medians of all real runs, by place and all-reduce."""
    found: Dict[Place, Dict[str, List[float]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(REAL.glob("*.json")):
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            if "no_anchor" not in cell:
                for name, contender in cell["contenders"].items():
                    found[place_of(cell)][name].append(contender["median_ms"])
    return found


def to_emulate() -> Dict[Tuple[str, str, float], Tuple[List[float], List[str]]]:
    """Return the hosts' shares and the all-reduces by machine, model and pass."""
    hosts: Dict[Tuple[str, str, float], List[float]] = defaultdict(list)
    names: Dict[Tuple[str, str, float], Dict[str, None]] = defaultdict(dict)
    for place, medians in real_medians().items():
        hosts[place[:3]].append(place.host)
        known = (name for name in medians if not name.startswith(NO_LONGER))
        names[place[:3]].update(dict.fromkeys(known))
    return {key: (sorted(hosts[key]), list(names[key])) for key in sorted(hosts, reverse=True)}


def anchors(cells: Sequence[Dict[str, Any]]) -> List[Anchor]:
    """Return the anchors that emulated cells have."""
    real = real_medians()
    found = []
    for cell in cells:
        for name, medians in real.get(place_of(cell), {}).items():
            if name in cell["contenders"]:
                emulated = cell["contenders"][name]["median_ms"]
                found.append(Anchor(place_of(cell), name, medians, emulated))
    return found


def rows_of(found: Sequence[Anchor]) -> List[List[str]]:
    """Return the rows of the anchors' table, with a header."""
    rows = [["exposed, ms", "machine", "pass, ms", "host", "real", "emulated", "error"]]
    for anchor in found:
        least, most = min(anchor.real_ms), max(anchor.real_ms)
        real = f"{statistics.median(anchor.real_ms):.1f}"
        real += f" ({least:.1f}–{most:.1f})" if len(anchor.real_ms) > 1 else ""
        where = [anchor.place.machine, f"{anchor.place.pass_ms:g}", f"{anchor.place.host:g}"]
        numbers = [real, f"{anchor.emulated_ms:.1f}", f"{anchor.error:+.0%}"]
        rows.append([anchor.name, *where, *numbers])
    return rows


def anchors_table(cells: Sequence[Dict[str, Any]]) -> str:
    """Return the real times beside the emulated ones, and how many errors are below a quarter."""
    found = anchors(cells)
    near = sum(abs(anchor.error) <= 0.25 for anchor in found)
    return f"{table(rows_of(found))}\n{near} of {len(found)} errors are at most 25 %."
