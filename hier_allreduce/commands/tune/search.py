"""Which all-reduces are measured how often: the search of ``tune``.

::

    turn 1      a short run of each candidate
    turn 2      a longer run of the better half
    turns 3 …   the program as it is, the peers and the best three of ours, in both orders

All runs together end at a deadline. Starts of the program take most of a short time, so the number
of candidates follows from the time that the first run has taken.
"""

from __future__ import annotations

from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence

from ...errors import HierAllreduceError
from ...formatting import count
from ...planning.candidate import NOW, Candidate, candidates_for
from .faults import NothingMeasured
from .progress import Progress
from .run import LEAST, Run, Runner

FINALISTS = 3  # of ours
LAST_TURNS = 4  # at least, if there is time; in both orders, so an even number
MOST_LAST_TURNS = 8
MOST_HANGS = 3  # runs, if none has made steps
SLOWEST_START = 3  # times the start of the first run
NEAR = 1.10  # times the fastest step: slower finalists leave after a turn in both orders
FIRST_LAST_TURN = 3


class Budget(NamedTuple):
    """The seconds of a run without its steps, and of the least steps; of the first run."""

    overhead: float
    least: float

    def run(self, windows: int) -> float:
        """Return the seconds of a run with so many times the least steps."""
        return self.overhead + self.least * windows

    def all_runs(self, candidates: Sequence[Candidate]) -> float:
        """Return the least seconds of all turns with these candidates."""
        ours = sum(candidate.is_new for candidate in candidates)
        total = len(candidates)
        finalists = 1 + total - ours + min(FINALISTS, ours)
        half = 1 + (total + 1) // 2
        return total * self.run(1) + (half + LAST_TURNS * finalists) * self.run(2)

    def affordable(self, candidates: Sequence[Candidate], seconds: float) -> int:
        """Return for how many of the first candidates there is time; at least for one."""
        for number in range(len(candidates), 1, -1):
            if self.all_runs(candidates[:number]) <= seconds:
                return number
        return 1


