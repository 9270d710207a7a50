"""Which all-reduces are measured in a program."""

from dataclasses import replace

import pytest

from hier_allreduce import HierAllreduceError, Strategy
from hier_allreduce_tools.tune.candidates import candidates_for, check_name, strategies_for
from hier_allreduce_tools.tune.protocol import ProgramFacts

FACTS = ProgramFacts("keras", "replicated", 8, True, 100 << 20, "plan of the program")
GROUPS = ((0, 1, 2, 3), (6, 7, 4, 5))


def found(only=(), groups=None, plans=None, **facts):
    """Return candidates and left out ones; all plans differ but those in ``plans``."""
    strategies = strategies_for(only, groups)
    known = {**dict(zip(strategies, strategies)), **(plans or {})}
    return candidates_for(FACTS._replace(plans=known, **facts), strategies, only)


def chosen(*only, **options):
    candidates, _ = found(only, **options)
    return [candidate.name for candidate in candidates]


@pytest.mark.parametrize(
    ("facts", "names", "was"),
    [
        (
            {},
            ["NcclAllReduce", "ReductionToOneDevice", "HierarchicalCopyAllReduce"],
            "NcclAllReduce",
        ),
        ({"gpus": False}, ["ReductionToOneDevice", "HierarchicalCopyAllReduce"], None),
        ({"gpus": False, "towers": 5}, ["ReductionToOneDevice"], None),
        (
            {"front_end": "tensorpack"},
            ["tensorpack-hierarchical", "tensorpack-gpu", "tensorpack-nccl", "tensorpack-cpu"],
            "tensorpack-hierarchical",
        ),
        *(
            (
                {"front_end": "tensorpack", "towers": towers},
                ["tensorpack-gpu", "tensorpack-nccl", "tensorpack-cpu"],
                "tensorpack-gpu",
            )
            for towers in (4, 16)
        ),
        ({"front_end": "towers"}, ["tower-0-sum"], "tower-0-sum"),
    ],
)
def test_the_program_as_it_was_comes_first_then_other_baselines_then_ours(facts, names, was):
    candidates, _ = found(**facts)
    assert [candidate.name for candidate in candidates] == [*names, "auto", "hierarchical"]
    assert [candidate.name for candidate in candidates if candidate.was] == ([was] if was else [])


def test_equal_plans_are_one_candidate():
    plans = {"auto": FACTS.plan, "hierarchical": "same", "tree": "same"}
    candidates, left_out = found(["auto", "hierarchical", "tree"], plans=plans)
    assert [candidate.name for candidate in candidates] == ["hierarchical"]
    assert left_out == {
        "auto": "its plan is that of the program as it is",
        "tree": "its plan is that of hierarchical",
    }


@pytest.mark.parametrize(
    ("name", "facts", "why"),
    [
        ("NcclAllReduce", {"gpus": False}, "NCCL needs GPUs"),
        ("tensorpack-hierarchical", {"front_end": "tensorpack", "towers": 4}, "it needs 8 towers"),
        ("HierarchicalCopyAllReduce", {"towers": 3}, "it drops the last of an odd number of repl"),
        (
            "tensorpack-gpu",
            {"front_end": "tensorpack", "update": "sharded"},
            "it has no equal of upd",
        ),
        ("tensorpack-gpu", {}, "the program's front end is keras"),
        ("float16", {}, "TensorFlow does not say which values are gradients"),
        ("hierarchical-nvlink", {"plans": {"hierarchical-nvlink": ""}}, "nvidia-smi shows no gr"),
    ],
)
def test_others_are_left_out_with_a_reason(name, facts, why):
    candidates, left_out = found([name, "tree"], **facts)
    assert left_out[name].startswith(why)
    assert [candidate.name for candidate in candidates] == ["tree"]


def test_a_program_without_any_candidate_is_an_error():
    fault = "no candidate is for this program: tensorpack-cpu: the program's front end is keras"
    with pytest.raises(HierAllreduceError, match=fault):
        found(["tensorpack-cpu"])


def test_groups_along_nvlink_are_usual_if_there_are_some():
    assert "hierarchical-nvlink" in chosen(groups=GROUPS) and "hierarchical" in chosen()
    assert "hierarchical-nvlink" not in chosen()


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
    check_name(name)
    (candidate,), _ = found([name], groups=GROUPS, front_end="towers")
    assert candidate.name == name and Strategy(**candidate.changes) == strategy


def test_the_plain_sum_is_that_of_any_program():
    (candidate,), _ = found(["tower-0-sum"], front_end="towers")
    own = Strategy("hierarchical", groups=GROUPS, wire_dtype="float16")
    plain = Strategy("flat", chunk_bytes=0, main=0, edges=False)
    assert replace(own, **candidate.changes) == plain


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "'' is no candidate; there are auto, flat,"),
        ("flat-8MB", "'flat-8MB': the size of chunks is in whole MiB, such as flat-8MiB"),
        ("NcclAllReduce-4MiB", "is no candidate; there are "),
        ("hierarchica", "'hierarchica' is no candidate; there are "),
    ],
)
def test_a_name_of_no_candidate_is_an_error(name, message):
    with pytest.raises(HierAllreduceError, match=message):
        check_name(name)
