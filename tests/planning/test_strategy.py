"""A user's choices: read from Python and YAML, checked, and the plan that they select."""

from typing import Any

import numpy as np
import pytest
from helpers.models import gradients
from helpers.project import TOP

from hier_allreduce import HierAllreduceError, Strategy, check
from hier_allreduce.planning.algorithms import BY_NAME, flat, schedules_of, tree
from hier_allreduce.planning.plan import root_of
from hier_allreduce.planning.strategy import plan_for, strategy_from

GRADS = gradients("mobilenet_v2")


def fits(plan, towers):
    for schedule in plan.schedules:
        assert check(schedule, towers) == schedule


def test_the_shipped_strategies_load_and_have_plans():
    names = sorted(path.stem for path in (TOP / "configs" / "strategies").glob("*.yaml"))
    assert len(names) == 6
    with pytest.raises(HierAllreduceError, match=", ".join(names)):
        Strategy.load("tensorpak")
    for name in names:
        assert strategy_from(name) == Strategy.load(name) != Strategy()
        fits(plan_for(Strategy.load(name), 8), 8)


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16"]
)  # the last two are those of Windows
def test_a_file_loads(tmp_path, encoding):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "# größer\nalgorithm: hierarchical\ngroups: [[0, 1], [2]]\nedges: off\n",
        encoding=encoding,
    )
    expected = Strategy("hierarchical", groups=((0, 1), (2,)), edges=False)
    assert Strategy.load(str(path)) == strategy_from(path) == expected


@pytest.mark.parametrize(
    "content, expected",
    [
        ("algoritm: flat", "unexpected keyword argument 'algoritm'"),
        ("algorithm: hierarchic", "algorithm='hierarchic': expected one of "),
        ("algorithm: [flat]", "algorithm=['flat']: expected one of"),
        ("- flat", "must be a mapping, not list"),
        ("algorithm: [", "line 1, column 13"),
        ("chunk_bytes: -1", "chunk_bytes=-1: expected a whole number of 0 or more"),
        ("chunk_bytes: 4095", "chunk_bytes=4095: expected 0, or 4096 or more"),
        ("chunks: 0", "chunks=0: expected a whole number of 1 or more"),
        ("chunks: 8\nchunk_bytes: 4096", "chunks=8: expected no chunk_bytes"),
        ("chunk_bytes: 10MB", "chunk_bytes='10MB': expected"),
        ("main: true", "main=True: expected"),
        ("1: flat", "keywords must be strings"),
        ("wire_dtype: float8", "wire_dtype='float8': expected one of "),
        ("sparse: maybe", "sparse='maybe': expected one of auto, rows, dense"),
        ("missing: [zeros]", "missing=['zeros']: expected one of"),
        ("edges: none", "edges='none': expected one of True, False"),
        ("edges: 2", "edges=2: expected one of True, False"),
        ("edges:", "edges=None: expected one of True, False"),
        ("algorithm: hierarchical\ngroups: [0, 1]", "groups=[0, 1]: expected tuples of towers"),
    ],
)
def test_an_invalid_file_is_an_error_of_one_line_that_names_it(tmp_path, content, expected):
    path = tmp_path / "mine.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(HierAllreduceError) as caught:
        Strategy.load(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and expected in text and "\n" not in text


def test_a_large_value_is_shown_in_part(tmp_path):
    path = tmp_path / "large.yaml"
    groups = str([[0] * 1000])
    for algorithm in ("tree", "hierarchical", groups):
        path.write_text(f"algorithm: {algorithm}\ngroups: {groups}", encoding="utf-8")
        with pytest.raises(HierAllreduceError) as caught:
            plan_for(Strategy.load(path), 4)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "value, expected",
    [
        ("tensorpak", "neither a file nor one of the strategies; there are "),
        (3, "algorithm=3: expected one of auto, flat, "),
    ],
)
def test_an_invalid_argument_is_an_error_that_names_the_right_one(value, expected):
    with pytest.raises(HierAllreduceError) as caught:
        strategy_from(value)
    assert expected in str(caught.value)


def test_groups_of_groups_are_an_error():
    with pytest.raises(HierAllreduceError, match=r"^groups=.*expected tuples"):
        Strategy("hierarchical", groups=[[[0], 1]])  # type: ignore[arg-type, list-item]


def test_numbers_of_numpy_are_numbers():
    numbers: Any = np.arange(4)
    strategy = Strategy(
        "hierarchical", chunk_bytes=numbers[3] << 12, main=numbers[2], groups=numbers.reshape(2, 2)
    )
    assert strategy == Strategy("hierarchical", 3 << 12, ((0, 1), (2, 3)), 2)
    assert {type(number) for group in strategy.groups or () for number in group} == {int}


