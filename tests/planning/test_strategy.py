"""One object for all choices: read from YAML, checked, and printed as what it will do."""

import dataclasses

import pytest

from hier_allreduce import HierAllreduceError, Strategy, presets
from hier_allreduce.planning import Spec, plan_unplanned, verify
from hier_allreduce.planning.strategy import strategy_from


@pytest.mark.parametrize("name", presets.names("strategies"))
def test_every_shipped_strategy_loads_and_says_what_it_does(name):
    text = str(Strategy.load(name))
    assert "all-reduce" in text and len(text.splitlines()) >= 4


def test_the_shipped_default_is_the_default():
    assert Strategy.load("default") == Strategy()


@pytest.mark.parametrize("name", presets.names("strategies"))
def test_shipped_strategies_repeat_no_refused_default(name):
    given = presets.read_yaml(presets.find("strategies", name, HierAllreduceError))
    unsaid = {"mains": Strategy().mains_for(given["algorithm"]), "groups": None, "splits": 0}
    assert not [key for key, value in unsaid.items() if key in given and given[key] == value]


@pytest.mark.parametrize("name", ["default", "half", "megengine", "muji"])
def test_shipped_strategies_that_fix_no_mains_go_with_a_topology(name):
    assert dataclasses.replace(Strategy.load(name), topology="dgx-1v").topology == "dgx-1v"


def test_printed_sentences_follow_the_choices():
    text = str(Strategy(algorithm="flat", mains=3, pack_below=20 << 20, wire_dtype="float16"))
    assert "main is tower 3" in text
    assert "under 20 MiB share buckets of up to 20 MiB" in text
    assert "travels as float16" in text


@pytest.mark.parametrize("backward, expected", [(None, "sparse"), (0, "for an idle machine"), (0.2, "pass of 200 ms")])
def test_printed_sentences_say_what_is_planned_for(backward, expected):
    text = str(Strategy(topology="dgx-1v", backward=backward))
    assert "planned for the links of dgx-1v\n  gradients of a dtype in a few buckets, cut as planned\n" in text
    assert expected in text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])  # the last two are what Windows writes
def test_a_path_loads_and_lists_become_tuples(tmp_path, encoding):
    path = tmp_path / "mine.yaml"
    path.write_text("# größer\nalgorithm: hierarchical\ngroups: [[0, 1], [2]]\n", encoding=encoding)
    assert Strategy.load(str(path)) == Strategy(algorithm="hierarchical", groups=((0, 1), (2,)))


@pytest.mark.parametrize(
    "content, expected",
    [
        ("algoritm: flat", ["algoritm", "did you mean 'algorithm'"]),
        ("algorithm: hierarchic", ["hierarchic", "did you mean 'hierarchical'", "mine.yaml"]),
        ("algorithm: carousel", ["'carousel'", "hierarchical", "tree", "flat"]),
        ("- flat", ["key: value"]),
        ("algorithm: [", ["not readable as YAML"]),
        ("pack_below: -1", ["pack_below=-1", "0 or more"]),
        ("pack_below: 10MB", ["pack_below='10MB'"]),
        ("backward: 0.1", ["backward=0.1", "give topology= too"]),
        ("topology: dgx-1v\nbackward: 60ms", ["backward='60ms'", "60 ms are 0.06"]),
        ("topology: dgx-1v\nsplits: 8", ["splits=8: with a topology this is planned", "leave it out"]),
        ("topology: dgx-1v\nmains: 0", ["mains=0: with a topology this is planned"]),
        ("topology: dgx-1v\nmains: rotate", ["mains='rotate': with a topology this is planned"]),
        ("topology: 7", ["topology=7: expected"]),
        ("mains: first", ["mains='first'"]),
        ("mains: true", ["mains=True"]),
        ("wire_dtype: float8", ["wire_dtype='float8'"]),
        ("sparse: maybe", ["sparse='maybe'"]),
        ("missing: ignore", ["missing='ignore'"]),
        (
            "topology: dgx-1w",
            ["topology='dgx-1w'", "neither a file nor one of the machines; did you mean 'dgx-1v'"],
        ),
        ("algorithm: tree\ngroups: [[0, 1]]", ["groups", "algorithm='hierarchical'", "'tree'"]),
    ],
)
def test_an_invalid_file_is_refused_with_the_nearest_word(tmp_path, content, expected):
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(HierAllreduceError) as refused:
        Strategy.load(str(path))
    assert all(word in str(refused.value) for word in expected), refused.value


