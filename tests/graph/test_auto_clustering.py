"""XLA's auto-clustering, which compiles parts of any graph, leaves sums as they are."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import tensorflow as tf
from hier_allreduce import Strategy, allreduce_grads
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
devices = ["/cpu:0", "/cpu:1", "/cpu:2"]

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
    return summed

for dense, rows in step(tf.ones([5])):
    print(dense.numpy().tolist(), rows.numpy()[:4, 0].tolist())
"""


@pytest.mark.tf2
def test_sums_are_right_where_xla_compiles_parts_of_them():
    flags = "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit --tf_xla_min_cluster_size=1"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TF_XLA_FLAGS": flags, "CUDA_VISIBLE_DEVICES": "-1"},
        stdout=subprocess.PIPE,
        timeout=280,
        check=True,
    )
    on_each_tower = "[4.5, 4.5, 4.5, 4.5, 4.5] [4.5, 1.5, 3.0, 0.0]"
    assert done.stdout.decode().splitlines() == [on_each_tower] * 3
