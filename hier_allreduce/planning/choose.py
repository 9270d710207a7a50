"""The plan for a machine: all algorithms × all chunk sizes are simulated, and the least mean over the cases counts.

::

    gradients ── chunks_of(size) ──┐
                                   ├──► simulated in each case ──► least mean ──► Choice, …
    algorithm ── K schedules ──────┘    (seconds of an op, of the pass, of the host's lead; order of gradients)
"""

from __future__ import annotations

from itertools import product, zip_longest
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from tqdm import tqdm

from ..topology import Links
from .algorithms import BY_NAME, Algorithm, in_groups, schedules_of
from .chunks import Gradient
from .groups import two_groups
from .plan import Plan, Schedule
from .simulator import Case, exposed

MIB = 1 << 20
# of chunks that the bytes are divided by. Whatever the bytes, the same gradients share a chunk: no choice jumps.
COUNTS = (2, 5, 7, 8, 11, 18, 24, 26, 36, 48, 80)
SIZES = (2 * MIB, 128 * MIB)  # the least and the most
# assumed: seconds of an op, bytes of gradients a second, seconds of the lead; docs/cost-model.md has the sources
DISPATCH, RATE, LEAD = 4e-6, 102e6 / 60e-3, 10e-3
_LARGE = 200e6  # bytes of gradients
NEARLY = 0.03  # of the exposed seconds: the model is not finer
STEP = 1.5  # assumed: of the backward pass
ALONG_LINKS = "groups along links"


class Choice(NamedTuple):
    """A plan, and the seconds that it leaves exposed: the mean over the cases, and each case's."""

    exposed: float
    plan: Plan
    by_case: Tuple[float, ...]


def cases_of(total: int, links: Links, backward: Optional[float] = None) -> List[Case]:
    """Return the cases over which plans are compared: one assumption at a time is changed.

    A measured ``dispatch`` of the machine does not vary, nor the seconds of the ``backward`` pass if they are known;
    else these follow from the ``total`` bytes of gradients.
    """
    measured = links.speeds.dispatch
    dispatch, slow_dispatch = (
        (DISPATCH, DISPATCH * 2.5) if measured is None else (measured, measured)
    )
    length, short = (total / RATE, total / RATE / 2) if backward is None else (backward, backward)
    changed = [(dispatch, short, LEAD), (dispatch, length, LEAD / 5), (slow_dispatch, length, LEAD)]
    return list(
        dict.fromkeys(Case(*case, by_bytes) for case in changed for by_bytes in (True, False))
    )


def rule(gradients: Sequence[Gradient], towers: int, links: Optional[Links] = None) -> Plan:
    """Return the plan of the rule: flat for up to 4 towers or without peer access, else two groups along the links.

    Without links they are halves. Chunks have 16 MiB from 200 MB of gradients on, else 4 MiB for flat, 8 for groups.
    """
    is_flat = towers <= 4 or (
        links is not None and any(name == "host" for name, _ in links.resources)
    )
    size = 16 if sum(gradient.bytes for gradient in gradients) >= _LARGE else 4 if is_flat else 8
    name = "flat" if is_flat else "hierarchical" if links is None else ALONG_LINKS
    algorithm = BY_NAME[name] if is_flat or links is None else _along(links, towers)
    return Plan(towers, schedules_of(algorithm, towers), size * MIB, name)


def _along(links: Links, towers: int) -> Algorithm:
    """Return the hierarchical algorithm with two groups of near towers, whose roots alternate between the groups."""
    groups = two_groups([[_seconds(links, a, b) for b in range(towers)] for a in range(towers)])
    return in_groups(
        groups, [tower for pair in zip_longest(*groups) for tower in pair if tower is not None]
    )


def _seconds(links: Links, a: int, b: int) -> float:
    """Return for how long a byte in each direction between two devices keeps links and resources busy."""
    both = [links.ways[pair] for pair in ((a, b), (b, a)) if a != b]
    return sum(
        1 / link.bandwidth + sum(1 / together for _, together in link.shared) for link in both
    )


def candidates(links: Links, towers: int) -> Dict[str, Tuple[Schedule, ...]]:
    """Return the schedules of each algorithm: those by the number of towers alone, and two groups along the links."""
    names: Dict[Tuple[Schedule, ...], str] = {}  # on few towers some are equal
    for name, algorithm in [*BY_NAME.items(), (ALONG_LINKS, _along(links, towers))]:
        names.setdefault(schedules_of(algorithm, towers), name)
    return {name: schedules for schedules, name in names.items()}


def choose(
    gradients: Sequence[Gradient],
    links: Links,
    cases: Sequence[Case],
    algorithms: Dict[str, Tuple[Schedule, ...]],
    chunk_bytes: Optional[int] = None,
    usual: Optional[Plan] = None,
) -> List[Choice]:
    """Return the best plan of each of the ``algorithms``, the one with the least mean of exposed seconds first.

    Without ``chunk_bytes`` some sizes of chunks are compared. The ``usual`` plan wins unless another one leaves 3 %
    less exposed.
    """
    towers = 1 + max(src for src, _ in links.ways)
    total = sum(gradient.bytes for gradient in gradients)
    by_count = [min(max(SIZES[0], -(-total // count)), SIZES[1]) for count in COUNTS]
    sizes = dict.fromkeys(by_count if chunk_bytes is None else [chunk_bytes])
    plans = [
        Plan(towers, schedules, size, name)
        for size, (name, schedules) in product(sizes, algorithms.items())
    ]

    def cost(choice: Choice) -> float:
        return choice.exposed * (1 - NEARLY if choice.plan is usual else 1)

    best: Dict[str, Choice] = {}
    for plan in tqdm(
        [*([usual] if usual else []), *plans], "plans simulated", delay=3, disable=None, leave=False
    ):
        seconds = exposed(plan, links, gradients, cases)
        found = Choice(sum(seconds) / len(seconds), plan, tuple(seconds))
        best[plan.algorithm] = min(best.get(plan.algorithm, found), found, key=cost)
    return sorted(best.values(), key=cost)
