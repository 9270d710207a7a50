"""pytest's options, markers and fixtures for all tests. Only the tests that need TensorFlow import it."""

import gc
import os
import sys
import tempfile
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings

# Every run has the same examples, so that a failure is everybody's. `--hypothesis-profile default` draws new ones.
# There is no deadline, since the machine may be busy with something else.
settings.register_profile(
    "same every time", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same every time")

# No test reads or writes the calibration in the user's home.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="cache-")  # until this process ends
    os.environ["HIER_ALLREDUCE_CACHE"] = _CACHE.name


def pytest_addoption(parser):
    parser.addoption("--no-tensorflow", action="store_true", help="let each import of TensorFlow fail")
    parser.addoption("--split-gpu", type=int, metavar="K", help="run tests/gpu on K logical GPUs of the first GPU")


def over_lanes(count):
    """Let every all-reduce on CPU devices that names no lanes go over ``count`` lanes of each tower."""
    from hier_allreduce.graph import Lane, allreduce

    check_matrix = allreduce.check_matrix

    def with_lanes(rows, places, average, names=None):
        matrix = check_matrix(rows, places, average, names)  # what is wrong is said of the towers
        if places.lanes or not all(str(device).lower().startswith("/cpu:") for device in places.towers):
            return matrix
        firsts = [16 + int(device.rsplit(":", 1)[1]) * count for device in places.towers]
        lanes = [Lane(f"/cpu:{n + lane}", tower) for tower, n in enumerate(firsts) for lane in range(count)]
        return replace(matrix, places=replace(places, lanes=tuple(lanes)))

    allreduce.check_matrix = with_lanes


def pytest_configure(config):
    if config.getoption("no_tensorflow"):
        sys.modules["tensorflow"] = None
    if config.getoption("split_gpu"):
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # else helpers.graphs hides all
    if os.environ.get("TEST_LANES"):
        over_lanes(int(os.environ["TEST_LANES"]))
    config.addinivalue_line("markers", "no_lanes: about places and copies that are others over lanes")
    config.addinivalue_line("markers", "tf2: needs eager execution and tf.function")


def pytest_collection_modifyitems(items):
    for item in items if os.environ.get("TEST_LANES") else []:
        if item.get_closest_marker("no_lanes"):
            item.add_marker(pytest.mark.skip(reason="not over lanes"))
    marked = [item for item in items if item.get_closest_marker("tf2")]
    if marked:
        from helpers.graphs import IS_TF2

        for item in marked if not IS_TF2 else []:
            item.add_marker(pytest.mark.skip(reason="TensorFlow 2 only"))


def pytest_collection_finish():
    """Let the garbage collector skip what all modules hold: with TensorFlow, a full collection takes 0.3 seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def graph():
    """A fresh v1 graph, current while the test runs."""
    import tensorflow as tf

    with tf.Graph().as_default() as fresh:
        yield fresh
