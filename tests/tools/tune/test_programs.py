"""The examples under ``tune``: a clock op a step in sessions, tensorpack and Keras."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.graphs import IS_TF2

from hier_allreduce import ClusterError, Strategy
from hier_allreduce_tools.tune.candidates import Candidate, candidates_for, strategies_for
from hier_allreduce_tools.tune.faults import NothingMeasured
from hier_allreduce_tools.tune.observer import VARIABLE
from hier_allreduce_tools.tune.protocol import ProgramFacts, Request
from hier_allreduce.graph.measuring import Measurement, measurement

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--blocks", "1", "--channels", "4", "--batch", "2")


PROGRAM = """
import json, sys
import tensorflow as tf
import hier_allreduce

tf1, devices = tf.compat.v1, [f"/cpu:{k}" for k in range(int(sys.argv[1]))]
with tf.Graph().as_default() as graph:
    grads = [[tf.constant([1.0]), tf.constant([2.0])] for _ in devices]
    strategy = "flat"
    sums = hier_allreduce.allreduce_grads(grads, devices, strategy=strategy)
    again = hier_allreduce.allreduce_grads(sums, devices, strategy=strategy)
    with tf1.Session(config=tf1.ConfigProto(device_count={"CPU": len(devices)})) as session:
        values = [[float(value[0]) for value in row] for row in session.run(again)]
        session.run(sums[0][0])
types = [op.type for op in graph.get_operations()]
print(json.dumps([values, types.count("Timestamp")]))

if tf.__version__ >= "2":
    @tf.function
    def step(value):
        return hier_allreduce.allreduce_grads([[value], [value]], ["/cpu:0", "/cpu:0"])[0][0]

    for number in range(4):
        assert float(step(tf.constant(1.0))) == 2.0
"""


@pytest.fixture
def run(tmp_path, runner):
    """``run(strategies, **changes)``: PROGRAM's output, the facts, the lines of its clock."""
    runner([])  # writes the file that Python runs first
    (observer,) = tmp_path.glob("outputs-*/observer")

    def run(strategies=None, towers=3, setting=None, strategy='"flat"', **changes):
        clock = tmp_path / "clock"
        setting = setting or Request("", changes, str(clock), strategies or {}).text
        path = os.pathsep.join([str(observer), *filter(None, sys.path)])
        environment = {**os.environ, VARIABLE: setting, "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.replace('"flat"', strategy), str(towers)],
            env=environment,
            capture_output=True,
        )
        if done.returncode:
            return done.stderr.decode()
        lines = clock.read_text().splitlines()
        return json.loads(done.stdout), ProgramFacts.read(str(clock)), lines

    return run


def test_in_other_programs_the_hook_changes_nothing():
    assert type(measurement()) is Measurement
    rows = [(1.0, None)]
    assert measurement().reduced(rows) is rows and measurement().baseline("keras") == ""


def test_the_first_allreduce_of_a_graph_has_the_clock(run):
    (values, clocks), facts, lines = run()
    assert values == [[9.0, 18.0]] * 3 and clocks == 1 and facts.towers == 3
    # a line for each of two steps, also if a step needs one sum only, and for each of four calls
    assert len(lines) == (6 if IS_TF2 else 2)


def test_a_candidate_changes_the_plan(run):
    (values, _), tree, _ = run(algorithm="tree")
    assert values == [[9.0, 18.0]] * 3
    _, flat, _ = run()
    assert flat.plan != tree.plan


def test_the_first_run_tells_the_plans_of_the_candidates(run):
    strategies = strategies_for(["flat", "tree", "hierarchical", "hierarchical-nvlink"], None)
    _, facts, _ = run(strategies, towers=2)
    # there are no groups along NVLink, and on two towers a tree has the steps of flat
    assert sorted(facts.plans) == ["flat", "hierarchical", "tree"]
    assert facts.plan == facts.plans["flat"] == facts.plans["tree"] != facts.plans["hierarchical"]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ('sparse="rows"', {"sparse": "rows"}),
        (
            '"hierarchical", 4096, ((0, 2), (1, 3)), edges=False',
            {
                "algorithm": "hierarchical",
                "chunk_bytes": 4096,
                "groups": [[0, 2], [1, 3]],
                "edges": False,
            },
        ),
        ("hier_allreduce.planning.algorithms.tree, main=1", {"algorithm": None, "main": 1}),
    ],
)
def test_the_programs_own_choices_are_told(run, options, kept):
    _, facts, _ = run(towers=4, strategy=f"hier_allreduce.Strategy({options})")
    assert facts.kept == kept


def test_a_variable_that_is_not_of_tune_is_named(run):
    assert f"HierAllreduceError: {VARIABLE}='1': `hier-allreduce tune` sets" in run(setting="1")


