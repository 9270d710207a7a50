"""Training: TowerOptimizer with both updates and sparse gradients, the bench, and the demo."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from helpers.demo import cold_demo
from helpers.placed import session, traced

from hier_allreduce import TowerOptimizer, audit
from hier_allreduce.bench import Case, measure, ours
from hier_allreduce.bench.models import GradientShape

tf1 = tf.compat.v1
TESTS = str(Path(__file__).parents[1])
SPLIT = f"""import os
os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # as the demo does, before it imports TensorFlow
sys.path.append({TESTS!r})
from helpers import placed
placed.split_for_all(8)"""


def trained(devices, update):
    """Train K towers, each towards its own number; return the last tower's weights."""
    with tf.Graph().as_default() as graph:
        optimizer = TowerOptimizer(tf1.train.MomentumOptimizer(0.1, 0.9), devices, update=update)
        rows = []
        for tower, device in enumerate(devices):
            with tf.device(device), tf1.variable_scope(f"tower{tower}"):
                zeros = tf1.zeros_initializer()
                w, b = (tf1.get_variable(name, [300], initializer=zeros, use_resource=True) for name in "wb")
                table = tf1.get_variable("table", [5, 2], initializer=zeros, use_resource=True)
                touched = tf1.placeholder_with_default(tf.constant([1, 3], tf.int64), [2])  # constants are not copied
                used = tf.nn.embedding_lookup(table, touched)
                loss = sum(tf.reduce_sum(error**2) for error in (w - tower, b + tower, used - tower))
                rows.append(optimizer.compute_gradients(loss, var_list=[w, b, table]))
        train = optimizer.apply_gradients(rows)
        with session() as running:
            running.run([tf1.global_variables_initializer(), tf1.local_variables_initializer()])
            running.run(optimizer.init_op)
            for _ in range(2):
                running.run(train)
            audit(traced(running, train), graph)
            assert optimizer.check_replicas(running).difference == 0
            return running.run([var for _, var in rows[-1]])


def momentum(target, steps=3, rate=0.1, keep=0.9):
    weight = speed = 0.0
    for _ in range(steps):
        speed = keep * speed + 2 * (weight - target)
        weight -= rate * speed
    return weight


@pytest.mark.parametrize("update", ["replicated", "main"])
def test_towers_are_trained_alike(devices, update):
    w, b, table = trained(devices[:4], update)
    assert np.allclose(w, momentum(1.5), rtol=1e-5) and np.allclose(b, momentum(-1.5), rtol=1e-5)
    assert np.allclose(table[[1, 3]], momentum(1.5), rtol=1e-5) and not table[[0, 2, 4]].any()


def test_the_bench_measures_every_kind(devices):
    columns = (
        GradientShape("kernel", (64, 32), "float32"),
        GradientShape("embedding", (5000, 4), "float32", sparse=True),
        GradientShape("counts", (7,), "int32"),
    )
    report = measure(Case(columns, tuple(devices[:3]), rows=8), [ours()], rounds=1, floor=False)
    assert [(m.status, m.error) for m in report.contenders] == [("ok", "")]
    assert report.contenders[0].copies


def test_the_demo_trains(on_gpus, tmp_path):
    status, report, errors = cold_demo(tmp_path, "--epochs", "20", code=SPLIT)
    assert status == 0, report + errors
