"""``tune``: its candidates, its verdict under noise, the file that it writes, and one small search."""

from types import SimpleNamespace

import pytest
import tensorflow as tf
from helpers.graphs import cpus, tf1

from hier_allreduce import Strategy, allreduce_grads, bench, tune
from hier_allreduce.bench import load_model, session
from hier_allreduce.cli import main
from hier_allreduce.errors import HierAllreduceError
from hier_allreduce.tuning import save_shapes, search
from hier_allreduce.tuning.backward import STAGES, Backward
from hier_allreduce.tuning.candidates import DEFAULT, Candidate, combined, first_candidates
from hier_allreduce.tuning.tuned import Duel, Row, Tuned, median_interval


def test_each_candidate_differs_from_all_others():
    found = first_candidates(["dgx-1v"], ["bfloat16"])
    assert found[DEFAULT] == Candidate(Strategy())
    assert len(set(map(repr, found.values()))) == len(found)
    named = {"algorithm=tree", "splits=8", "wire_dtype=bfloat16", "ring for dgx-1v", "auto for dgx-1v, idle"}
    assert named <= set(found)
    with pytest.raises(HierAllreduceError, match="no-such"):
        first_candidates(["no-such-machine"])


def test_the_best_choices_are_combined_unless_they_contradict():
    found = first_candidates(["dgx-1v"])
    best = {name: found[name] for name in ("splits=8", "mains=0", "mains=rotate", "auto for dgx-1v", DEFAULT)}
    together = combined(best)
    assert set(together) == {"splits=8, mains=0", "splits=8, mains=rotate"}
    assert together["splits=8, mains=0"].choices() == {"splits": 8, "mains": 0}
    over_lanes = first_candidates(["dgx-1v"], lanes=2)
    assert over_lanes["lanes=2"] == Candidate(Strategy(), 2)
    assert over_lanes["ring for dgx-1v, lanes=2"] == Candidate(Strategy("ring", "dgx-1v"), 2)
    best = {name: over_lanes[name] for name in ("splits=8", "lanes=2", "ring for dgx-1v, lanes=2")}
    assert set(combined(best)) == {"splits=8, lanes=2"}
    assert combined(best)["splits=8, lanes=2"] == Candidate(Strategy(splits=8), 2)


def test_the_interval_of_a_median_is_that_of_the_sign_test():
    assert median_interval([3, 1, 2]) == (0, 2, float("inf"))  # of three ratios none has 95 %
    assert median_interval([6, 5, 4, 3, 2, 1]) == (1, 3.5, 6)
    # of 20, the tables of the sign test have the 6th and the 15th
    assert median_interval(range(1, 21)) == (6, 10.5, 15)


@pytest.mark.parametrize(
    "ratios, won",
    [
        ([0.9] * 11, True),
        ([0.9] * 5, False),  # too few to be sure
        ([0.8, 1.2] * 10 + [0.9], False),  # noise
        ([0.995] * 30, False),  # sure, but not worth it
        ([1.1] * 30, False),
    ],
)
def test_only_a_sure_win_replaces_the_default(ratios, won):
    assert Duel("x", tuple(ratios)).won is won


def tuned(strategy, name):
    rows = (Row(name, 5, 1.5, 0.75), Row(DEFAULT, 5, 2.0, 1.0))
    return Tuned(strategy, name, rows, (Duel(name, (0.75,) * 11),), ("2 gradients",), 1.0)


def test_the_file_is_a_strategy_with_the_table_as_comments(tmp_path):
    path, chosen = tmp_path / "best.yaml", Strategy(splits=8, mains=0, wire_dtype="bfloat16")
    tuned(chosen, "splits=8, mains=0").write(str(path))
    assert Strategy.load(str(path)) == chosen
    text = path.read_text(encoding="utf-8")
    for part in ("# candidate", "0.750", "500 ms", "faster in 11 of 11 rounds", "# use splits=8, mains=0"):
        assert part in text
    tuned(Strategy(), DEFAULT).write(str(path))
    assert Strategy.load(str(path)) == Strategy()
    assert "keep the default" in path.read_text(encoding="utf-8")
    with pytest.raises(HierAllreduceError, match="nowhere"):
        tuned(chosen, "x").write(str(tmp_path / "nowhere" / "best.yaml"))


# ---- a search ------------------------------------------------------------------------------------------


@pytest.fixture
def gradients():
    """Two towers' (gradient, variable) pairs: dense, sparse, and a variable without a gradient."""
    rows = []
    with tf.Graph().as_default():
        for tower in range(2):
            with tf1.variable_scope(f"tower{tower}"):
                w, table, unused = (
                    tf1.get_variable(name, shape, use_resource=True)
                    for name, shape in (("w", [3, 5]), ("t", [7, 2]), ("u", []))
                )
            slices = tf.IndexedSlices(tf.ones([4, 2]), tf.range(4))
            rows.append([(tf.ones([3, 5]), w), (slices, table), (None, unused)])
        yield rows


def test_a_models_gradients_become_a_table(gradients, tmp_path):
    path = str(tmp_path / "mine.tsv")
    save_shapes(gradients, path)
    shapes = load_model(path)
    assert [(shape.name, shape.shape, shape.dtype, shape.sparse) for shape in shapes] == [
        ("w", (3, 5), "float32", False),
        ("t", (7, 2), "float32", True),
    ]
    unknown = tf1.placeholder(tf.float32, [None, 2], "unknown")
    for wrong, part in (
        ([[unknown]], "unknown: the shape"),
        ([], "expected K rows"),
        ([[tf.constant("a")]], "dtype string"),
    ):
        with pytest.raises(HierAllreduceError, match=part):
            save_shapes(wrong, path)


