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
from typing import Callable, Dict, List, Optional, Sequence

from hier_allreduce import HierAllreduceError

from ..text import duration
from .candidates import Groups, candidates_for
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

    def run_all(self, only: Sequence[str], groups: Optional[Groups]) -> None:
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
        first, runner = self.runs[0], self._runner
        # The others start as the first one did, and a hang must not take all the time.
        if not first.fault:
            usual = max(runner.patience, SLOWEST_START * first.start)
            runner.start_patience = min(runner.start_patience, usual)
        others, left_out = candidates_for(first.built, only, groups)
        self.left_out.update(left_out)
        candidates = [Candidate(), *others]
        self._announce(candidates)
        number = self.runs[-1].round
        while True:
            active = self._active(candidates)
            begun = {run.candidate.name for run in self.runs}
            if all(candidate.name in begun for candidate in active) and (
                len(active) < 2 or self._seconds(len(active), 1) > runner.seconds_left()
            ):
                break
            number += 1
            if not self._run_round(active, number):
                break
        for candidate in candidates:
            if all(run.candidate.name != candidate.name for run in self.runs):
                minutes = self.minutes(len(candidates))
                self.left_out.setdefault(candidate.name, f"no time: --minutes {minutes} would do")

    def minutes(self, programs: int, pairs: int = 0) -> int:
        """Return the minutes for a certain answer, or for so many pairs, by all starts so far."""
        runs = self._seconds(programs, pairs or pairs_needed(programs - 1))
        return math.ceil((runs if pairs else runs + self._seconds(1, 1)) / 60)

    def _seconds(self, programs: int, pairs: int) -> float:
        """Return the seconds of so many runs; hangs count if there is nothing else."""
        seen = [run.took for run in self.runs if not run.fault] or [self.runs[0].took]
        return programs * pairs * mean(seen)

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
            raise NothingMeasured(f"{program} {run.fault}; see {runner.log}")
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
        would_do = [
            f"--minutes {self.minutes(programs)} for {programs}"
            for programs in sorted({2, len(candidates)})
        ]
        self._say(f"A certain answer needs {', '.join(would_do)}. Ctrl-C prints the table so far.")

    def _active(self, candidates: Sequence[Candidate]) -> List[Candidate]:
        """Return the candidates of the next round: new ones only if their answer can be certain."""
        gone = {run.candidate.name for run in self.runs if run.fault} | set(self.left_out)
        begun = {run.candidate.name for run in self.runs}
        healthy = [candidate for candidate in candidates if candidate.name not in gone]
        active = [candidate for candidate in healthy if candidate.name in begun]
        for candidate in healthy:
            programs = len(active) + 1
            # Two always run, because a rough answer is better than none.
            needed = 0.0 if programs <= 2 else self._seconds(programs, pairs_needed(programs - 1))
            if candidate not in active and needed <= self._runner.seconds_left():
                active.append(candidate)
        return active

    def _run_round(self, active: Sequence[Candidate], number: int) -> bool:
        """Run candidates in a shuffled order; return whether there was time for all."""
        for candidate in random.sample(active, len(active)):
            run = None if self._runner.is_over else self._runner.run(candidate, number)
            if run is None:
                return False
            self._note(run)
        return True
