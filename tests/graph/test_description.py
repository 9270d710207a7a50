"""The line about an all-reduce that the log has once."""

import logging
import subprocess
import sys
from operator import itemgetter

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import XPU, gpus_or_cpus, gradients_on, on_towers, tf1
from helpers.rows import for_each

from hier_allreduce import Strategy, TowerOptimizer, all_reduces, allreduce_grads
from hier_allreduce.graph.record import log_once

THREE = {"cpu": "3 towers on CPU devices", "gpu": "3 towers on GPUs"}[XPU]
LINE = "2 towers on CPU devices: flat, 1 chunk in float32; 0 control edges"
PROGRAM = """
import tensorflow as tf
from hier_allreduce import allreduce_grads
with tf.Graph().as_default():
    for _ in range(2):
        allreduce_grads([[tf.ones([7])]] * 2, ["/cpu:0", "/cpu:1"], strategy="flat")
"""


@pytest.fixture
def lines(caplog):
    """``lines()``: the lines that the package has logged so far."""
    log_once.cache_clear()
    caplog.set_level(logging.INFO, logger="hier_allreduce")
    return lambda: [
        record.getMessage() for record in caplog.records if record.name == "hier_allreduce"
    ]


@pytest.mark.parametrize(
    "how, said",
    [
        ({"algorithm": "flat"}, "flat, 2 chunks in float32"),
        ({"algorithm": "tree", "wire_dtype": "float16"}, "tree, 2 chunks in float16"),
    ],
)
def test_it_has_the_algorithm_chunks_and_dtype(graph, lines, how, said):
    values = [[np.ones([50], np.float32), np.ones([25], np.float32)]] * 3
    strategy = Strategy(chunk_bytes=0, main=0, edges=False, **how)
    allreduce_grads(gradients_on(gpus_or_cpus(3), values), gpus_or_cpus(3), strategy=strategy)
    assert lines() == [f"{THREE}: {said}; 0 control edges"]


def test_devices_that_are_not_known_have_no_kind(graph, lines):
    grads = [[tf.zeros([31]), tf.zeros([5], tf.complex64)]] * 2
    allreduce_grads(grads, [None, gpus_or_cpus(1)[0]], strategy=Strategy("flat", chunk_bytes=0))
    assert lines() == ["2 towers: flat, 2 chunks in float32, complex64; 0 control edges"]


def layers(tower, layer=lambda value, weight: tf.tanh(value * weight)):
    """Return the gradients of eight layers of a tower."""
    weights, value = [], tf.ones([SIZE]) * (1.0 + tower)
    for n in range(8):
        weights.append(tf1.get_variable(f"w{tower}_{n}", [SIZE], use_resource=True))
        value = layer(value, weights[-1].read_value())
    return tf1.gradients(tf.reduce_sum(value), weights)


def compiled_layers(tower):
    """Return the gradients of eight layers, each of which XLA compiles."""
    return layers(tower, tf.function(lambda value, weight: value * weight, jit_compile=True))


def clipped(tower):
    """Return gradients that are clipped by the norm of all."""
    return tf.clip_by_global_norm(layers(tower), 1.0)[0]


def alone(tower):
    """Return gradients that have nothing to do with each other."""
    return [tf1.placeholder("float32", [SIZE]) for _ in range(8)]


def compiled(tower):
    """Return the gradients of a function that XLA compiles, which is one op for all of them."""
    start = tf.ones([SIZE]) * (1.0 + tower)
    return tf.function(passed, autograph=False, jit_compile=True)(start)


def passed(start):
    """Return the gradients of eight layers that begin with a value."""
    weights, value = [start * float(layer) for layer in range(8)], start
    for weight in weights:
        value = tf.tanh(value * weight)
    return tf1.gradients(tf.reduce_sum(value), weights)


SIZE = 1024  # of a gradient that is a chunk
TOGETHER = "no edges: all gradients are ready together"


@pytest.mark.parametrize(
    "model, towers, options, said",
    [
        (layers, 3, {}, "4 control edges"),
        (layers, 3, {"edges": False}, "0 control edges"),
        (layers, 2, {}, "0 control edges"),
        (layers, 6, {"algorithm": "hierarchical"}, "0 control edges"),
        (clipped, 3, {}, TOGETHER),
        (alone, 3, {}, TOGETHER),
        pytest.param(compiled, 3, {}, TOGETHER, marks=pytest.mark.tf2),
        pytest.param(compiled_layers, 3, {}, "3 control edges", marks=pytest.mark.tf2),
    ],
)
def test_it_says_how_many_control_edges_there_are(graph, lines, model, towers, options, said):
    devices = [f"/gpu:{tower}" for tower in range(towers)]
    rows = on_towers(devices, model)
    strategy = Strategy(**{"algorithm": "flat", "chunk_bytes": 4 * SIZE, **options})
    allreduce_grads(rows, devices, strategy=strategy)
    assert lines()[-1].endswith(f", 8 chunks in float32; {said}")
    assert all_reduces(graph)[0].description == lines()[-1]


def test_the_same_line_is_logged_once(graph, lines):
    optimizer = TowerOptimizer(tf1.train.GradientDescentOptimizer(0.1), gpus_or_cpus(2))
    rows = []
    for tower, device in enumerate(gpus_or_cpus(2)):
        with tf1.device(device), tf1.variable_scope(f"t{tower}"):
            weights = tf1.get_variable("w", [123], use_resource=True)
            rows.append(optimizer.compute_gradients(tf1.reduce_sum(weights), [weights]))
    optimizer.apply_gradients(rows)
    allreduce_grads(for_each(itemgetter(0), rows), gpus_or_cpus(2))
    assert len(lines()) == 1 and "1 chunk in float32" in lines()[0]


@pytest.mark.parametrize(
    "set_up, expected",
    [
        ("", []),
        ("import logging; logging.basicConfig()", []),  # of warnings
        (
            "import logging; logging.basicConfig(level=logging.INFO)",
            [f"INFO:hier_allreduce:{LINE}"],
        ),
    ],
)
def test_a_program_sees_it_only_if_it_asks_for_logs(set_up, expected):
    program = f"{set_up}\n{PROGRAM}"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, stderr=subprocess.PIPE, timeout=280, check=True)
    assert [line for line in done.stderr.decode().splitlines() if "towers" in line] == expected


@pytest.mark.tf2
def test_eagerly_it_logs_no_line_for_each_number_of_slices(lines):
    for count in (5, 6, 7):
        slices = tf.IndexedSlices(tf.ones([count, 2]), tf.range(count), tf.constant([100, 2]))
        allreduce_grads([[slices]] * 2, ["/cpu:0", "/cpu:1"], strategy="flat")
    assert lines() == [LINE]