def test_gradients_become_ready_one_after_another(monkeypatch):
    """The last variable's first: its stage is the first product, the first variable's the last."""
    monkeypatch.setattr("hier_allreduce.tuning.backward._calibrated", lambda case, seconds: 8)
    case = bench.Case(load_model("vgg16"), tuple(cpus(2)))
    with tf.Graph().as_default():
        (row, _) = Backward(case, 0.1).gate([[tf.ones([]) for _ in case.shapes]] * 2)
        products = [grad.op.control_inputs[0] for grad in row]
        depth = {op: n for n, op in enumerate(_chain(products[0]))}
    stages = [STAGES - 1 - depth[product] for product in products]
    assert stages[0] == STAGES - 1 and stages[-1] == 0 and stages == sorted(stages, reverse=True)


def _chain(op):
    while op.type == "MatMul":
        yield op
        op = op.inputs[0].op


@pytest.fixture
def search_among(monkeypatch):
    """Let a search try only these candidates: its steps are real, their times made up; those not given take 4 s."""

    def search_among(names, seconds):
        def in_turn(steps, rounds, warm_up, tick):
            for step in steps.values():
                step()
            return {name: [seconds.get(name, 4.0)] * rounds for name in steps}

        monkeypatch.setattr(search, "in_turn", in_turn)
        monkeypatch.setattr(
            search, "first_candidates", lambda *choices: {name: first_candidates(*choices)[name] for name in names}
        )

    return search_among


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "mine.tsv"
    path.write_text("name\tshape\tdtype\na\t30,40\tfloat32\nb\t50\tfloat32\n")
    return str(path)


def test_a_search_keeps_what_is_surely_faster(tmp_path, search_among, table):
    """splits=8 takes half of the default's time, mains=0 almost that."""
    names = (DEFAULT, "splits=8", "mains=0", "algorithm=tree")
    search_among(names, {"baseline": 1.0, "splits=8": 2.0, "mains=0": 2.2, "splits=8, mains=0": 1.8})
    path = str(tmp_path / "best.yaml")
    found = tune(table, cpus(3), backward_ms=0, minutes=0.1, file=path)
    assert found.name == "splits=8, mains=0" and found.strategy == Strategy(splits=8, mains=0)
    assert {row.name for row in found.rows} == {*names, "splits=8, mains=0"}
    assert [row.ratio for row in found.rows][:2] == [0.45, 0.5]
    assert Strategy.load(path) == found.strategy
    with tf.Graph().as_default() as graph:
        values = [[tf.ones([2])] for _ in range(3)]
        reduced = allreduce_grads(values, cpus(3), strategy=path)
        with session(graph, bench.Case(load_model(table), tuple(cpus(3)))) as sess:
            assert sess.run(reduced[2][0]).tolist() == [3, 3]


@pytest.mark.parametrize("building", [10, 200])
def test_a_search_takes_the_minutes_that_it_was_given(monkeypatch, building):
    """Each graph takes ``building`` seconds, each step one; where building takes them all, few rounds are left."""
    now, rounds_taken = [1000.0], []
    names = (DEFAULT, "splits=8", "mains=0", "pack_below=0", "algorithm=tree")
    monkeypatch.setattr(search, "first_candidates", lambda *_: {name: first_candidates()[name] for name in names})

    def in_turn(steps, rounds, warm_up, tick):
        now[0] += (rounds + warm_up) * len(steps)
        rounds_taken.append(rounds)
        return {name: [1.0] * rounds for name in steps}

    def built(contender, case):
        now[0] += building
        return tf.no_op()

    monkeypatch.setattr(search, "in_turn", in_turn)
    monkeypatch.setattr(search, "consumed", built)
    monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=lambda: now[0]))
    tune("mobilenet_v2", cpus(2), backward_ms=0, minutes=10)
    if building == 10:
        assert 590 <= now[0] - 1000 <= 602
    else:
        assert set(rounds_taken) == {1, search._FEWEST, search._DUEL_FEWEST}


def test_strategies_are_tried_over_lanes(monkeypatch, search_among, table):
    """The default over two lanes takes half of the time."""
    search_among((DEFAULT, "lanes=2"), {"lanes=2": 2.0})
    graphs = []

    def session_of(graph, case):
        graphs.append(graph)
        return session(graph, case)

    monkeypatch.setattr(search, "session", session_of)
    found = tune(table, cpus(3), backward_ms=0, minutes=0.1, lanes_per_gpu=2)
    assert (found.name, found.strategy, found.lanes_per_gpu) == ("lanes=2", Strategy(), 2)
    assert "also give lanes_per_gpu=2" in found.yaml()
    places = {op.device for graph in graphs for op in graph.get_operations() if op.type in ("AddN", "AddV2", "Add")}
    assert any(place.endswith(("CPU:3", "CPU:4")) for place in places)  # the first tower's lanes


@pytest.mark.parametrize(
    "how, part",
    [
        ({"minutes": -1}, "minutes=-1"),
        ({"backward_ms": float("nan")}, "backward_ms=nan"),
        ({"devices": ["/cpu:0"]}, "two or more"),
    ],
)
def test_invalid_numbers_are_refused(how, part):
    with pytest.raises(HierAllreduceError, match=part):
        tune("resnet50", **{"devices": cpus(2), **how})


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path):
    with pytest.raises(HierAllreduceError, match=r"file='.*best.yaml' cannot be written: there is no folder"):
        tune("no-such-table", cpus(2), file=str(tmp_path / "nowhere" / "best.yaml"))


@pytest.mark.parametrize("options", [["--minutes", "0"], ["--backward-ms", "-1"], ["--lanes", "-1"], ["--lanes", "17"]])
def test_invalid_options_are_refused(options, capsys):
    with pytest.raises(SystemExit):
        main(["tune", *options])
    assert "tune: error" in capsys.readouterr().err
