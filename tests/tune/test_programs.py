"""The examples under ``tune``: one clock op a step in sessions, tensorpack and Keras, and each candidate trains."""

import contextlib
import itertools
import sys
from pathlib import Path

import pytest
import tensorflow as tf
from helpers.graphs import IS_TF2

import hier_allreduce
from hier_allreduce import tune, tuned
from hier_allreduce.tuned import Candidate

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--blocks", "1", "--channels", "4", "--batch", "2")


@pytest.fixture
def candidate(tmp_path, monkeypatch):
    """A candidate that is measured in this process."""
    candidate = Candidate("now", clock=str(tmp_path / "clock"))
    monkeypatch.setenv(tuned.VARIABLE, candidate.as_text())
    tuned.tuned.cache_clear()
    yield candidate
    tuned.tuned.cache_clear()


def ops_of(average=False):
    """Return the types of the ops of a sum over three towers, whose results are right."""
    with tf.Graph().as_default():
        devices = [f"/cpu:{k}" for k in range(3)]
        sums = hier_allreduce.allreduce_grads(
            [[tf.constant([1.0]), tf.constant([2.0])]] * 3, devices
        )
        again = hier_allreduce.allreduce_grads(sums, devices)
        with tf.compat.v1.Session(
            config=tf.compat.v1.ConfigProto(device_count={"CPU": 3})
        ) as session:
            assert [float(value[0]) for row in session.run(again) for value in row] == [
                9.0,
                18.0,
            ] * 3
            session.run(sums[0][0])
        return [op.type for op in session.graph.get_operations()]


def test_nothing_differs_without_the_variable():
    assert not {"Timestamp", "PrintV2"} & set(ops_of())


def test_the_first_allreduce_of_a_graph_has_the_clock(candidate):
    assert ops_of().count("Timestamp") == 1
    assert (
        len(Path(candidate.clock).read_text().splitlines()) == 2
    )  # one for every step, also with a part of the sums
    assert tuned.read_facts(candidate.clock)["towers"] == 3


def test_a_candidate_changes_the_strategy(monkeypatch, candidate):
    before = ops_of().count("AddN")
    monkeypatch.setenv(tuned.VARIABLE, candidate._replace(changes={"algorithm": "ring"}).as_text())
    tuned.tuned.cache_clear()
    assert ops_of().count("AddN") != before


@pytest.mark.tf2
def test_a_function_has_one_line_a_step(candidate):
    @tf.function
    def step(value):
        return hier_allreduce.allreduce_grads([[value], [value]], ["/cpu:0", "/cpu:1"])[0][0]

    assert [float(step(tf.constant(float(number)))) for number in range(4)] == [0.0, 2.0, 4.0, 6.0]
    assert len(Path(candidate.clock).read_text().splitlines()) == 4


def measured(tmp_path, monkeypatch, only, name, *arguments):
    """Return {candidate: number of windows} of an example's first two runs, and the facts of the first."""
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    with contextlib.closing(tune.measure_all(command, 1.0, 60.0, only, tmp_path)) as measured:
        runs = list(itertools.islice(measured, 2))
    assert not any(run.fault for run in runs), runs
    return {run.candidate.name: len(run.seconds) for run in runs}, runs[0].facts


def test_towers(tmp_path, monkeypatch):
    found, facts = measured(
        tmp_path, monkeypatch, ["tower-0-sum"], "towers", "--devices", "3", "--steps", "60"
    )
    assert list(found) == ["now", "tower-0-sum"] and min(found.values()) >= 1
    assert (facts["front_end"], facts["towers"], facts["gpus"], facts["planned"]) == (
        "towers",
        3,
        False,
        True,
    )


def test_tensorpack(tmp_path, monkeypatch):
    if IS_TF2:
        pytest.importorskip("tf_keras")
    arguments = ("tensorpack_resnet", "--devices", "2", "--steps", "60", *SMALL)
    found, facts = measured(tmp_path, monkeypatch, ["tensorpack-cpu"], *arguments)
    assert list(found) == ["now", "tensorpack-cpu"] and min(found.values()) >= 1
    assert (facts["front_end"], facts["update"], facts["towers"]) == ("tensorpack", "replicated", 2)


@pytest.mark.tf2
def test_keras(tmp_path, monkeypatch):
    arguments = ("keras_mirrored", "--devices", "2", "--epochs", "3")
    found, facts = measured(tmp_path, monkeypatch, ["ReductionToOneDevice"], *arguments)
    assert list(found) == ["now", "ReductionToOneDevice"] and min(found.values()) >= 1
    assert (facts["front_end"], facts["towers"]) == ("keras", 2)
