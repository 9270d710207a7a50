"""The runs of ``tune``: all candidates in the same rounds, in both orders.

::

    round 0   the program as it is, which tells its all-reduce and how long a run takes
    round 1   A B C D    a candidate that fails makes room for another one
    round 2   D C B A
    round 3   A B C D    … until the time is over

Nobody is chosen on the way: all candidates get the same number of runs. Six rounds are the least,
because nothing is certain with fewer pairs. So the minutes decide how many candidates there are.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence

from .candidates import AS_IT_IS, Candidate, Groups, candidates_for, strategies_for
from .faults import NothingMeasured
from .progress import Progress
from .protocol import ProgramFacts
from .ratio import LEAST_PAIRS
from .run import LEAST, TIME_OVER, UNREADABLE, Run, Runner

MOST_ROUNDS = 12
MOST_HANGS = 3  # runs, if no run has made steps
SLOWEST_START = 3  # times the start of the first run


class Pace(NamedTuple):
    """How long runs take, by the first one.

    Attributes:
        start: seconds of a run without its steps.
        least: seconds of the fewest steps that a run has.
    """

    start: float
    least: float

    @property
    def run(self) -> float:
        """The seconds of the shortest run."""
        return self.start + self.least

    def affordable(self, seconds: float) -> int:
        """Return how many programs can run six times in this time."""
        return int(seconds / (LEAST_PAIRS * self.run))

    def minutes_for(self, programs: int) -> int:
        """Return the minutes in which so many programs can run six times, after the first run."""
        return int((1 + LEAST_PAIRS * programs) * self.run / 60) + 1

    def rounds(self, programs: int, seconds: float, done: int = 0) -> int:
        """Return in how many rounds so many programs run; with much time, half of it is steps."""
        long_run = self.start + max(self.start, self.least)
        fitting = int(seconds / (programs * long_run))
        return min(max(LEAST_PAIRS - done, fitting), MOST_ROUNDS - done)

    def steps(self, runs: int, seconds: float) -> float:
        """Return the seconds of steps in each of so many runs that share this time."""
        return max(0.0, seconds / runs - self.start)


class Rounds:
    """All runs of a program with its candidates.

    Attributes:
        runs: all runs so far, also after an interruption.
        facts: what the first run has told.
        left_out: why candidates have no run, by their names.
    """

    def __init__(
        self,
        runner: Runner,
        groups: Optional[Groups],
        only: Sequence[str],
        progress: Progress,
    ):
        """Run nothing yet.

        Args:
            runner: runs the program until a deadline.
            groups: two groups of towers along NVLink, where they differ from the halves.
            only: names of candidates; empty for the usual ones.
            progress: tells the user what comes.
        """
        self.runs: List[Run] = []
        self.facts = ProgramFacts()
        self.left_out: Dict[str, str] = {}
        self._runner = runner
        self._strategies = strategies_for(only, groups)
        self._only = only
        self._progress = progress

    def run_all(self) -> None:
        """Run all rounds.

        Raises:
            NothingMeasured: the first run shows that no run can be measured.
            HierAllreduceError: no candidate is for this program.
            OSError: the program cannot be started.
        """
        runner = self._runner
        pace = self._first_run()
        candidates, self.left_out = candidates_for(self.facts, self._strategies, self._only)
        if not self.runs[0].fault:
            candidates = [Candidate(), *candidates]
        affordable = pace.affordable(runner.left())
        self._announce(pace, candidates, affordable)
        # Two are compared in any time, because a table without certainty is better than none.
        enough = min(max(2, affordable), len(candidates))

        # Round 1: as many candidates as can run six times. One that fails makes room for another.
        rounds = pace.rounds(enough, runner.left())
        seconds = pace.steps(rounds * enough, runner.left())
        healthy: List[Candidate] = []
        for candidate in candidates:
            needed = pace.run * (1 + (LEAST_PAIRS - 1) * (len(healthy) + 1))
            why_not = ""
            if len(healthy) > 1 and needed > runner.left():
                why_not = f"no time: --minutes {pace.minutes_for(len(candidates))} would do"
            elif len(self.runs) >= MOST_HANGS and all(run.has_hung for run in self.runs):
                # Each hang takes the whole patience, so that a few of them are enough.
                why_not = f"the program hangs with {MOST_HANGS} others"
            if why_not:
                self.left_out[candidate.name] = why_not
            elif self._run(candidate, seconds, 1):
                healthy.append(candidate)

        # The other rounds: the same candidates, in both orders, in the time that is left.
        rounds = 1 + pace.rounds(max(1, len(healthy)), runner.left(), done=1)
        for round in range(2, rounds + 1):
            if len(healthy) < 2 or runner.left() < len(healthy) * pace.run:
                break
            to_come = (rounds - round + 1) * len(healthy)
            seconds = pace.steps(to_come, runner.left())
            order = healthy if round % 2 else healthy[::-1]
            healthy = [candidate for candidate in order if self._run(candidate, seconds, round)]
            # The next round begins from the same order, though this one may have been reversed.
            healthy.sort(key=candidates.index)

    def _first_run(self) -> Pace:
        """Run the program as it is, and return how long it takes; its facts tell the candidates."""
        first_run = self._runner.run(Candidate(), 0.0, 0, self._strategies)
        program = " ".join(self._runner.command)
        if first_run.is_cut:
            raise NothingMeasured(f"{program}: {first_run.fault}: more --minutes")
        self.facts = first_run.facts
        is_built = self.facts.towers > 0
        # A program that has ended too early is sound, so that its user is told what to change.
        if first_run.fault.startswith("ended"):
            advice = "let it train longer" if is_built else "it built no all-reduce of this package"
            raise NothingMeasured(f"{program} {first_run.fault}: {advice}")
        # No other program is to win only because somebody set the clock during this run.
        if not is_built or first_run.fault.startswith(UNREADABLE):
            raise NothingMeasured(f"{program} {first_run.fault}; see {first_run.output}")
        self.runs.append(first_run)
        if first_run.fault:
            # Nothing is known of the pace of a program that hangs.
            return Pace(1.0, 0.0)
        # The others start as the first one did, and a hang must not take all the time.
        usual = round(max(self._runner.patience, SLOWEST_START * first_run.overhead))
        self._runner.start_patience = min(self._runner.start_patience, usual)
        return Pace(first_run.overhead, LEAST * first_run.step)

    def _announce(self, pace: Pace, candidates: Sequence[Candidate], affordable: int) -> None:
        """Tell the user which program is which, and for how many of them there is time."""
        fault = self.runs[0].fault
        was = [candidate.name for candidate in candidates if candidate.was]
        before = f"; as it was, it used {was[0]}, if it chose nothing else" if was else ""
        self._progress.say(f"{AS_IT_IS.capitalize()} uses hier_allreduce{before}.")
        # Without a pace nothing can be said about the time.
        if fault:
            self._progress.say(f"{AS_IT_IS.capitalize()} {fault}.")
            return
        enough = min(affordable, len(candidates))
        listed = ", ".join(candidate.name for candidate in candidates[:enough])
        told = f"The time is enough for {LEAST_PAIRS} or more runs of each of {enough}: {listed}."
        would_do = [
            f"--minutes {pace.minutes_for(programs)} would do for {programs}"
            for programs in sorted({2, len(candidates)})
        ]
        if enough < 2:
            told = f"The time is too short for a certain answer: {', '.join(would_do)}."
        elif enough < len(candidates):
            told += f" {would_do[-1]}."
        self._progress.say(
            f"A start takes {pace.start:.0f} s. {told} Ctrl-C prints the table so far."
        )

    def _run(self, candidate: Candidate, seconds: float, round: int) -> bool:
        """Run a candidate; return whether it may run again."""
        run = self._runner.run(candidate, seconds, round) if self._runner.left() > 0 else None
        if run is None or run.is_cut:
            if round == 1:
                self.left_out[candidate.name] = TIME_OVER if run is None else run.fault
            return False
        if run.lost_its_times:
            # Whoever sets the clock must not take a candidate's other runs away. Without any run
            # it has no row, so that its reason is kept until it has one.
            if all(other.candidate != candidate for other in self.runs):
                self.left_out[candidate.name] = run.fault
            return True
        self.left_out.pop(candidate.name, None)
        self.runs.append(run)
        # A candidate that has failed once gets no other run, because its row would have no mean.
        return not run.fault
