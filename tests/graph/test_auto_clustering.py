"""XLA's auto-clustering, which compiles parts of any graph, leaves sums and checks as they are."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import tensorflow as tf
from hier_allreduce import Strategy, allreduce_grads, copy_check
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
devices = ["/cpu:0", "/cpu:1", "/cpu:2"]
checks = []

@tf.function
def step(start):
    grads = []
    for tower, device in enumerate(devices):
        with tf.device(device):
            dense = tf.tanh(start) * 0.0 + float(tower)
            rows = tf.IndexedSlices(tf.ones([2, 1]) * dense[0], tf.constant([0, tower]), [9, 1])
            grads.append([dense, rows])
    summed = []
    for device, row in zip(devices, allreduce_grads(grads, devices, strategy=Strategy("flat"))):
        with tf.device(device):
            summed.append([tf.convert_to_tensor(total) * 1.5 for total in row])
    checks.append(copy_check())
    return summed, checks[0].fingerprints

if sys.argv[1] == "function":
    summed, bits = tf.nest.map_structure(lambda tensor: tensor.numpy(), step(tf.ones([5])))
else:
    config = tf.compat.v1.ConfigProto(device_count={"CPU": 3})
    config.graph_options.optimizer_options.global_jit_level = tf.compat.v1.OptimizerOptions.ON_2
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
        summed, bits = session.run(step(tf.ones([5])))
for dense, rows in summed:
    print(dense.tolist(), rows[:4, 0].tolist())
checks[0].compare(bits, step=1)
"""
FLAGS = "--tf_xla_cpu_global_jit --tf_xla_min_cluster_size=1"


@pytest.mark.tf2
@pytest.mark.parametrize("where, more", [("function", " --tf_xla_auto_jit=2"), ("session", "")])
def test_sums_are_right_where_xla_compiles_parts_of_them(where, more):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, where],
        env={**os.environ, "TF_XLA_FLAGS": FLAGS + more, "CUDA_VISIBLE_DEVICES": "-1"},
        stdout=subprocess.PIPE,
        timeout=280,
        check=True,
    )
    on_each_tower = "[4.5, 4.5, 4.5, 4.5, 4.5] [4.5, 1.5, 3.0, 0.0]"
    assert done.stdout.decode().splitlines() == [on_each_tower] * 3
