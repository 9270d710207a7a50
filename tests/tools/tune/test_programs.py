"""Programs with TensorFlow under ``tune``: sessions, tensorpack, Keras, eager steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.graphs import IS_TF2

from hier_allreduce import Strategy
from hier_allreduce_tools.tune.candidates import BASELINES, CURRENT
from hier_allreduce_tools.tune.inside import sitecustomize
from hier_allreduce_tools.tune.journal import append, lines_in
from hier_allreduce_tools.tune.run import training_in

EXAMPLES = Path(__file__).parents[3] / "examples"
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
    again = hier_allreduce.allreduce_grads([row[:1] for row in sums], devices, strategy=strategy)
    with tf1.Session(config=tf1.ConfigProto(device_count={"CPU": len(devices)})) as session:
        values = [[float(value[0]) for value in row] for row in session.run(again)]
        session.run(sums[0][0])
print(json.dumps([values, hier_allreduce.all_reduces(graph)[0].algorithm]))

if tf.__version__ >= "2":
    def step(value):
        return hier_allreduce.allreduce_grads([[value], [value]], ["/cpu:0", "/cpu:0"])[0][0]

    for number in range(4):
        assert float(tf.function(step)(tf.constant([1.0] * 3))[0]) == 2.0
        assert float(step(tf.constant([1.0] * 4))[0]) == 2.0
"""


@pytest.fixture
def run(tmp_path):
    """``run(…)``: PROGRAM's output, and what it tells ``tune``."""

    def run(program=PROGRAM, towers=3, strategy='"flat"', **changes):
        journal = tmp_path / f"journal-{len(list(tmp_path.iterdir()))}"
        append(journal, {})
        request = {"journal": str(journal), "candidate": "", "changes": changes}
        folders = [str(Path(path).absolute()) for path in filter(None, sys.path)]
        environment = {
            **os.environ,
            sitecustomize.VARIABLE: json.dumps(request),
            "PYTHONPATH": os.pathsep.join([os.path.dirname(sitecustomize.__file__), *folders]),
        }
        done = subprocess.run(
            [sys.executable, "-c", program.replace('"flat"', strategy), str(towers)],
            env=environment,
            capture_output=True,
        )
        lines = lines_in(journal)[1:]
        output = json.loads(done.stdout) if done.returncode == 0 else done.stderr.decode()
        return output, lines

    return run


def test_each_sum_has_its_bytes_and_its_steps(run):
    output, lines = run()
    assert output == [[[9.0]] * 3, "flat"]
    bytes_by_sum = {line["sum"]: line["built"]["bytes"] for line in lines if "built" in line}
    timed = [line["sum"] for line in lines if line.get("time", 0) > 0]
    found = [(size, timed.count(sum_name)) for sum_name, size in bytes_by_sum.items()]
    # two sums in a graph; a step in four functions, each traced once; a step that runs eagerly
    assert found[:2] == [(8, 2), (4, 1)]
    built, times = training_in(lines)
    if IS_TF2:
        assert sorted(found[2:]) == [(12, 4), (16, 4)]
        assert built["bytes"] == 16 and len(times) == 4
    assert built["front_end"] == "towers"


def test_a_candidate_changes_the_plan_and_tells_its_strategy(run):
    own = 'hier_allreduce.Strategy("flat", sparse="rows")'
    output, lines = run(strategy=own, algorithm="tree")
    assert output == [[[9.0]] * 3, "tree"]
    strategies = [line["built"]["strategy"] for line in lines if "built" in line]
    assert Strategy(**strategies[0]) == Strategy("tree", sparse="rows")


def test_a_function_of_the_program_is_told_by_its_text(run):
    strategy = (
        "hier_allreduce.Strategy(algorithm=lambda towers, chunk:"
        " [hier_allreduce.Reduce((1,), 0), hier_allreduce.Copy(0, 1)])"
    )
    output, lines = run(towers=2, strategy=strategy)
    assert output[0] == [[4.0]] * 2
    assert lines[0]["built"]["strategy"]["algorithm"].startswith("<function <lambda> at ")


