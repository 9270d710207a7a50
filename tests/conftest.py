"""pytest's options, markers and fixtures for all tests. Only the tests that need TensorFlow import it."""

import gc
import sys

import pytest
from hypothesis import HealthCheck, settings

# Every run has the same examples, so that a failure is everybody's. `make soak` draws more, and new ones.
# There is no deadline, since the machine may be busy with something else.
settings.register_profile(
    "same every time", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "soak",
    max_examples=500,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
settings.load_profile("same every time")


def pytest_addoption(parser):
    parser.addoption(
        "--no-tensorflow", action="store_true", help="let each import of TensorFlow fail"
    )


def pytest_configure(config):
    if config.getoption("no_tensorflow"):
        sys.modules["tensorflow"] = None  # type: ignore[assignment]
    config.addinivalue_line("markers", "tf2: needs eager execution and tf.function")


def pytest_collection_modifyitems(items):
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