def test_a_name_or_nothing_is_a_strategy():
    assert strategy_from(None) == Strategy() and strategy_from("tree") == Strategy(algorithm="tree")
    function: Any = flat
    assert strategy_from(function) == Strategy(flat)


# ---- the plan that a strategy selects ------------------------------------------------------------

MIB = 1 << 20


PACKED = int(0.4 * 4 * MIB)


@pytest.mark.parametrize(
    "strategy, on_cpu, expected",
    [
        (Strategy(), False, ("flat_hierarchical", 4 * MIB, PACKED, False, True)),
        (Strategy(), True, ("flat", 10 * MIB, 64 << 10, True, False)),
        (Strategy("tree"), True, ("tree", 10 * MIB, 64 << 10, True, False)),
        (Strategy("tree", chunk_bytes=0), True, ("tree", 0, 0, False, False)),
        (Strategy(chunk_bytes=MIB), False, ("flat_hierarchical", MIB, MIB, False, False)),
        (Strategy("flat"), False, ("flat", 4 * MIB, PACKED, False, True)),
        (Strategy(tree, chunk_bytes=0), True, ("tree", 0, 0, False, False)),
    ],
)
def test_a_strategy_selects_a_plan(strategy, on_cpu, expected):
    plan = plan_for(strategy, 8, on_cpu)
    found = (plan.algorithm, plan.chunk_bytes, plan.pack_below, plan.whole, plan.tapers)
    assert found == expected


@pytest.mark.parametrize("towers", [2, 3, 4, 5, 6, 8])
def test_five_towers_or_more_copy_back_through_two_groups(towers):
    plan = plan_for(Strategy(), towers)
    assert plan.algorithm == ("flat_hierarchical" if towers >= 5 else "flat")
    assert (plan.chunk_bytes, plan.whole) == (4 * MIB, False)


@pytest.mark.parametrize("value, edges", [(0, False), (1, True), (np.bool_(False), False)])
def test_edges_are_a_switch(value, edges):
    assert Strategy(edges=value).edges is edges


@pytest.mark.parametrize("algorithm", ["auto", *BY_NAME, tree])
def test_one_main_has_all_sums(algorithm):
    plan = plan_for(Strategy(algorithm, main=3), 8)
    assert [root_of(schedule) for schedule in plan.schedules] == [3]


@pytest.mark.parametrize(
    "strategy, message",
    [
        (
            Strategy("tree", main=4),
            r"main=4: expected one of the roots of tree: \[0, 1, 2, 3\]",
        ),
        (Strategy("hierarchical", groups=((0, 1), (2,))), "expected each of towers 0 to 3 once"),
        (Strategy("tree", groups=((0, 1), (2, 3))), r"^tree\(4, 0\): .*argument 'groups'"),
        (Strategy(groups=((0, 1), (2, 3))), r"^flat\(4, 0\): .*argument 'groups'"),
        (Strategy(lambda towers, chunk: []), r"^<lambda>\(4, 0\): "),
    ],
)
def test_choices_that_do_not_fit_the_towers_are_an_error(strategy, message):
    with pytest.raises(HierAllreduceError, match=message):
        plan_for(strategy, 4)


def test_groups_of_a_user_are_kept():
    plan = plan_for(Strategy("hierarchical", groups=((0, 2), (1, 3))), 4)
    assert {step.srcs for step in plan.schedules[0][:2]} <= {(0,), (1,), (2,), (3,)}
    assert len(plan.schedules[0]) == 6


@pytest.mark.parametrize("algorithm", ["auto", *BY_NAME])
@pytest.mark.parametrize("towers", [2, 3, 5, 16, 24])
def test_any_number_of_towers_has_a_plan_of_any_name(algorithm, towers):
    fits(plan_for(Strategy(algorithm), towers), towers)


def test_one_tower_has_nothing_to_do():
    assert plan_for(Strategy(), 1).schedules == ((),)
    assert schedules_of(flat, 1) == ((),)


def test_chunks_of_a_function_take_their_own_steps_also_if_some_are_equal():
    """Three of four chunks go to tower 0."""
    uneven = lambda towers, chunk: flat(towers, 0 if chunk < 3 else 1)  # noqa: E731
    assert list(map(root_of, plan_for(Strategy(uneven), 4).schedules)) == [0, 0, 0, 1]


def test_numbers_of_numpy_are_numbers_of_towers():
    numbers = list(np.arange(3))

    def numpy_flat(devices, chunk):
        return [
            step._replace(dst=numbers[step.dst])  # type: ignore[arg-type]
            for step in flat(devices, chunk)
        ]

    assert plan_for(Strategy(numpy_flat), 3).schedules == schedules_of(flat, 3)
