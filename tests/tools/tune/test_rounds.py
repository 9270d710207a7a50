"""How often candidates are measured, in which order, and in how much time."""

import random
from contextlib import redirect_stderr
from io import StringIO
from math import exp
from typing import Dict, List

import pytest

from hier_allreduce_tools.tune.candidates import CURRENT
from hier_allreduce_tools.tune.journal import Run
from hier_allreduce_tools.tune.ratio import pairs_needed
from hier_allreduce_tools.tune.report import report, verdict
from hier_allreduce_tools.tune.rounds import minutes, run_rounds
from hier_allreduce_tools.tune.run import TimeOver

USUAL = [CURRENT, "NcclAllReduce", "ReductionToOneDevice", "HierarchicalCopyAllReduce"]
USUAL += ["hierarchical"]  # the program has the strategy of auto
HANGS, FAILS = None, -1.0
START_OF_A_HANG = 150.0  # seconds


class VirtualRunner:
    """A runner whose time is virtual: ``milliseconds(candidate)`` of a step, or how it fails."""

    def __init__(self, milliseconds=lambda candidate: 10.0, seconds=600.0, took=5.0):
        self._milliseconds = milliseconds
        self._left = seconds
        self.took = took

    def run(self, candidate, number):
        step = self._milliseconds(candidate)
        took = START_OF_A_HANG if step is HANGS else self.took
        self._left -= took
        if self._left < 0:
            raise TimeOver
        fault = "hung: no step" if step is HANGS else "ended: status 1" if step == FAILS else ""
        seconds = 0.0 if fault else step * 1e-3
        return Run(number, candidate, seconds, took, fault, 1 << 20, "keras", "", 8)


class Measured:
    """Runs, and why candidates may have none."""

    left_out: Dict[str, str]

    def __init__(self, runs):
        self.runs = runs


def measured(runner, *only, runs=()):
    """Return what a runner has measured, candidates by round, and what was told before."""
    with redirect_stderr(StringIO()) as told:
        measured = Measured(list(runs))
        measured.left_out = run_rounds(runner, measured.runs, list(only))
    names_by_round: Dict[int, List[str]] = {}
    for run in measured.runs:
        names_by_round.setdefault(run.round, []).append(run.candidate)
    return measured, names_by_round, told.getvalue()


def test_all_candidates_run_equally_often_in_shuffled_orders_until_the_time_is_over():
    rounds, names_by_round, _ = measured(VirtualRunner())
    assert names_by_round.pop(0) == [CURRENT]
    assert len(names_by_round) == 24 and len(rounds.runs) == 600 // 5
    assert len(names_by_round.pop(24)) == 4  # then the time is over
    orders = [tuple(names) for names in names_by_round.values()]
    assert all(sorted(order) == sorted(USUAL) for order in orders) and len(set(orders)) > 5


@pytest.mark.parametrize("seconds", [12.0, 60.0, 240.0, 600.0, 3000.0])
@pytest.mark.parametrize("took", [1.0, 5.0, 30.0])
def test_every_candidate_has_runs_or_a_reason(seconds, took):
    rounds, _, _ = measured(VirtualRunner(seconds=seconds + took, took=took))
    assert {run.candidate for run in rounds.runs} | set(rounds.left_out) == {*USUAL}


def test_with_less_time_the_answer_is_rough_and_the_minutes_are_told_before():
    rounds, _, told = measured(VirtualRunner(seconds=200.0))
    found = verdict(rounds.runs)
    assert len(found.rows) == 5 and all(row.is_rough for row in found.rows[1:])
    assert "A run takes 5 s. A certain answer needs --minutes 5 for all 5; --only" in told
    rounds, _, _ = measured(VirtualRunner(seconds=22.0))
    said = report(verdict(rounds.runs), rounds.left_out)
    assert said.count("not measured: ") == said.count(": no time: more --minutes\n") > 0


def test_a_run_of_minutes_is_told_in_plain_seconds():
    _, _, told = measured(VirtualRunner(took=123.0))
    assert told.startswith("A run takes 120 s. ")


@pytest.mark.parametrize("took", [4.68, 5.0, 30.0])
@pytest.mark.parametrize("programs", [2, 5])
def test_the_minutes_that_would_do_are_enough(took, programs):
    rounds, _, _ = measured(VirtualRunner(took=took), *USUAL[1:programs])
    seconds = 60.0 * minutes(rounds.runs, 1 + programs * pairs_needed(programs - 1))
    rounds, _, _ = measured(VirtualRunner(seconds=seconds, took=took), *USUAL[1:programs])
    found = verdict(rounds.runs)
    assert len(found.rows) == programs and not found.missing_pairs


