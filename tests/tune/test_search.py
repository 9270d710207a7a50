"""Which all-reduces are measured, how often, and in which order."""

from pathlib import Path
from typing import Dict, List

import pytest

from hier_allreduce import HierAllreduceError, Strategy
from hier_allreduce.commands.tune.progress import Progress
from hier_allreduce.commands.tune.run import LEAST, Run
from hier_allreduce.commands.tune.search import Budget, Search
from hier_allreduce.planning.candidate import Candidate, candidates_for, is_name

FACTS = {
    "front_end": "keras",
    "towers": 8,
    "gpus": True,
    "bytes": 100 << 20,
    "algorithm": "flat",
    "chunk_bytes": 8 << 20,
    "is_default": True,
}


class VirtualRunner:
    """A runner whose time is virtual: ``milliseconds(candidate)`` of a step, None for a hang."""

    command = ("python", "train.py")
    patience = 60.0
    start_patience = 600.0

    def __init__(self, milliseconds, seconds=600.0, overhead=1.0, **facts):
        self._milliseconds = milliseconds
        self._left = seconds
        self._overhead = overhead
        self._facts = {**FACTS, "bytes": 1 << 20, "kept": {}, **facts}
        self.shares = {}

    def left(self):
        return self._left

    def run(self, candidate, share, turn):
        assert self._left > 0
        self.shares[turn] = share
        step = self._milliseconds(candidate)
        if step is None:
            self._left -= self.start_patience
            fault = "hung: no step at all"
            return Run(candidate, [], turn, Path("log"), fault, self._facts, self.start_patience)
        self._left -= self._overhead + max(share, LEAST * step * 1e-3)
        if self._left < 0:
            self._left = 0.0
            return None
        seconds = [step * 1e-3] * 3
        return Run(candidate, seconds, turn, Path("log"), "", self._facts, self._overhead)


def steps(candidate):
    usual = {"tree": 80.0, "flat_tree": 130.0, "hierarchical": 110.0, "flat": 125.0}
    return usual.get(candidate.changes.get("algorithm"), 100.0)


def searched(runner, *only):
    """Return the search of a runner, and its candidates in each turn."""
    search = Search(runner, None, only, Progress(600.0))
    search.run_all()
    turns: Dict[int, List[str]] = {}
    for run in search.runs:
        turns.setdefault(run.turn, []).append(run.candidate.name)
    return search, turns


def chosen(only=(), groups=None, **facts):
    return [found.name for found in candidates_for({**FACTS, **facts}, groups, only).chosen]


def test_peers_and_algorithms_with_sizes_are_candidates():
    names = chosen()
    assert names[:3] == ["NcclAllReduce", "ReductionToOneDevice", "HierarchicalCopyAllReduce"]
    assert {"flat-4MiB", "tree-8MiB", "hierarchical-16MiB"} <= set(names)
    assert "default" not in names and "default" in chosen(is_default=False)


def test_a_candidate_equal_to_the_program_is_left_out():
    assert "flat-8MiB" not in chosen()
    assert "flat-8MiB" in chosen(gpus=False)  # chunks on CPU devices are others


@pytest.mark.parametrize(
    ("facts", "name", "why"),
    [
        ({"gpus": False}, "NcclAllReduce", "NCCL needs GPUs"),
        ({"front_end": "tensorpack", "towers": 4}, "tensorpack-hierarchical", "it needs 8 towers"),
        ({"front_end": "tensorpack", "update": "main"}, "tensorpack-gpu", "it has no equal of"),
        ({"towers": 2}, "tree", "on 2 towers it has the steps of flat"),
        ({"bytes": 1 << 20}, "chunks of 4 MiB", "all gradients fit into a chunk of 2 MiB"),
        ({}, "float16", "TensorFlow does not say which values are gradients"),
        ({"front_end": "towers"}, "float16", "it rounds"),
        ({}, "flat-8MiB", "it is the program as it is"),
        ({}, "hierarchical-nvlink", "nvidia-smi shows no groups"),
    ],
)
def test_others_are_left_out_with_a_reason(facts, name, why):
    found = candidates_for({**FACTS, **facts})
    assert found.left_out[name].startswith(why)
    assert name not in [candidate.name for candidate in found.chosen]


def test_groups_along_nvlink_are_candidates_if_they_fit():
    groups = ((0, 1, 2, 3), (6, 7, 4, 5))
    found = candidates_for(FACTS, groups, ["hierarchical-nvlink-8MiB"]).chosen
    assert [Strategy(**candidate.changes).groups for candidate in found] == [groups]
    assert not chosen(["hierarchical-nvlink"], groups, towers=4)


def test_only_names_candidates_or_algorithms():
    assert chosen(["NcclAllReduce", "tree-4MiB"]) == ["NcclAllReduce", "tree-4MiB"]
    assert set(chosen(["tree"])) == {f"tree-{size}MiB" for size in (2, 4, 8, 16)}
    assert chosen(["tree-64MiB"]) == ["tree-64MiB"]
    assert chosen(["float16"], front_end="towers") == ["float16"]
    assert all(map(is_name, ["flat", "tree-64MiB", "tensorpack-gpu", "float16"]))
    assert not any(map(is_name, ["", "tree-", "NcclAllReduce-4MiB", "now"]))


def test_every_candidate_is_a_strategy():
    for candidate in candidates_for({**FACTS, "front_end": "towers"}, ((0, 1), (2, 3))).chosen:
        assert Strategy(**candidate.changes) != Strategy()


