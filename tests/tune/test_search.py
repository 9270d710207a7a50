"""Which all-reduces are measured, how often, and in which order."""

import pytest

from hier_allreduce import HierAllreduceError, Strategy
from hier_allreduce.commands.tune.search import Budget
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
STEPS = """
slow = {"": 1.0, "tree": 0.8, "ring": 1.3, "hierarchical": 1.1}.get(algorithm, 1.2)
train(40, 10.0 * slow)
"""


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


def test_the_best_and_the_peers_run_last_in_both_orders(program, search):
    found = search(program(STEPS), only=["ReductionToOneDevice", "flat", "tree", "ring"])
    found.run_all()
    turns = {
        turn: [run.candidate.name for run in found.runs if run.turn == turn] for turn in range(1, 7)
    }
    peer, *ours = turns[1][1:]
    assert turns[1][0] == "now" and sorted(ours) == ["flat-2MiB", "ring-2MiB", "tree-2MiB"]
    assert turns[2] == ["now", "tree-2MiB", peer]
    assert turns[3][:2] == ["now", peer] and turns[3][2] == "tree-2MiB"
    assert turns[4] == turns[3][::-1]
    assert turns[5] == ["now", "tree-2MiB"] == turns[6][::-1]  # the others are clearly slower


def test_the_number_of_candidates_follows_from_the_time():
    budget = Budget(overhead=10.0, least=1.0)
    candidates = [Candidate("peer", "peer"), *(Candidate(f"flat-{size}MiB") for size in range(20))]
    numbers = [budget.affordable(candidates, seconds) for seconds in (1, 300, 600, 1e5)]
    assert numbers[0] == 1 and numbers[-1] == 21 and numbers == sorted(numbers)
    assert budget.all_runs(candidates[: numbers[2]]) <= 600


def test_candidates_without_time_are_listed(program, search):
    found = search(program("time.sleep(1)\n" + STEPS), only=["flat", "tree", "ring"], seconds=4.0)
    found.run_all()
    assert len({run.candidate.name for run in found.runs} | set(found.left_out)) == 4
    assert any(why.startswith(("no time", "the time was")) for why in found.left_out.values())


def test_one_algorithm_hangs_once(program, search):
    hangs = "if algorithm == 'ring':\n    build()\n    time.sleep(1000)\n"
    found = search(program(hangs + STEPS), only=["tree", "ring-2MiB", "ring-4MiB"], patience=5.0)
    found.run_all()
    assert sum(run.fault.startswith("hung") for run in found.runs) == 1
    assert "has hung" in " ".join(found.left_out.values())


def test_a_name_that_is_not_for_the_program_is_an_error(program, search):
    fault = "no candidate is for this program: tensorpack-cpu: the program's front end is keras"
    with pytest.raises(HierAllreduceError, match=fault):
        search(program(STEPS), only=["tensorpack-cpu"]).run_all()
