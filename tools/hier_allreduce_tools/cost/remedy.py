"""What would help most, where a traced step shows it."""

from __future__ import annotations

from statistics import median
from typing import List, Sequence, Tuple

from ..text import rounded
from .step import is_gpu
from .times import PROCESSOR, TOWERS, Link, TowerTimes

_LEAST_GAIN = 0.03  # of a step, that a remedy must be worth
_SLOW = 0.5  # of the other links' median speed, below which a link is slow


def remedy_for(towers: Sequence[TowerTimes], links: Sequence[Link]) -> str:
    """Return the remedy that explains most of a step's waits; empty if none is worth it."""
    *earlier, latest = sorted(towers, key=lambda tower: tower.pass_end)
    last = max(towers, key=lambda tower: tower.end)
    least = _LEAST_GAIN * last.end
    lag = latest.pass_end - median(tower.pass_end for tower in earlier or [latest])
    # A late pass comes first, because all else waits for it.
    if lag >= least:
        return (
            f"{latest.place} ends its pass {rounded(lag)} ms after the others (in the median):"
            " compare its work, input and clock with theirs; another all-reduce does not help"
        )

    remedies: List[Tuple[float, str]] = [(least, "")]  # the ms that each may save
    if is_gpu(last.device):  # the threads of a CPU device are the processor
        early = latest.before[PROCESSOR]
        late = last.after[PROCESSOR]
        of_pass = (
            f"The pass waited {rounded(early)} ms for the processor, which launches its kernels too"
            " late: fewer or larger ops in the model, or a faster input, help; another all-reduce"
            " does not"
        )
        of_updates = (
            f"The kernels after the pass waited {rounded(late)} ms for the processor:"
            " fewer variables, fewer ops in an update, or larger chunks help"
        )
        remedies += [(early, of_pass), (late, of_updates)]
    if len(links) > 2:  # of two links nobody can tell which one is unusual
        slowest, *others = sorted(links, key=lambda link: link.speed)
        usual = median(link.speed for link in others)
        src, dst = towers[slowest.src].place, towers[slowest.dst].place
        speeds = f"{rounded(slowest.speed / 1e9)} GB/s, others {rounded(usual / 1e9)} GB/s"
        of_link = (
            f"The copies from {src} to {dst} reach {speeds}: look at this link with"
            " `hier-allreduce doctor --copies`, or choose groups that avoid it"
        )
        if slowest.speed < _SLOW * usual:
            remedies.append((last.after[TOWERS], of_link))
    return max(remedies)[1]
