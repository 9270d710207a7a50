"""Which all-reduces are measured in a program."""

from dataclasses import replace

import pytest

from hier_allreduce import HierAllreduceError, Strategy
from hier_allreduce_tools.tune.candidates import candidates_for, changes_of
from hier_allreduce_tools.tune.journal import Built

KERAS = Built(100 << 20, "keras", "", 8, True)
TENSORPACK = KERAS._replace(front_end="tensorpack", update="replicated")
TOWERS = KERAS._replace(front_end="towers", update="replicated")
GROUPS = ((0, 1, 2, 3), (6, 7, 4, 5))


@pytest.mark.parametrize(
    ("built", "names", "original"),
    [
        (
            KERAS,
            ["NcclAllReduce", "ReductionToOneDevice", "HierarchicalCopyAllReduce"],
            "NcclAllReduce",
        ),
        (
            KERAS._replace(gpus=False),
            ["ReductionToOneDevice", "HierarchicalCopyAllReduce"],
            None,
        ),
        (KERAS._replace(gpus=False, towers=5), ["ReductionToOneDevice"], None),
        (
            TENSORPACK,
            ["tensorpack-hierarchical", "tensorpack-gpu", "tensorpack-nccl", "tensorpack-cpu"],
            "tensorpack-hierarchical",
        ),
        *(
            (
                TENSORPACK._replace(towers=towers),
                ["tensorpack-gpu", "tensorpack-nccl", "tensorpack-cpu"],
                "tensorpack-gpu",
            )
            for towers in (4, 16)
        ),
        (TOWERS, ["tower-0-sum"], "tower-0-sum"),
        (TOWERS._replace(update=""), ["tower-0-sum"], "tower-0-sum"),
    ],
)
def test_the_original_comes_first_then_other_baselines_then_ours(built, names, original):
    candidates, _ = candidates_for(built, [], None)
    assert [candidate.name for candidate in candidates] == [*names, "auto", "hierarchical"]
    originals = [candidate.title for candidate in candidates if candidate.is_original]
    assert originals == ([f"{original} (as it was)"] if original else [])


@pytest.mark.parametrize(
    ("name", "built", "why"),
    [
        ("NcclAllReduce", KERAS._replace(gpus=False), "NCCL needs GPUs"),
        ("tensorpack-hierarchical", TENSORPACK._replace(towers=4), "it needs 8 towers"),
        ("HierarchicalCopyAllReduce", KERAS._replace(towers=3), "it drops the last of an odd"),
        ("tensorpack-gpu", TENSORPACK._replace(update="sharded"), "it has no equal of upd"),
        ("tensorpack-gpu", TENSORPACK._replace(update="once"), "it has no equal of update='once'"),
        ("tower-0-sum", TOWERS._replace(update="once"), "it has no equal of update='once'"),
        ("tensorpack-gpu", KERAS, "the program's front end is keras"),
        ("float16", KERAS, "TensorFlow does not say which values are gradients"),
        ("hierarchical-nvlink", KERAS, "nvidia-smi shows no groups of 8 GPUs but the halves"),
    ],
)
def test_others_are_left_out_with_a_reason(name, built, why):
    candidates, left_out = candidates_for(built, [name, "tree"], None)
    assert left_out[name].startswith(why)
    assert [candidate.name for candidate in candidates] == ["tree"]


def test_a_program_without_any_candidate_is_an_error():
    fault = "no candidate is for this program: tensorpack-cpu: the program's front end is keras"
    with pytest.raises(HierAllreduceError, match=fault):
        candidates_for(KERAS, ["tensorpack-cpu"], None)


def test_groups_along_nvlink_are_usual_if_there_are_some():
    usual, left_out = candidates_for(KERAS, [], GROUPS)
    assert "hierarchical-nvlink" in [candidate.name for candidate in usual]
    _, left_out = candidates_for(KERAS, [], None)
    assert "hierarchical-nvlink" not in left_out


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("auto", Strategy()),
        ("tree", Strategy("tree")),
        ("flat-64MiB", Strategy("flat", chunk_bytes=64 << 20)),
        ("auto-2MiB", Strategy(chunk_bytes=2 << 20)),
        ("hierarchical-nvlink", Strategy("hierarchical", groups=GROUPS)),
        ("flat_hierarchical-nvlink-8MiB", Strategy("flat_hierarchical", 8 << 20, GROUPS)),
        ("bfloat16", Strategy(wire_dtype="bfloat16")),
        ("no-edges", Strategy(edges=False)),
        ("tower-0-sum", Strategy("flat", chunk_bytes=0, main=0, edges=False)),
    ],
)
def test_only_names_a_strategy(name, strategy):
    (candidate,), _ = candidates_for(TOWERS, [name], GROUPS)
    assert candidate.name == name and Strategy(**candidate.changes) == strategy


def test_the_plain_sum_is_that_of_any_program():
    own = Strategy("hierarchical", groups=GROUPS, wire_dtype="float16")
    plain = Strategy("flat", chunk_bytes=0, main=0, edges=False)
    (candidate,), _ = candidates_for(TOWERS, ["tower-0-sum"], None)
    assert replace(own, **candidate.changes) == plain


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "algorithm='' is unknown"),
        ("flat-8MB", "algorithm='flat-8MB' is unknown"),
        ("NcclAllReduce-4MiB", "algorithm='NcclAllReduce' is unknown"),
        ("hierarchica", "algorithm='hierarchica' is unknown; there are "),
        ("flat-nvlink", "go with algorithm='hierarchical'"),
    ],
)
def test_a_name_of_no_candidate_is_an_error(name, message):
    with pytest.raises(HierAllreduceError, match=message):
        changes_of(name, None)
