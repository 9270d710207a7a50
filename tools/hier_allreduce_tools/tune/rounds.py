"""The runs of ``tune``: in each round all candidates run once, in a shuffled order.

::

    round 0   the program as it is, which tells its all-reduce and how long a run takes
    round 1   B A C    one that fails runs no more
    round 2   A C B
    …         until the time is over
"""

from __future__ import annotations

import math
import random
import sys
from contextlib import suppress
from statistics import median
from typing import Dict, List, Sequence

from ..text import rounded
from .candidates import CURRENT, candidates_for
from .journal import Run
from .ratio import pairs_needed
from .run import Runner, TimeOver


def run_rounds(runner: Runner, runs: List[Run], only: Sequence[str]) -> Dict[str, str]:
    """Append runs until the time is over, or a signal comes; return why candidates may have none.

    Raises:
        OSError: the program cannot be started.
    """
    left_out: Dict[str, str] = {}
    with suppress(TimeOver):
        if not runs:
            runs.append(runner.run(CURRENT, 0))
        if not runs[0].towers:
            return left_out
        candidates, left_out = candidates_for(runs[0], only)
        needed = minutes(runs, 1 + len(candidates) * pairs_needed(len(candidates) - 1))
        left_out.update(dict.fromkeys(candidates, "no time: more --minutes"))
        # A hang tells nothing about the time of a run.
        if runs[0].step:
            print(
                f"A run takes {rounded(runs[0].took)} s. A certain answer needs --minutes {needed}"
                f" for all {len(candidates)}; --only measures fewer, and Ctrl-C prints the table"
                " so far.",
                file=sys.stderr,
            )
        while True:
            failed = {run.candidate for run in runs if run.fault}
            active = [name for name in candidates if name not in failed]
            # Nobody runs alone again.
            if len(active) < 2 and {run.candidate for run in runs}.issuperset(active):
                break
            round = runs[-1].round + 1
            for name in random.sample(active, len(active)):
                runs.append(runner.run(name, round))
    return left_out


def minutes(runs: Sequence[Run], number: int) -> int:
    """Return the minutes that so many runs take, by all starts so far."""
    return math.ceil(number * median(run.took for run in runs) / 60)