def test_a_rough_answer_tells_how_many_pairs_are_missing_by_the_starts_that_were_seen():
    runner = VirtualRunner(seconds=400.0, took=50.0)
    only = USUAL[1:2]

    def slower(candidate):
        runner.took = 60.0  # the first run was not like the others
        return 10.0

    runner._milliseconds = slower
    rounds, _, _ = measured(runner, *only)
    found = verdict(rounds.runs)
    assert found.missing_pairs == 8 - found.rows[1].pairs > 0
    missing = minutes(rounds.runs, 2 * found.missing_pairs)
    assert missing == -(-found.missing_pairs * 2 * 60 // 60)
    # with so many more minutes nothing is missing
    more = VirtualRunner(seconds=60.0 * missing, took=60.0)
    rounds, _, _ = measured(more, *only, runs=rounds.runs)
    assert not verdict(rounds.runs).missing_pairs


def test_a_journal_is_continued_with_its_candidates_and_no_other_first_run():
    rounds, before, _ = measured(VirtualRunner(seconds=12.0), "tree", "flat")
    assert "no time: more --minutes" in report(verdict(rounds.runs), rounds.left_out)
    rounds, after, _ = measured(VirtualRunner(seconds=600.0), "tree", "flat", runs=rounds.runs)
    assert len(after[0]) == 1 and len(after) > len(before)
    assert set(after[len(before)]) == {CURRENT, "tree", "flat"}
    assert "not measured" not in report(verdict(rounds.runs), rounds.left_out)


@pytest.mark.parametrize("fails", [FAILS, HANGS])
def test_a_candidate_that_fails_runs_no_more(fails):
    runner = VirtualRunner(lambda candidate: fails if candidate == "NcclAllReduce" else 10.0)
    rounds, names_by_round, _ = measured(runner)
    assert sum(run.candidate == "NcclAllReduce" for run in rounds.runs) == 1
    assert set(names_by_round[2]) == {*USUAL} - {"NcclAllReduce"}


def test_a_program_without_any_other_candidate_is_not_run_again():
    runner = VirtualRunner(lambda candidate: 10.0 if candidate == CURRENT else FAILS)
    _, names_by_round, _ = measured(runner, "tree", "flat")
    assert names_by_round[0] == [CURRENT] and set(names_by_round[1]) == {CURRENT, "tree", "flat"}
    assert len(names_by_round) == 2


def test_if_all_hang_it_is_not_the_allreduce():
    rounds, _, _ = measured(VirtualRunner(lambda candidate: HANGS, seconds=1e4))
    found = verdict(rounds.runs)
    assert len(rounds.runs) == 5 and found.faults == dict.fromkeys(USUAL, "hung: no step")
    assert "so it is not the all-reduce: look at the copies" in found.advice


def test_if_the_program_as_it_is_hangs_two_others_run_in_the_usual_time():
    _, names_by_round, _ = measured(
        VirtualRunner(lambda candidate: HANGS if candidate == CURRENT else 10.0), "tree", "flat"
    )
    assert {"tree", "flat"} == set(names_by_round[1]) == set(names_by_round[2])
    alone, names_by_round, told = measured(
        VirtualRunner(lambda candidate: HANGS if candidate == CURRENT else 10.0), "tree"
    )
    assert names_by_round == {0: [CURRENT], 1: ["tree"]}
    assert not told  # a hang is no run that tells how long others take
    assert verdict(alone.runs).advice == "use tree"


def noisy(chance, spread, gain=0.0):
    """Return the virtual steps of a program with noise; flat takes ``gain`` less time."""

    def milliseconds(candidate):
        is_faster = candidate == "flat"
        return 5.0 * (1 - gain * is_faster) * exp(chance.gauss(0.0, spread))

    return milliseconds


@pytest.fixture
def chance(monkeypatch, request):
    """Chance that is the same in every call of the test."""
    chance = random.Random(request.node.name)
    monkeypatch.setattr("hier_allreduce_tools.tune.rounds.random", chance)
    return chance


@pytest.mark.parametrize("tune", range(10))
def test_a_program_is_never_certainly_faster_than_itself(chance, tune):
    rounds, _, _ = measured(VirtualRunner(noisy(chance, 0.03), 40.0, 1.2), "flat", "tree")
    found = verdict(rounds.runs)
    assert found.best is None
    assert found.advice == f"keep {CURRENT}: no other one is certainly faster"


@pytest.mark.parametrize("tune", range(3))
def test_a_planted_gain_of_4_percent_is_found(chance, tune):
    rounds, _, _ = measured(VirtualRunner(noisy(chance, 0.015, gain=0.04), 35.0, 0.8), "flat")
    found = verdict(rounds.runs)
    assert found.best is not None and found.best.name == "flat"
    assert found.best.low < 0.96 < found.best.high