def test_a_program_that_sets_the_variable_itself_is_as_it_is():
    environment = {**os.environ, VARIABLE: "1"}
    command = [sys.executable, "-c", PROGRAM, "3"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE)
    assert done.returncode == 0 and json.loads(done.stdout)[1] == 0


@pytest.fixture
def hooked(tmp_path):
    """The hook of a measured program, in this process but not used by it."""
    from hier_allreduce_tools.tune.inside import MeasuredProgram

    return MeasuredProgram(Request("", {"algorithm": "tree"}, str(tmp_path / "clock")))


def test_a_sparse_gradient_waits_for_the_clock_and_stays_sparse(hooked, tmp_path):
    import tensorflow as tf

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        rows = tf.IndexedSlices(tf.constant([[1.0]]), tf.constant([2]), tf.constant([3, 1]))
        ((_, timed),) = hooked.reduced([(None, rows)])
        assert session.run([timed.values, timed.indices])[1] == [2]
    assert len((tmp_path / "clock").read_text().split()) == 1


def test_rows_without_a_gradient_have_no_clock(hooked):
    assert hooked.reduced([(None,), (None,)]) == [(None,), (None,)]


def test_several_hosts_are_not_measured(hooked):
    assert hooked.strategy(Strategy(sparse="dense"), 1) == Strategy("tree", sparse="dense")
    with pytest.raises(ClusterError, match="tune measures one host, and this program has 2"):
        hooked.strategy(Strategy(), 2)


def test_of_two_allreduces_the_larger_one_is_told(run):
    _, facts, _ = run()
    assert facts.bytes == 8  # two gradients of one float32


@pytest.fixture
def measured(runner, tmp_path, monkeypatch):
    """``measured(baseline, example, …)`` runs an example as it is and with a baseline."""

    def measured(baseline, name, *arguments):
        monkeypatch.chdir(tmp_path)
        command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
        runs = runner(command, patience=100.0, seconds=750.0)
        as_it_is = runs.run(Candidate(), 0.0, 0, strategies_for([], None))
        assert not as_it_is.fault and as_it_is.seconds
        (candidate,), _ = candidates_for(as_it_is.facts, {}, [baseline])
        other = runs.run(candidate, 0.0, 1)
        assert not other.fault and other.seconds
        return as_it_is.facts

    return measured


def test_towers(measured):
    facts = measured("tower-0-sum", "towers", "--devices", "3", "--steps", "60")
    assert (facts.front_end, facts.towers, facts.gpus) == ("towers", 3, False)
    assert facts.plan == facts.plans["auto"]
    assert facts.cost.startswith("step ") and " ms; after the pass " in facts.cost


def test_tensorpack(measured):
    if IS_TF2:
        pytest.importorskip("tf_keras")
    arguments = ("tensorpack_resnet", "--devices", "2", "--steps", "60", *SMALL)
    facts = measured("tensorpack-cpu", *arguments)
    assert (facts.front_end, facts.update, facts.towers) == ("tensorpack", "replicated", 2)
    assert facts.cost.startswith("step ")


WITH_A_QUEUE = """
import os, sys, threading
import tensorflow as tf
import hier_allreduce

tf1, devices = tf.compat.v1, [f"/cpu:{k}" for k in range(4)]
with tf.Graph().as_default():
    queue = tf1.FIFOQueue(1, tf.float32, [[10]])
    enqueue = queue.enqueue(tf.random.uniform([10]))
    grads = [[queue.dequeue()] for _ in devices]
    sums = hier_allreduce.allreduce_grads(grads, devices)
    with tf1.Session(config=tf1.ConfigProto(device_count={"CPU": 4})) as session:
        def fill():
            try:
                for _ in range(240):
                    session.run(enqueue)  # waits while the queue is full
            except tf.errors.OpError as error:
                print(error, file=sys.stderr)
                os._exit(1)

        threading.Thread(target=fill).start()
        for _ in range(60):
            session.run(sums)
"""


def test_only_the_step_is_traced_while_a_thread_fills_a_queue(runner, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(WITH_A_QUEUE)
    run = runner([sys.executable, str(path)]).run(Candidate(), 0.0, 0, {})
    assert not run.fault and run.facts.cost.startswith("step ")


@pytest.mark.tf2
def test_keras(measured):
    facts = measured("ReductionToOneDevice", "keras_mirrored", "--devices", "2", "--epochs", "3")
    assert (facts.front_end, facts.towers) == ("keras", 2)
    assert not facts.cost  # a function has no trace


UNCHANGED = """
import tensorflow as tf

with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    value = tf.random.uniform([1000, 1000])
    product = tf.linalg.matmul(value, value)
    while True:
        session.run(product)
"""


def test_tensorflow_is_seen_in_a_program_without_ours(rounds, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(UNCHANGED)
    with pytest.raises(NothingMeasured, match="TensorFlow runs, but no all-reduce"):
        rounds([sys.executable, str(path)], seconds=250.0).run_all()