class Search:
    """The turns of a search, whose runs are in ``runs``."""

    def __init__(
        self,
        runner: Runner,
        groups: Optional[Sequence[Sequence[int]]],
        only: Sequence[str],
        progress: Progress,
    ):
        """Prepare a search.

        Args:
            runner: runs the program until a deadline.
            groups: of towers along NVLink, where they differ from the halves.
            only: names of candidates; empty for all.
            progress: tells the user what comes.
        """
        self.runs: List[Run] = []
        self.left_out: Dict[str, str] = {}
        self._runner = runner
        self._groups = groups
        self._only = only
        self._progress = progress

    def run_all(self) -> None:
        """Run all turns; ``runs`` has the results, also after an interruption.

        Raises:
            NothingMeasured: the first run shows that no run can be measured.
            HierAllreduceError: a name in ``only`` that is not for this program.
            OSError: the program cannot be started.
        """
        first = self._first_run()
        candidates = self._candidates(first)
        self._first_turn(candidates)
        half = self._better_half()
        self._turn(half, 2, 2 * self._budget.least)
        for turn, order in enumerate(self._last_turns(), FIRST_LAST_TURN):
            self._turn(order, turn, self._share)
        measured = {run.candidate.name for run in self.runs}
        for candidate in candidates:
            if candidate.name not in measured:
                self.left_out.setdefault(candidate.name, "the time was over")

    def _first_run(self) -> Run:
        """Return the run of the program as it is, whose facts tell the candidates."""
        first = self._runner.run(Candidate(NOW), 0.0, 1)
        program = " ".join(self._runner.command)
        if first is None:
            raise NothingMeasured(
                f"{program}: the time was over before step {LEAST}: more --minutes"
            )
        if first.fault.startswith("ended"):
            built = "let it train longer"
            if "towers" not in first.facts:
                built = "it built no all-reduce of this package"
            raise NothingMeasured(f"{program} {first.fault}: {built}")
        if "towers" not in first.facts:
            raise NothingMeasured(f"{program} {first.fault}; see {first.output}")
        self.runs.append(first)
        return first

    def _candidates(self, first: Run) -> List[Candidate]:
        """Return the candidates in the order in which time is spent on them."""
        chosen, self.left_out = candidates_for(first.facts, self._groups, self._only)
        if not chosen:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.left_out.items())
            raise HierAllreduceError(f"no candidate is for this program: {reasons}")
        self._budget = Budget(1.0, 0.0)  # of a program that hangs, nothing is known
        if first.seconds:
            self._budget = Budget(first.overhead, LEAST * first.step)
            # the others start as the first one did, and a hang must not take all the time
            usual = round(max(self._runner.patience, SLOWEST_START * first.overhead))
            self._runner.start_patience = min(self._runner.start_patience, usual)
        chosen = _peers_and_ours(chosen)
        seconds = self._runner.left()
        number = self._budget.affordable(chosen, seconds)
        self._announce(first, chosen[:number], seconds)
        return chosen

    def _first_turn(self, candidates: Sequence[Candidate]) -> None:
        """Run those for which there is time; one that fails makes room for another one."""
        measured: List[Candidate] = []
        rest = list(candidates)
        while rest:
            number = self._budget.affordable([*measured, *rest], self._runner.left())
            now = rest[: max(0, number - len(measured))]
            if not now:
                break
            self._turn(now, 1, 0.0)
            rest = rest[len(now) :]
            measured = [run.candidate for run in self._ranked() if run.candidate.name != NOW]
        needed = _minutes(self._budget.all_runs(candidates))
        for candidate in rest:
            self.left_out[candidate.name] = f"no time: all candidates take about {needed}"

    def _announce(self, first: Run, candidates: Sequence[Candidate], seconds: float) -> None:
        """Tell the user the next turns, and how long they take."""
        needed = self._budget.all_runs(candidates)
        start = f"A start of the program takes {first.overhead:.0f} s."
        if first.fault:
            start = f"The program as it is {first.fault}."
        elif needed > seconds:
            self._progress.say(
                f"{start} The time is short: give --minutes {needed / 60 + 1:.0f} to be certain"
                f" about {candidates[0].name} alone."
            )
            return
        number = count(len(candidates), "candidate")
        self._progress.say(
            f"{start} Now a short run of each of {number}, a longer one of the better half, then"
            f" the best and the peers in both orders: at most {_minutes(seconds)}."
            " Ctrl-C prints the table so far."
        )

    def _turn(self, order: Sequence[Candidate], turn: int, share: float) -> None:
        """Run candidates once; those with a fault run no more."""
        for candidate in order:
            if self._runner.left() <= 0:
                return
            if candidate.name in self._faulty() or self._has_hung_brother(candidate):
                continue
            if self._all_hung():
                self.left_out[candidate.name] = f"the program hangs with {MOST_HANGS} others"
                continue
            run = self._runner.run(candidate, share, turn)
            if run is None:
                return
            self.runs.append(run)

    def _has_hung_brother(self, candidate: Candidate) -> bool:
        """Return whether the same algorithm has hung with another size of chunks."""
        hung = [run.candidate for run in self.runs if run.fault.startswith("hung")]
        same = [other.name for other in hung if other.is_new and _is_alike(other, candidate)]
        if same:
            self.left_out[candidate.name] = f"{same[0]} has hung"
        return bool(same)

    def _all_hung(self) -> bool:
        """Return whether all runs have hung, and enough to say that the program always hangs."""
        hung = sum(run.fault.startswith("hung") for run in self.runs)
        return hung == len(self.runs) >= MOST_HANGS

    def _faulty(self) -> List[str]:
        return [run.candidate.name for run in self.runs if run.fault]

    def _ranked(self) -> List[Run]:
        """Return the newest run of each measured candidate, the fastest first."""
        faulty = self._faulty()
        newest = {run.candidate.name: run for run in self.runs if run.candidate.name not in faulty}
        return sorted(newest.values(), key=lambda run: run.step)

    def _better_half(self) -> List[Candidate]:
        """Return the program as it is, and the faster half of the others; none without others."""
        others = [run.candidate for run in self._ranked() if run.candidate.name != NOW]
        half = others[: (len(others) + 1) // 2]
        return [Candidate(NOW), *half] if half else []

    def _last_turns(self) -> Iterator[List[Candidate]]:
        """Yield the candidates of the last turns, forwards and backwards in turn."""
        ranked = [run.candidate for run in self._ranked()]
        if len(ranked) < 2:
            return
        best = [candidate for candidate in ranked if candidate.is_new][:FINALISTS]
        peers = [candidate for candidate in ranked if candidate.peer]
        order = [Candidate(NOW), *peers, *best]
        turns = self._number_of_turns(len(order))
        for turn in range(turns):
            if turn % 2 == 0 and turn:
                order = self._near(order)
            yield order[::-1] if turn % 2 else order

    def _number_of_turns(self, candidates: int) -> int:
        """Return the number of last turns, and let their runs share the time that is left."""
        left = self._runner.left()
        least = candidates * self._budget.run(2)
        # half of the time is for steps where there is enough
        pairs = int(left / (2 * candidates * 2 * self._budget.run(1)))
        affordable = max(1, int(left / least))
        turns = min(max(LAST_TURNS, 2 * pairs), affordable, MOST_LAST_TURNS)
        self._share = left / (turns * candidates) - self._budget.overhead
        return turns

    def _near(self, order: Sequence[Candidate]) -> List[Candidate]:
        """Return the program as it is, and the candidates that are not clearly slower."""
        steps = {run.candidate.name: run.step for run in self._ranked()}
        fastest = min(steps.values(), default=0.0)
        near = {name for name, step in steps.items() if step <= NEAR * fastest}
        kept = [candidate for candidate in order if candidate.name in near or candidate.name == NOW]
        return kept if len(kept) > 1 else list(order)


def _peers_and_ours(candidates: Sequence[Candidate]) -> List[Candidate]:
    """Return a peer first, then one of ours, the other peers, and the rest: time may be short."""
    peers = [candidate for candidate in candidates if candidate.peer]
    ours = [candidate for candidate in candidates if not candidate.peer]
    return [*peers[:1], *ours[:1], *peers[1:], *ours[1:]]


def _is_alike(one: Candidate, other: Candidate) -> bool:
    """Return whether two candidates differ in the size of chunks only."""
    return {**one.changes, "chunk_bytes": 0} == {**other.changes, "chunk_bytes": 0}


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"
