"""Which all-reduces are measured in a program."""

from dataclasses import replace

import pytest

from hier_allreduce import HierAllreduceError, Strategy
from hier_allreduce_tools.tune.candidates import CURRENT, candidates_for, changes_of
from hier_allreduce_tools.tune.journal import Run

KERAS = Run(0, CURRENT, 0.1, 9.0, "", 100 << 20, "keras", "", 8, {"algorithm": "flat"})
TENSORPACK = KERAS._replace(front_end="tensorpack", update="replicated")
TOWERS = KERAS._replace(front_end="towers", update="replicated")
GROUPS = ((0, 1, 2, 3), (6, 7, 4, 5))


@pytest.mark.parametrize(
    ("run", "names"),
    [
        (KERAS, ["NcclAllReduce", "ReductionToOneDevice", "HierarchicalCopyAllReduce"]),
        (KERAS._replace(towers=5), ["NcclAllReduce", "ReductionToOneDevice"]),
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
def test_what_the_program_used_before_comes_first_then_ours(run, names):
    candidates, _ = candidates_for(run, [])
    assert candidates == [CURRENT, *names, "hierarchical"]


@pytest.mark.parametrize(
    ("name", "run", "why"),
    [
        ("tensorpack-hierarchical", TENSORPACK._replace(towers=4), "not for tensorpack with 4 tow"),
        ("HierarchicalCopyAllReduce", KERAS._replace(towers=3), "not for keras with 3 towers"),
        ("tensorpack-gpu", TENSORPACK._replace(update="sharded"), "not for tensorpack with 8"),
        (
            "tensorpack-gpu",
            TENSORPACK._replace(update="once"),
            "not for tensorpack with 8 towers, update='once'",
        ),
        ("tower-0-sum", TOWERS._replace(update="once"), "not for towers with 8"),
        ("tensorpack-gpu", KERAS, "not for keras with 8 towers"),
        ("sixteen_bit", KERAS, "not for keras with 8 towers"),
    ],
)
def test_others_are_left_out_with_a_reason(name, run, why):
    candidates, left_out = candidates_for(run, [name, "tree"])
    assert left_out[name].startswith(why)
    assert candidates == [CURRENT, "tree"]


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("auto", Strategy()),
        ("tree", Strategy("tree")),
        ("megengine", Strategy(chunk_bytes=10 << 20)),
        ("sixteen_bit", Strategy(wire_dtype="float16")),
        ("own.yaml", Strategy("hierarchical", groups=GROUPS, edges=False)),
        ("tower-0-sum", Strategy("flat", chunk_bytes=0, main=0, edges=False)),
    ],
)
def test_only_names_a_strategy_or_its_file(name, strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(
        f"algorithm: hierarchical\ngroups: {[*map(list, GROUPS)]}\nedges: false\n"
    )
    assert candidates_for(TOWERS, [name])[0] == [CURRENT, name]
    assert Strategy(**changes_of(name)) == strategy


def test_the_plain_sum_is_that_of_any_program():
    own = Strategy("hierarchical", groups=GROUPS, wire_dtype="float16")
    plain = Strategy("flat", chunk_bytes=0, main=0, edges=False)
    assert replace(own, **changes_of("tower-0-sum")) == plain


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("auto", Strategy(missing="zeros", edges=False)),
        ("megengine", Strategy(chunk_bytes=10 << 20, missing="zeros", edges=False)),
        ("sixteen_bit", Strategy(wire_dtype="float16", missing="zeros", edges=False)),
        ("tower-0-sum", Strategy("flat", chunk_bytes=0, main=0, missing="zeros", edges=False)),
    ],
)
def test_a_programs_own_chunks_are_no_part_of_another_algorithm(name, changed):
    own = Strategy("tree", chunks=4, missing="zeros", edges=False)
    assert replace(own, **changes_of(name)) == changed


@pytest.mark.parametrize("name", ["", "flat-8MB", "NcclAllReduc", "hierarchica"])
def test_a_name_of_no_candidate_is_an_error(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = f"'{name}' is neither a file nor one of the strategies; there are auto, flat, "
    with pytest.raises(HierAllreduceError, match=expected):
        changes_of(name)
