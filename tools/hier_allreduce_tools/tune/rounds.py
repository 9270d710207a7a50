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
from itertools import dropwhile
from statistics import mean
from typing import Callable, Dict, List, Sequence

from ..text import rounded
from .candidates import CURRENT, candidates_for
from .journal import Run
from .ratio import pairs_needed
from .run import Runner


class Rounds:
    """All runs of a program with its candidates."""

    def __init__(self, runner: Runner, earlier_runs: Sequence[Run], say: Callable[[str], None]):
        """Run nothing yet; ``earlier_runs`` are those of a journal that is continued."""
        # A first run without an all-reduce tells nothing, so that it is made again.
        self.runs: List[Run] = list(dropwhile(lambda run: not run.towers, earlier_runs))
        self.left_out: Dict[str, str] = {}  # why candidates have no run, by their names
        self._runner = runner
        self._say = say  # prints a line

    def run_all(self, only: Sequence[str]) -> None:
        """Run rounds until the time is over, or a signal comes.

        Raises:
            OSError: the program cannot be started.
        """
        if not self.runs:
            self._run(CURRENT, 0)
        if not self.runs or not self.runs[0].towers:
            return
        beside, self.left_out = candidates_for(self.runs[0], only)
        candidates = [CURRENT, *beside]
        minutes = self.minutes(1 + len(candidates) * pairs_needed(len(beside)))
        # A hang tells nothing about the time of a run.
        if self.runs[0].step:
            self._say(
                f"A run takes {rounded(self._seconds(1))} s. A certain answer needs --minutes"
                f" {minutes} for all {len(candidates)}, {self.minutes(1 + 2 * pairs_needed(1))} for"
                " --only one; Ctrl-C prints the table so far."
            )
        active = self._active(candidates)
        while active and self._seconds(1) <= self._runner.seconds_left():
            round = self.runs[-1].round + 1
            for name in random.sample(active, len(active)):
                self._run(name, round)
            active = self._active(candidates)
        begun = {run.candidate for run in self.runs}
        for name in candidates:
            if name not in begun:
                self.left_out[name] = f"no time: --minutes {minutes} would do"

    def minutes(self, runs: int) -> int:
        """Return the minutes that so many runs take, by all starts so far."""
        return math.ceil(self._seconds(runs) / 60)

    def _seconds(self, runs: int) -> float:
        # Hangs count if there is nothing else.
        seen = [run.took for run in self.runs if not run.fault] or [self.runs[0].took]
        return runs * mean(seen)

    def _run(self, name: str, round: int) -> None:
        """Run a candidate, unless the time is over."""
        run = self._runner.run(name, round)
        if run is not None:
            self.runs.append(run)

    def _active(self, candidates: Sequence[str]) -> List[str]:
        """Return the candidates of the next round; nobody runs alone again."""
        failed = {run.candidate for run in self.runs if run.fault}
        healthy = [name for name in candidates if name not in failed]
        is_alone = len(healthy) == 1 and any(run.round for run in self.runs)
        return [] if is_alone else healthy
