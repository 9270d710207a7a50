"""The runs of ``tune``: in each round all candidates run once, in a shuffled order.

::

    round 0   the program as it is, which tells its all-reduce and how long a run takes
    round 1   B A C    as many as can have enough pairs of runs in the time that is left;
    round 2   A C B    one that fails, or has the plan of another, makes room for the next
    …         until the time is over
"""

from __future__ import annotations

import math
import random
from statistics import mean
from typing import Callable, Dict, List, Sequence

from hier_allreduce import HierAllreduceError

from ..text import duration
from .candidates import candidates_for
from .journal import CURRENT, Candidate, Run
from .ratio import pairs_needed
from .run import STEPS, Runner

SLOWEST_START = 3  # times the start of the first run
# What a program has to change that has come to this stage only.
_ADVICE_BY_STAGE = (
    "no Python in it has the PYTHONPATH that tune sets: let the program add to it"
    " (PYTHONPATH=.:$PYTHONPATH), and leave out -E, -I and -S",
    "it has imported no TensorFlow",
    """it has TensorFlow, but built no all-reduce of hier_allreduce; change the program first:
    grads = hier_allreduce.allreduce_grads(grads, devices)      # or TowerOptimizer, on towers
    tf.distribute.MirroredStrategy(cross_device_ops=HierarchicalAllReduce())
    launch_train_with_config(config, HierarchicalTrainer(GPUS))      # tensorpack""",
    "let it train longer",
)


def _runs_needed(programs: int) -> int:
    """Return how many runs give a certain answer, with the first one."""
    return 1 + programs * pairs_needed(programs - 1)


class NothingMeasured(HierAllreduceError):
    """No run can be measured: the program is to be changed or repaired first."""


class Rounds:
    """All runs of a program with its candidates."""

    def __init__(self, runner: Runner, earlier_runs: Sequence[Run], say: Callable[[str], None]):
        """Run nothing yet; ``earlier_runs`` are those of a journal that is continued."""
        self.runs: List[Run] = []
        self.left_out: Dict[str, str] = {}  # why candidates have no run, by their names
        self._runner = runner
        self._say = say  # prints a line
        self._name_by_plan: Dict[str, str] = {}
        for run in earlier_runs:
            self._note(run)

    def run_all(self, only: Sequence[str]) -> None:
        """Run rounds until the time is over, or a signal comes.

        Raises:
            NothingMeasured: the first run shows that no run can be measured.
            HierAllreduceError: no candidate is for this program.
            OSError: the program cannot be started.
        """
        if not self.runs:
            self._run_first()
        if not self.runs:
            return
        runner = self._runner
        # The others start as the first one did, and a hang must not take all the time.
        if not self.runs[0].fault:
            usual = max(runner.patience, SLOWEST_START * self.runs[0].start)
            runner.start_patience = min(runner.start_patience, usual)
        beside, left_out = candidates_for(self.runs[0].built, only)
        self.left_out.update(left_out)
        candidates = [Candidate(), *beside]
        self._announce(candidates)
        round = self.runs[-1].round
        while True:
            active = self._active(candidates)
            begun = {run.candidate.name for run in self.runs}
            if all(candidate.name in begun for candidate in active) and (
                len(active) < 2 or self._seconds(len(active)) > runner.seconds_left()
            ):
                break
            round += 1
            if not self._run_round(active, round):
                break
        for candidate in candidates:
            if all(run.candidate.name != candidate.name for run in self.runs):
                minutes = self.minutes(_runs_needed(len(candidates)))
                self.left_out.setdefault(candidate.name, f"no time: --minutes {minutes} would do")

    def minutes(self, runs: int) -> int:
        """Return the minutes that so many runs take, by all starts so far."""
        return math.ceil(self._seconds(runs) / 60)

    def _seconds(self, runs: int) -> float:
        # Hangs count if there is nothing else.
        seen = [run.took for run in self.runs if not run.fault] or [self.runs[0].took]
        return runs * mean(seen)

    def _run_first(self) -> None:
        """Run the program as it is, which tells its all-reduce."""
        runner = self._runner
        run = runner.run(Candidate(), 0)
        program = " ".join(runner.program)
        if run is None and runner.seconds_left() <= 0:
            fault = f"the time was over before step {STEPS}: more --minutes"
            raise NothingMeasured(f"{program}: {fault}")
        if run is None:
            return
        is_built = run.built.towers > 0
        if run.fault.startswith("ended") or (run.fault.startswith("hung") and not is_built):
            raise NothingMeasured(f"{program} {run.fault}: {_ADVICE_BY_STAGE[run.stage]}")
        if not is_built:
            raise NothingMeasured(f"{program} {run.fault}")
        self._note(run)

    def _note(self, run: Run) -> None:
        """Keep a run, but not of a candidate whose plan another one has."""
        name = run.candidate.name
        owner = self._name_by_plan.setdefault(run.built.plan or name, name)
        if owner == name:
            self.runs.append(run)
        else:
            self.left_out[name] = f"its plan is that of {owner}"

    def _announce(self, candidates: Sequence[Candidate]) -> None:
        """Tell the user which program is which, and how long it takes."""
        originals = [candidate.name for candidate in candidates if candidate.is_original]
        before = f"; as it was, it used {originals[0]}" if originals else ""
        fault = self.runs[0].fault or f"takes {duration(self.runs[0].took)} a run"
        self._say(f"{CURRENT.capitalize()} uses hier_allreduce{before}. It {fault}.")
        minutes = [f"{self.minutes(_runs_needed(2))} for 2"]
        if len(candidates) > 2:
            programs = len(candidates)
            minutes.append(f"{self.minutes(_runs_needed(programs))} for all {programs}")
        needs = f"A certain answer needs --minutes {', '.join(minutes)}."
        self._say(f"{needs} Ctrl-C prints the table so far.")

    def _active(self, candidates: Sequence[Candidate]) -> List[Candidate]:
        """Return the candidates of the next round: new ones only if their answer can be certain."""
        gone = {run.candidate.name for run in self.runs if run.fault} | set(self.left_out)
        begun = {run.candidate.name for run in self.runs}
        healthy = [candidate for candidate in candidates if candidate.name not in gone]
        active = [candidate for candidate in healthy if candidate.name in begun]
        for candidate in healthy:
            programs = len(active) + 1
            # Two always run, because a rough answer is better than none.
            needed = self._seconds(_runs_needed(programs) - 1)
            is_in_time = programs <= 2 or needed <= self._runner.seconds_left()
            if candidate not in active and is_in_time:
                active.append(candidate)
        return active

    def _run_round(self, active: Sequence[Candidate], round: int) -> bool:
        """Run candidates in a shuffled order; return whether there was time for all."""
        for candidate in random.sample(active, len(active)):
            run = None if self._runner.is_over else self._runner.run(candidate, round)
            if run is None:
                return False
            self._note(run)
        return True