SEVERAL_HOSTS = """
import hier_allreduce, tensorflow as tf
with tf.Graph().as_default():
    cluster = hier_allreduce.Cluster(["localhost:1", "localhost:2"], 0)
    hier_allreduce.allreduce_grads([[tf.constant(1.0)]], ["/cpu:0"], cluster=cluster)
"""


def test_several_hosts_are_not_measured(run):
    error, _ = run(SEVERAL_HOSTS)
    assert "ClusterError: tune measures one host, and this program has 2" in error


TWO_EQUAL = """
import hier_allreduce, tensorflow as tf
with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    rows = [[tf.constant([1.0, 2.0])]] * 2
    sums = [hier_allreduce.allreduce_grads(rows, ["/cpu:0", "/cpu:0"])[0][0] for _ in range(2)]
    for _ in range(5):
        session.run(sums)
print(0)
"""


def test_two_equal_sums_in_a_step_are_one_step(run):
    _, lines = run(TWO_EQUAL)
    assert len(training_in(lines)[1]) == 5


SPARSE = """
import hier_allreduce, tensorflow as tf, json
devices = ["/cpu:0", "/cpu:0"]
with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    rows = tf.IndexedSlices(tf.constant([[1.0]]), tf.constant([2]), tf.constant([3, 1]))
    sums = hier_allreduce.allreduce_grads([[None, rows]] * 2, devices, strategy="flat")
    none = hier_allreduce.allreduce_grads([[None]] * 2, devices)
    print(json.dumps(session.run(sums[0][1]).indices.tolist()))
"""


def test_a_sparse_gradient_stays_sparse_and_rows_without_any_have_no_steps(run):
    indices, lines = run(SPARSE, strategy='hier_allreduce.Strategy("flat", sparse="rows")')
    built, times = training_in(lines)
    assert indices == [2] and len(times) == 1 and built["bytes"] == 4


def test_a_program_that_sets_the_variable_itself_is_as_it_is():
    environment = {**os.environ, sitecustomize.VARIABLE: "1"}
    command = [sys.executable, "-c", PROGRAM, "3"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE)
    assert done.returncode == 0 and json.loads(done.stdout) == [[[9.0]] * 3, "flat"]


@pytest.fixture
def measured(runner, tmp_path, monkeypatch):
    """``measured(baseline, example, …)`` runs an example as it is and with a baseline."""

    def measured(baseline, name, *arguments):
        folders = [str(Path(folder).absolute()) for folder in filter(None, sys.path)]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
        monkeypatch.chdir(tmp_path)
        command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
        runs = runner(command, patience=100.0, seconds=750.0)
        current = runs.run(CURRENT, 0)
        assert current is not None and not current.fault and current.step > 0
        other = runs.run(baseline, 1)
        assert baseline in BASELINES and other is not None
        assert not other.fault and other.step > 0
        assert other.bytes == current.bytes
        return current

    return measured


def test_towers(measured):
    run = measured("tower-0-sum", "towers", "--devices", "3", "--steps", "60")
    assert (run.front_end, run.update, run.towers) == ("towers", "replicated", 3)


@pytest.mark.parametrize("baseline", ["tensorpack-cpu", "tensorpack-gpu"])
def test_tensorpack(measured, baseline):
    if IS_TF2:
        pytest.importorskip("tf_keras")
    arguments = ("tensorpack_resnet", "--devices", "2", "--steps", "60", *SMALL)
    run = measured(baseline, *arguments)
    assert (run.front_end, run.update, run.towers) == ("tensorpack", "replicated", 2)


def test_tensorpacks_hierarchical_mode_with_8_towers(measured):
    if IS_TF2:
        pytest.importorskip("tf_keras")
    arguments = ("tensorpack_resnet", "--devices", "8", "--steps", "60", *SMALL)
    assert measured("tensorpack-hierarchical", *arguments).towers == 8


@pytest.mark.tf2
@pytest.mark.parametrize("baseline", ["ReductionToOneDevice", "HierarchicalCopyAllReduce"])
def test_keras(measured, baseline):
    run = measured(baseline, "keras_mirrored", "--devices", "2", "--epochs", "3")
    assert (run.front_end, run.update, run.towers) == ("keras", "", 2)