def test_the_best_and_the_peers_run_last_in_both_orders():
    runner = VirtualRunner(steps, gpus=False)
    peer = "ReductionToOneDevice"
    _, turns = searched(runner, peer, "flat", "tree", "flat_tree", "hierarchical")
    ours = ["flat-2MiB", "tree-2MiB", "hierarchical-2MiB", "flat_tree-2MiB"]
    assert turns[1] == ["now", peer, *ours]
    assert turns[2] == ["now", "tree-2MiB", peer, "hierarchical-2MiB"]
    assert turns[3] == ["now", peer, "tree-2MiB", "hierarchical-2MiB", "flat-2MiB"]
    assert turns[4] == turns[3][::-1]
    assert turns[5] == ["now", "tree-2MiB"]  # the others are clearly slower
    assert turns[6] == ["tree-2MiB", "now"]
    assert max(turns) == 10  # there is time for more than four last turns
    assert 0 == runner.shares[1] < runner.shares[2] < runner.shares[3]


def test_slow_candidates_go_on_if_no_other_is_near():
    runner = VirtualRunner(lambda found: 130.0 if found.changes else 100.0, gpus=False)
    _, turns = searched(runner, "tree", "flat")
    assert turns[5] == ["now", "flat-2MiB", "tree-2MiB"]


def test_a_program_without_any_other_candidate_is_not_run_again():
    runner = VirtualRunner(lambda found: None if found.changes else 100.0, gpus=False)
    runner.start_patience = 3.0
    _, turns = searched(runner, "tree", "flat")
    assert turns == {1: ["now", "flat-2MiB", "tree-2MiB"]}


def test_the_program_as_it_is_runs_last_too_if_it_is_slow():
    runner = VirtualRunner(lambda found: 70.0 if found.changes else 100.0, gpus=False)
    _, turns = searched(runner, "tree", "flat")
    assert turns[5][0] == "now"


def test_all_runs_end_in_time():
    for seconds in (20.0, 60.0, 240.0, 600.0):
        runner = VirtualRunner(steps, seconds, bytes=100 << 20)
        search, _ = searched(runner)
        assert runner.left() >= 0
        named = {run.candidate.name for run in search.runs} | set(search.left_out)
        assert {"tree-4MiB", "NcclAllReduce", "hierarchical-16MiB"} <= named


def test_candidates_without_time_are_left_out():
    search, turns = searched(VirtualRunner(steps, seconds=100.0, overhead=5.0))
    assert any(why.startswith("no time: all candidates take") for why in search.left_out.values())
    assert 1 < len(turns[1]) < 8


def test_a_candidate_that_fails_makes_room_for_another():
    def hangs(candidate):
        return None if candidate.peer else steps(candidate)

    runner = VirtualRunner(hangs, seconds=120.0, overhead=10.0, gpus=False)
    runner.start_patience = 3.0
    search, turns = searched(runner, "ReductionToOneDevice", "tree", "flat")
    assert turns[1] == ["now", "ReductionToOneDevice", "flat-2MiB"]
    assert list(search.left_out) == ["tree-2MiB"]
    assert search.left_out["tree-2MiB"].startswith("no time")
    assert turns[3] == ["now", "flat-2MiB"]


def test_with_more_time_more_candidates_are_measured():
    budget = Budget(overhead=10.0, least=1.0)
    candidates = [Candidate("peer", "peer"), *(Candidate(f"flat-{size}MiB") for size in range(20))]
    numbers = [budget.affordable(candidates, seconds) for seconds in (1, 300, 600, 1e5)]
    assert numbers[0] == 1 and numbers[-1] == 21 and numbers == sorted(numbers)
    assert budget.all_runs(candidates[: numbers[2]]) <= 600


def test_the_least_time_has_all_turns():
    budget = Budget(overhead=10.0, least=1.0)
    names = [
        Candidate("peer", "peer"),
        *(Candidate(name) for name in ("flat", "tree", "auto", "x")),
    ]
    # 5 short runs; longer ones of now and 3 others; 4 times now, the peer and 3 of ours
    assert budget.all_runs(names) == 5 * 11 + 4 * 12 + 4 * 5 * 12
    assert budget.affordable(names, 343.0) == 5 and budget.affordable(names, 342.0) == 4


def test_an_algorithm_that_hangs_is_not_tried_with_other_sizes():
    def hangs(candidate):
        return None if candidate.changes.get("algorithm") == "flat_tree" else steps(candidate)

    runner = VirtualRunner(hangs, bytes=100 << 20)
    search, _ = searched(runner, "tree", "flat_tree-2MiB", "flat_tree-4MiB")
    assert sum(run.fault.startswith("hung") for run in search.runs) == 1
    assert "flat_tree-4MiB has hung" in search.left_out.values()
    assert runner.start_patience == 60.0  # the others start as fast as the program as it is


def test_a_program_that_always_hangs_is_not_run_with_all_candidates(capsys):
    runner = VirtualRunner(lambda candidate: None, gpus=False)
    runner.start_patience = 20.0
    search, _ = searched(runner)
    assert len(search.runs) == 3
    assert "the program hangs with 3 others" in search.left_out.values()
    told = capsys.readouterr().err
    assert told.startswith("The program as it is hung: no step at all. Now a short run of each of")


def test_candidates_that_the_time_does_not_reach_are_left_out():
    runner = VirtualRunner(lambda candidate: None, seconds=100.0, gpus=False)
    runner.start_patience = 60.0
    search, turns = searched(runner, "ReductionToOneDevice", "tree")
    assert turns == {1: ["now", "ReductionToOneDevice"]}
    assert search.left_out["tree-2MiB"] == "the time was over"


def test_a_name_that_is_not_for_the_program_is_an_error():
    fault = "no candidate is for this program: tensorpack-cpu: the program's front end is keras"
    with pytest.raises(HierAllreduceError, match=fault):
        searched(VirtualRunner(steps), "tensorpack-cpu")
