"""How often candidates are measured, in which order, and in how much time."""

from pathlib import Path
from typing import Dict, List

import pytest

from hier_allreduce_tools.tune.candidates import AS_IT_IS
from hier_allreduce_tools.tune.progress import Progress
from hier_allreduce_tools.tune.protocol import ProgramFacts
from hier_allreduce_tools.tune.rounds import Pace, Rounds
from hier_allreduce_tools.tune.run import CLOCK_WAS_SET, LEAST, Run

USUAL = [AS_IT_IS, "NcclAllReduce", "ReductionToOneDevice", "HierarchicalCopyAllReduce"]
USUAL += ["hierarchical"]  # the plan of auto is that of the program
HANGS, FAILS, TIMELESS = None, -1.0, -2.0


class VirtualRunner:
    """A runner whose time is virtual: ``milliseconds(candidate)`` of a step, or how it goes wrong.

    ``seconds_by_round`` has the seconds of steps in the runs of each round.
    """

    command = ("python", "train.py")
    patience = 60.0
    start_patience = 200.0

    def __init__(self, milliseconds=lambda candidate: 10.0, seconds=600.0, overhead=5.0):
        self._milliseconds = milliseconds
        self._left = seconds
        self._overhead = overhead
        self.seconds_by_round: Dict[int, List[float]] = {}

    def left(self):
        return self._left

    def run(self, candidate, seconds, number, strategies=None):
        assert self._left > 0
        step = self._milliseconds(candidate)
        plans = dict(zip(strategies or {}, strategies or {}), auto="plan")
        facts = ProgramFacts("keras", "replicated", 8, True, 1 << 20, "plan", plans)
        run = Run(candidate, [], number, Path("log"), facts=facts, overhead=self._overhead)
        if step is HANGS:
            self._left -= self.start_patience
            return run._replace(fault="hung: no step at all", overhead=self.start_patience)
        if step == FAILS:
            self._left -= self._overhead
            return run._replace(fault="failed: status 1")
        self._left -= self._overhead + max(seconds, LEAST * step * 1e-3)
        is_late = self._left < -1e-6  # sums of shares are rounded
        self._left = max(0.0, self._left)
        if is_late:
            return run._replace(fault="the time was over: no step yet for 9 s")
        if step == TIMELESS:
            return run._replace(fault=f"failed: the times cannot be read: {CLOCK_WAS_SET}")
        self.seconds_by_round.setdefault(number, []).append(seconds)
        return run._replace(seconds=[step * 1e-3] * 3)


def measured(runner, *only):
    """Return the rounds of a runner, and their candidates by round."""
    rounds = Rounds(runner, None, only, Progress(600.0))
    rounds.run_all()
    names_by_round: Dict[int, List[str]] = {}
    for run in rounds.runs:
        names_by_round.setdefault(run.round, []).append(run.candidate.name)
    return rounds, names_by_round


def test_all_candidates_run_equally_often_in_both_orders():
    runner = VirtualRunner(lambda candidate: 100.0 if candidate.baseline else 10.0)
    rounds, names_by_round = measured(runner)
    assert names_by_round[0] == [AS_IT_IS]
    assert len(names_by_round) - 1 >= 6
    for number in range(1, len(names_by_round)):
        assert names_by_round[number] == (USUAL if number % 2 else USUAL[::-1])
    assert rounds.left_out == {"auto": "its plan is that of the program as it is"}
    assert runner.left() >= 0


@pytest.mark.parametrize("seconds", [20.0, 60.0, 240.0, 600.0, 6000.0])
@pytest.mark.parametrize("overhead", [1.0, 5.0, 30.0])
def test_all_runs_end_in_time_and_every_candidate_is_named(seconds, overhead):
    runner = VirtualRunner(seconds=seconds + overhead, overhead=overhead)
    rounds, _ = measured(runner)
    assert runner.left() >= 0
    assert {run.candidate.name for run in rounds.runs} | set(rounds.left_out) == {*USUAL, "auto"}


def test_with_less_time_there_are_fewer_candidates_and_no_fewer_runs(capsys):
    rounds, names_by_round = measured(VirtualRunner(seconds=150.0))
    assert names_by_round[1] == USUAL[:4] and len(names_by_round) - 1 == 6
    assert rounds.left_out["hierarchical"] == "no time: --minutes 3 would do"
    assert (
        "A start takes 5 s. The time is enough for 6 or more runs of each of 4: the program as it"
        " is, NcclAllReduce, ReductionToOneDevice, HierarchicalCopyAllReduce. --minutes 3 would do"
        " for 5." in capsys.readouterr().err
    )


def test_too_little_time_for_two_is_said_with_the_minutes_that_would_do(capsys):
    _, names_by_round = measured(VirtualRunner(seconds=40.0))
    assert names_by_round[1] == USUAL[:2] and len(names_by_round) - 1 < 6
    told = capsys.readouterr().err
    assert (
        "A start takes 5 s. The time is too short for a certain answer: --minutes 2 would do for 2,"
        " --minutes 3 would do for 5. Ctrl-C"
        in told
        and "is enough" not in told
    )


