"""Horovod beside `bench hosts`, played by a small module: it is not installed where the tests run."""

import re
import sys
import types

import pytest

from hier_allreduce.bench.contenders import CannotRun, all_contenders, find_contender
from hier_allreduce.bench.horovod_peer import horovod_text
from hier_allreduce.bench.models import GradientShape

GRADIENTS = {"two": tuple(GradientShape(name, (7,), "float32") for name in "ab")}
OURS = {"two": [1.0, 2.0, 3.0]}


@pytest.fixture
def horovod(monkeypatch):
    """A Horovod of one process whose sums are of two: its parts that are called, and what they were called with."""
    called = {"reduced": []}

    def allreduce(tensor, op):
        called["reduced"].append((tensor.shape.as_list(), op))
        return tensor * 2

    def run(function, arguments, np):
        called["processes"] = np
        return [function(*arguments)]

    peer = types.SimpleNamespace(init=lambda: called.update(init=True), local_rank=lambda: 0, Sum="sum")
    peer.allreduce = allreduce
    package = types.SimpleNamespace(run=run, tensorflow=peer)
    monkeypatch.setitem(sys.modules, "horovod", package)
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", peer)
    return types.SimpleNamespace(package=package, called=called)


def test_every_gradient_is_reduced_in_a_process_for_each_device(horovod):
    text = horovod_text(GRADIENTS, OURS, 6, 3)
    assert horovod.called == {"init": True, "processes": 6, "reduced": [([7], "sum")] * 2}
    assert re.search(r"^two +[\d.]+ \([\d.]+–[\d.]+\) +[\d.]+$", text, re.MULTILINE)
    assert "Horovod, 6 processes" in text


def test_without_horovod_the_reason_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod", None)
    assert re.match(r"horovod: cannot run: .*horovod", horovod_text(GRADIENTS, OURS, 2, 1))


def test_an_error_of_horovods_own_is_one_line(horovod):
    def run(*arguments, **named):
        raise RuntimeError("Horovod has not been built\nwith TensorFlow")

    horovod.package.run = run
    assert horovod_text(GRADIENTS, OURS, 2, 1) == "horovod: cannot run: Horovod has not been built with TensorFlow"


def test_bench_peers_says_where_horovod_is_measured():
    with pytest.raises(CannotRun, match="bench hosts"):
        find_contender("horovod").build([], [], False)
    assert "horovod" not in [contender.name for contender in all_contenders()]
