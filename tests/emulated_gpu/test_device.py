"""The emulated device: counters, memory, and the times of timed mode, which are exact."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from emulated_gpu import plugin
from helpers.real_gpus import ARE_EMULATED

if not ARE_EMULATED:
    pytest.skip("needs emulated GPUs: pytest --devices gpu", allow_module_level=True)


def test_counters_tell_kernels_and_copies():
    with tf.device("/gpu:0"):
        numbers = tf.square(tf.zeros([10]))
    numbers.numpy()
    before = plugin.counters()
    with tf.device("/gpu:1"):
        total = tf.reduce_sum(numbers)
    total.numpy()
    after = plugin.counters()
    none = {"count": 0, "bytes": 0}
    copies, copies_before = after["copies"]["0-1"], before["copies"].get("0-1", none)
    assert copies["count"] - copies_before["count"] == 1
    assert copies["bytes"] - copies_before["bytes"] == 40
    assert after["kernels"]["1"]["Sum"] - before["kernels"].get("1", {}).get("Sum", 0) == 1
    assert after["faults"] == {}


def test_memory_without_a_value_is_nan():
    """Also if it had one: TensorFlow's allocator hands out the memory of the array before."""
    for _ in range(3):
        with tf.device("/gpu:0"):
            fresh = tf.raw_ops.Empty(shape=[1000], dtype=tf.float32, init=False)
            assert np.isnan(fresh.numpy()).all()
            del fresh
            tf.ones([1000]).numpy()


# ---- Timed mode ----
TIMED = """
import tensorflow as tf
tf1 = tf.compat.v1
tf1.disable_eager_execution()
results = []
for device in ("/gpu:0", "/gpu:1"):
    with tf.device(device):
        one = tf1.get_variable("one" + device[-1], [10000000], use_resource=True)
        first = tf.maximum(one, one, name="first_burn_500")
        second = tf.maximum(first, first, name="second_burn_250.5")
        results.append(tf.concat([second[:16], second[16:64], second], 0, name="joined"))
        results.append(tf.concat([second[:16]] * 16, 0, name="joined_16"))
        results += tf.split(second, 2, name="views")
        results += tf.split(second[:10], 5, name="pieces")
    with tf.device("/gpu:2"):
        results.append(tf.square(second, name="read"))
        with tf1.name_scope("scope_burn_1"):
            results.append(tf.tanh(second, name="read"))
with tf1.Session(config=tf1.ConfigProto(inter_op_parallelism_threads=8)) as session:
    session.run(tf1.global_variables_initializer())
    session.run(results)
"""
SCALE = 2
LAUNCH_US, EVENT_US = 20_000, 100_000  # more than a busy machine is late
LINKS = """# 40 MB take 1 ms from 0 and 0.5 ms from 1. Both occupy resource 7 for 20 ms.
0 2 4e10 1e-4 1 7 2e9
1 2 8e10 1e-4 1 7 2e9
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """The trace of a run in timed mode: ``{what: (queued, begin, end)}``, the machine's seconds."""
    folder = tmp_path_factory.mktemp("timed")
    (folder / "links").write_text(LINKS)
    options = plugin.environment(
        count=3,
        timing=SCALE,
        machine=str(folder / "links"),
        host_us=1000,
        trace=str(folder / "trace"),
        memory_gbs=1000,
        launch_us=LAUNCH_US,
        event_us=EVENT_US,
    )
    environment = {**os.environ, **options}
    subprocess.run([sys.executable, "-c", TIMED], env=environment, check=True)
    lines = (folder / "trace").read_text().splitlines()[1:]
    spans = {}
    for line in lines:
        _, what, _, *times = line.split("\t")
        spans[what] = [float(time) / SCALE for time in times]
    return spans


def took(microseconds):
    """The file has seven digits of a second."""
    return pytest.approx(microseconds * 1e-6, abs=2e-7)


def seconds(span):
    return span[2] - span[1]


def test_a_kernel_takes_the_time_in_its_name(trace):
    assert seconds(trace["Maximum first_burn_500"]) == took(500)
    assert seconds(trace["Maximum second_burn_250.5"]) == took(250.5)


def test_other_kernels_take_a_launch_and_their_bytes(trace):
    assert seconds(trace["Square read"]) == took(8 + 80)
    assert seconds(trace["Tanh scope_burn_1/read"]) == took(8 + 80)


def test_a_copy_takes_the_time_of_its_link(trace):
    assert seconds(trace["copy 0>2 40000000"]) == took(1000)
    assert seconds(trace["copy 1>2 40000000"]) == took(500)


def test_copies_wait_for_what_they_share(trace):
    begins = sorted(trace[f"copy {sender}>2 40000000"][1] for sender in (0, 1))
    assert begins[1] - begins[0] >= 0.0199


def test_the_host_is_busy_with_kernels_of_the_model(trace):
    between = trace["Maximum second_burn_250.5"][0] - trace["Maximum first_burn_500"][0]
    assert between >= (1000 + LAUNCH_US) * 1e-6


def test_a_copy_takes_two_launches(trace):
    kernel, copy = trace["Maximum second_burn_250.5"], trace["copy 0>2 40000000"]
    assert copy[0] - kernel[0] >= 2 * LAUNCH_US * 1e-6


def test_a_copy_waits_for_an_event_that_takes_time(trace):
    kernel, copy = trace["Maximum second_burn_250.5"], trace["copy 0>2 40000000"]
    assert copy[1] - kernel[2] >= EVENT_US * 1e-6


def test_few_tensors_are_joined_and_cut_one_by_one(trace):
    small = 8 * 1e-3  # µs of a KB
    assert seconds(trace["ConcatV2 joined"]) == pytest.approx((3 * 8 + 80) * 1e-6, abs=1e-6)
    assert seconds(trace["ConcatV2 joined_16"]) == took(3 * 8 + 2 * 1024e-6)
    assert seconds(trace["Split pieces"]) == pytest.approx((5 * 8 + small) * 1e-6, abs=1e-6)


def test_aligned_parts_of_a_tensor_are_views(trace):
    assert "Split views" not in trace


def test_a_missing_file_of_links_is_named():
    options = plugin.environment(count=3, timing=1, machine="/no/such/file")
    child = subprocess.run(
        [sys.executable, "-c", TIMED],
        env={**os.environ, **options},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.returncode == 1
    assert "cannot read the links of EMULATED_GPU_MACHINE=/no/such/file" in child.stderr