@pytest.mark.parametrize("overhead", [4.68, 5.0, 30.0])
def test_the_minutes_that_would_do_are_enough(overhead):
    pace = Pace(overhead, LEAST * 10e-3)
    for programs in (2, 5):
        only = USUAL[1:programs]
        runner = VirtualRunner(seconds=60.0 * pace.minutes_for(programs), overhead=overhead)
        _, names_by_round = measured(runner, *only)
        assert names_by_round[6] == USUAL[:programs][::-1]


def test_the_start_says_which_program_is_which(capsys):
    measured(VirtualRunner())
    told = capsys.readouterr().err
    assert "The program as it is uses hier_allreduce; as it was, it used NcclAllReduce," in told


def test_a_candidate_that_fails_makes_room_for_another():
    runner = VirtualRunner(
        lambda candidate: FAILS if candidate.name == "NcclAllReduce" else 10.0, seconds=150.0
    )
    _, names_by_round = measured(runner)
    assert names_by_round[1] == USUAL
    assert set(names_by_round[2]) == {*USUAL} - {"NcclAllReduce"}


def test_a_candidate_that_hangs_once_runs_no_more():
    steps = iter([10.0] * 8 + [HANGS] + [10.0] * 100)
    runner = VirtualRunner(lambda candidate: next(steps), seconds=1e4)
    rounds, names_by_round = measured(runner)
    (hung,) = [run.candidate.name for run in rounds.runs if run.has_hung]
    assert hung in names_by_round[2] and hung not in names_by_round[3]
    assert runner.start_patience == 60.0  # the others start as fast as the program as it is


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_run_in_which_somebody_sets_the_clock_is_skipped(number):
    steps = iter([10.0] * 5 * number + [TIMELESS] + [10.0] * 100)
    rounds, names_by_round = measured(VirtualRunner(lambda candidate: next(steps), seconds=1e4))
    (skipped,) = {*USUAL} - {*names_by_round[number]}
    assert skipped in names_by_round[number + 1]
    assert not any(run.fault for run in rounds.runs) and list(rounds.left_out) == ["auto"]


def test_a_candidate_whose_clock_is_always_set_is_left_out_with_the_reason():
    runner = VirtualRunner(lambda candidate: TIMELESS if candidate.changes else 10.0)
    rounds, names_by_round = measured(runner, "tree", "ReductionToOneDevice")
    assert names_by_round[2] == ["ReductionToOneDevice", AS_IT_IS]
    assert rounds.left_out == {"tree": f"failed: the times cannot be read: {CLOCK_WAS_SET}"}


def test_the_others_may_start_three_times_as_slowly_as_the_first_run():
    runner = VirtualRunner(overhead=30.0)
    measured(runner)
    assert runner.start_patience == 90.0


def test_much_time_makes_longer_runs_and_not_only_more():
    short, long = VirtualRunner(seconds=200.0), VirtualRunner(seconds=6000.0)
    measured(short)
    measured(long)
    assert max(short.seconds_by_round) < max(long.seconds_by_round) == 12
    assert min(long.seconds_by_round[12]) > 10 > max(short.seconds_by_round[6])


def test_a_program_without_any_other_candidate_is_not_run_again():
    runner = VirtualRunner(lambda candidate: FAILS if candidate.changes else 10.0)
    _, names_by_round = measured(runner, "tree", "flat")
    assert names_by_round == {0: [AS_IT_IS], 1: [AS_IT_IS, "tree", "flat"]}


def test_a_program_that_always_hangs_is_not_run_with_all_candidates(capsys):
    runner = VirtualRunner(lambda candidate: HANGS, seconds=1e4)
    rounds, _ = measured(runner)
    assert len(rounds.runs) == 3
    assert rounds.left_out["hierarchical"] == "the program hangs with 3 others"
    assert "The program as it is hung: no step at all." in capsys.readouterr().err


def test_candidates_that_the_time_does_not_reach_are_left_out():
    runner = VirtualRunner(lambda candidate: HANGS, seconds=100.0)
    runner.start_patience = 60.0
    rounds, names_by_round = measured(runner, "ReductionToOneDevice", "tree")
    assert names_by_round == {0: [AS_IT_IS], 1: ["ReductionToOneDevice"]}
    assert rounds.left_out["tree"] == "the time was over"


def test_a_pace_counts_six_runs_of_each_program():
    pace = Pace(start=10.0, least=1.0)
    assert [pace.affordable(seconds) for seconds in (1, 197, 198, 600, 660)] == [0, 2, 3, 9, 10]
    assert [pace.rounds(3, seconds) for seconds in (1, 419, 420, 1e5)] == [6, 6, 7, 12]
    assert pace.steps(10, 50.0) == 0 and pace.steps(10, 150.0) == 5
