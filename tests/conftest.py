"""One TensorFlow set-up for all tests: sixteen logical CPU devices, few threads, no GPU needed."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, settings

from hier_allreduce import allreduce_grads
from hier_allreduce.plan import Ops

tf1 = tf.compat.v1
IS_TF2 = tf.__version__.startswith("2")

# The same examples in every run: what fails for one fails for all. `--hypothesis-profile default` draws new ones.
# However slow the machine is: it may be busy with something else.
settings.register_profile(
    "same every time", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same every time")


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


def gradients_on(devices, values, static=True):
    """``values[tower][variable]`` as tensors on their towers' devices, which no optimizer folds into constants."""
    rows = []
    for device, row in zip(devices, values):
        with tf.device(device):
            rows.append([tf1.placeholder_with_default(v, np.shape(v) if static else None) for v in row])
    return rows


def evaluate(fetches):
    """What a fresh session makes of tensors of the current graph."""
    tf1.get_default_graph().get_operations() or tf1.no_op()  # a session refuses an empty graph
    with session() as sess:
        return sess.run(fetches)


def executed(values, devices, static=True, **how):
    """The all-reduce of K×N arrays, built in a graph of its own and run in a session."""
    with tf.Graph().as_default():
        return evaluate(allreduce_grads(gradients_on(devices, values, static), devices, **how))


class Adding(Ops):
    """The reading of a plan in which values are numbers or arrays."""

    def reduce(self, step, own, others):
        return sum(others, own)