def test_an_unknown_name_is_refused_with_the_names_there_are():
    with pytest.raises(HierAllreduceError, match="did you mean 'muji'"):
        Strategy.load("mujy")


def test_names_paths_and_objects_are_accepted(tmp_path):
    assert strategy_from("muji") == Strategy.load("muji")
    assert strategy_from("auto") == strategy_from(None) == Strategy()
    assert strategy_from("tree") == Strategy(algorithm="tree")
    assert strategy_from(Strategy(splits=3)).splits == 3
    (tmp_path / "mine.yaml").write_text("algorithm: tree\n")
    assert strategy_from(tmp_path / "mine.yaml") == Strategy(algorithm="tree")
    with pytest.raises(HierAllreduceError, match="expected a Strategy, an algorithm's name, or the name or path"):
        strategy_from(7)
    with pytest.raises(HierAllreduceError, match="did you mean 'hierarchical'"):
        strategy_from("heirarchical")


@pytest.mark.parametrize("value", [3, None, ["half"], b"half"])
def test_other_values_than_names_are_refused(value):
    with pytest.raises(HierAllreduceError, match="expected the name of one of the strategies, or a file's path"):
        Strategy.load(value)


def test_optimizers_get_rows_unless_hosts_add_them_up():
    assert [Strategy().for_optimizers(hosts).sparse for hosts in (1, 2)] == ["gather", "auto"]


def test_a_topology_is_read_once(tmp_path):
    """It may be a pipe, which has nothing for a second reader."""
    path = tmp_path / "machine.txt"
    path.write_text("\tGPU0\tGPU1\nGPU0\tX\tNV2\nGPU1\tNV2\tX\n")
    strategy = Strategy(topology=str(path))
    path.unlink()
    for same in (strategy, strategy.for_optimizers(), strategy.with_sparse("dense")):
        assert same.machine().kinds == (("X", "NV2"), ("NV2", "X"))
    assert strategy.for_optimizers().sparse == "gather" and strategy.sparse == "auto"
    assert Strategy().machine() is None


def test_on_cpus_nothing_is_planned_for_this_machine():
    assert "(on CPU devices: nothing is planned)" in str(Strategy(topology="this machine"))
    assert "CPU" not in str(Strategy(topology="dgx-1v"))


def test_dtypes_are_given_by_name():
    """``tf.float16`` equals its name, but is not a name."""

    class Equal:
        def __eq__(self, other):
            return other == "float16"

        __hash__ = None

    with pytest.raises(HierAllreduceError, match=r"wire_dtype=.*: expected None or 'float16' or 'bfloat16'"):
        Strategy(wire_dtype=Equal())
    with pytest.raises(HierAllreduceError, match="wire_dtype='None' is unknown; there are"):
        Strategy(wire_dtype="None")


def test_what_a_strategy_does_without_a_topology_is_a_plan():
    specs = [Spec(1 << 20, 4, "float32"), Spec(16, 4, "float32"), Spec(2 << 20, 4, "float32"), Spec(16, 4, "float32")]
    chunks, plan = plan_unplanned(specs, Strategy(), 4)
    assert [sorted(piece.number for piece in chunk.pieces) for chunk in chunks] == [[1, 3], [2], [0]]
    assert (plan.buckets, sorted(plan.roots)) == ((1, 0, 2), [0, 1, 2])
    rotating = Strategy("flat", mains="rotate", pack_below=0)
    chunks, plan = plan_unplanned(specs, rotating, 4)
    variables = [chunk.pieces[0].number for chunk in chunks]
    assert list(zip(variables, plan.roots)) == [(n, n) for n in (3, 2, 1, 0)]
    chunks, plan = plan_unplanned(specs, Strategy("hierarchical", mains=0, splits=1), 4)
    assert (len(chunks), plan.buckets, plan.roots) == (1, (), (0,))
    assert verify(plan)
