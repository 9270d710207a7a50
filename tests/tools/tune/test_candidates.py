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
    candidates, _ = candidates_for(built, [])
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
    ],
)
def test_others_are_left_out_with_a_reason(name, built, why):
    candidates, left_out = candidates_for(built, [name, "tree"])
    assert left_out[name].startswith(why)
    assert [candidate.name for candidate in candidates] == ["tree"]


def test_a_program_without_any_candidate_is_an_error():
    fault = "no candidate is for this program: tensorpack-cpu: the program's front end is keras"
    with pytest.raises(HierAllreduceError, match=fault):
        candidates_for(KERAS, ["tensorpack-cpu"])


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("auto", Strategy()),
        ("tree", Strategy("tree")),
        ("flat-64MiB", Strategy("flat", chunk_bytes=64 << 20)),
        ("auto-2MiB", Strategy(chunk_bytes=2 << 20)),
        ("bfloat16", Strategy(wire_dtype="bfloat16")),
        ("no-edges", Strategy(edges=False)),
        ("tower-0-sum", Strategy("flat", chunk_bytes=0, main=0, edges=False)),
    ],
)
def test_only_names_a_strategy(name, strategy):
    (candidate,), _ = candidates_for(TOWERS, [name])
    assert candidate.name == name and Strategy(**candidate.changes) == strategy


def test_the_plain_sum_is_that_of_any_program():
    own = Strategy("hierarchical", groups=GROUPS, wire_dtype="float16")
    plain = Strategy("flat", chunk_bytes=0, main=0, edges=False)
    (candidate,), _ = candidates_for(TOWERS, ["tower-0-sum"])
    assert replace(own, **candidate.changes) == plain


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "algorithm='': expected one of"),
        ("flat-8MB", "algorithm='flat-8MB': expected one of"),
        ("NcclAllReduce-4MiB", "algorithm='NcclAllReduce': expected one of"),
        ("hierarchica", "algorithm='hierarchica': expected one of "),
    ],
)
def test_a_name_of_no_candidate_is_an_error(name, message):
    with pytest.raises(HierAllreduceError, match=message):
        changes_of(name)
