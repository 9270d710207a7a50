"""Which all-reduces are measured in a program."""

from dataclasses import replace

import pytest

from hier_allreduce import HierAllreduceError, Strategy
from hier_allreduce_tools.tune.candidates import CURRENT, candidates_for, changes_of
from hier_allreduce_tools.tune.journal import Run

OWN = {"algorithm": "flat"}
KERAS = Run(0, CURRENT, 0.1, 9.0, "", 100 << 20, "keras", "", 8, True, OWN)
TENSORPACK = KERAS._replace(front_end="tensorpack", update="replicated")
TOWERS = KERAS._replace(front_end="towers", update="replicated")
GROUPS = ((0, 1, 2, 3), (6, 7, 4, 5))


@pytest.mark.parametrize(
    ("run", "names"),
    [
        (KERAS, ["NcclAllReduce", "ReductionToOneDevice", "HierarchicalCopyAllReduce"]),
        (KERAS._replace(gpus=False), ["ReductionToOneDevice", "HierarchicalCopyAllReduce"]),
        (KERAS._replace(gpus=False, towers=5), ["ReductionToOneDevice"]),
        (
            TENSORPACK,
            ["tensorpack-hierarchical", "tensorpack-gpu", "tensorpack-nccl", "tensorpack-cpu"],
        ),
        *(
            (
                TENSORPACK._replace(towers=towers),
                ["tensorpack-gpu", "tensorpack-nccl", "tensorpack-cpu"],
            )
            for towers in (4, 16)
        ),
        (TOWERS, ["tower-0-sum"]),
        (TOWERS._replace(update=""), ["tower-0-sum"]),
    ],
)
def test_what_the_program_used_before_comes_first_then_others_then_ours(run, names):
    candidates, _ = candidates_for(run, [])
    assert candidates == [*names, "auto", "hierarchical"]


@pytest.mark.parametrize(
    ("name", "run", "why"),
    [
        ("NcclAllReduce", KERAS._replace(gpus=False), "not for keras with 8 towers on CPU devices"),
        ("tensorpack-hierarchical", TENSORPACK._replace(towers=4), "not for tensorpack with 4 tow"),
        ("HierarchicalCopyAllReduce", KERAS._replace(towers=3), "not for keras with 3 towers on G"),
        ("tensorpack-gpu", TENSORPACK._replace(update="sharded"), "not for tensorpack with 8"),
        ("tensorpack-gpu", TENSORPACK._replace(update="once"), "not for tensorpack with 8"),
        ("tower-0-sum", TOWERS._replace(update="once"), "not for towers with 8"),
        ("tensorpack-gpu", KERAS, "not for keras with 8 towers on GPUs"),
        ("float16", KERAS, "not for keras with 8 towers on GPUs"),
    ],
)
def test_others_are_left_out_with_a_reason(name, run, why):
    candidates, left_out = candidates_for(run, [name, "tree"])
    assert left_out[name].startswith(why)
    assert candidates == ["tree"]


def test_a_candidate_that_changes_nothing_is_left_out():
    names = ["flat", "tree", "float16", "no-edges"]
    own = {**OWN, "edges": False, "wire_dtype": "float16"}
    candidates, left_out = candidates_for(TOWERS._replace(strategy=own), names)
    same = f"{CURRENT} has this strategy"
    assert candidates == ["tree"]
    assert left_out == {"flat": same, "float16": same, "no-edges": same}
    assert candidates_for(TOWERS._replace(strategy={}), [])[1] == {"auto": same}


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
    assert candidates_for(TOWERS, [name])[0] == [name]
    assert Strategy(**changes_of(name)) == strategy


def test_the_plain_sum_is_that_of_any_program():
    own = Strategy("hierarchical", groups=GROUPS, wire_dtype="float16")
    plain = Strategy("flat", chunk_bytes=0, main=0, edges=False)
    assert replace(own, **changes_of("tower-0-sum")) == plain


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("auto", Strategy(missing="zeros", edges=False)),
        ("flat-8MiB", Strategy("flat", chunk_bytes=8 << 20, missing="zeros", edges=False)),
        ("tower-0-sum", Strategy("flat", chunk_bytes=0, main=0, missing="zeros", edges=False)),
    ],
)
def test_a_programs_own_chunks_are_no_part_of_another_algorithm(name, changed):
    own = Strategy("tree", chunks=4, missing="zeros", edges=False)
    assert replace(own, **changes_of(name)) == changed


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "algorithm='': expected one of"),
        ("flat-8MB", "algorithm='flat-8MB': expected one of .*, or one of float16, bfloat16, no-"),
        ("NcclAllReduce-4MiB", "algorithm='NcclAllReduce': expected one of"),
        ("hierarchica", "algorithm='hierarchica': expected one of "),
    ],
)
def test_a_name_of_no_candidate_is_an_error(name, message):
    with pytest.raises(HierAllreduceError, match=message):
        changes_of(name)
