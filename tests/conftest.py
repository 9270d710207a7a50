"""One TensorFlow set-up for all tests: eight logical CPU devices, few threads, no GPU needed."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pytest
import tensorflow as tf

from hier_allreduce.plan import Ops

tf1 = tf.compat.v1
IS_TF2 = tf.__version__.startswith("2")


def pytest_configure(config):
    if IS_TF2:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 16)
    config.addinivalue_line("markers", "tf2: needs eager execution and tf.function")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("tf2") and not IS_TF2:
            item.add_marker(pytest.mark.skip(reason="TensorFlow 2 only"))


@pytest.fixture
def graph():
    """A fresh v1 graph, current while the test runs."""
    with tf.Graph().as_default() as fresh:
        yield fresh


def session(**options):
    """A v1 session on 16 logical CPU devices."""
    return tf1.Session(config=tf1.ConfigProto(device_count={"CPU": 16}, **options))


def cpus(count):
    """``count`` logical CPU devices."""
    return [f"/cpu:{i}" for i in range(count)]


class Adding(Ops):
    """The reading of a plan in which values are numbers or arrays."""

    def reduce(self, step, own, others):
        return sum(others, own)
