"""``doctor --copies``: bits and speeds of copies, on a CPU device and as GPUs give them."""

import json
import re
import subprocess
import sys

import pytest

from hier_allreduce_tools.doctor import copies

GPUS = ["/gpu:0", "/gpu:1", "/gpu:2"]
POLLING = "Error polling for event status: failed to query event: CUDA_ERROR_ILLEGAL_ADDRESS"
E_LINE = f"2025-11-27 09:54:12.185653: E tensorflow/cuda/cuda_event.cc:29] {POLLING}"
F_LINE = "2025-11-27 09:54:12.185654: F tensorflow/gpu/gpu_event_mgr.cc:220] Unexpected status: 1"
# A TensorFlow that prints the lines of its log level, and ends by a signal.
DIES = """
import os, sys
level = int(os.environ["TF_CPP_MIN_LOG_LEVEL"])
for line in {lines}:
    if "IWEF".index(line.split()[2]) >= level:
        print(line, file=sys.stderr, flush=True)
os.abort()
"""
# A TensorFlow that prints what the copier does, a line for each pair, and then dies.
PRINTS = """
import os
print(*{lines}, sep="\\n", flush=True)
os.abort()
"""


@pytest.fixture
def said():
    """``said(devices)``: the table of copies, and its problems."""

    def said(devices):
        table, *problems = copies.copies_between(devices)
        return table, problems

    return said


@pytest.fixture
def copied(said, monkeypatch, tmp_path):
    """``copied(lines)``: the table, and problems, if the copier prints these lines, and dies."""

    def copied(lines):
        (tmp_path / "tensorflow.py").write_text(PRINTS.format(lines=lines))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        table, problems = said(GPUS)
        assert table.splitlines()[:2] == [
            "GB/s of copies of 32 MiB, from row to column",
            "          /gpu:0    /gpu:1    /gpu:2",
        ]
        return table.splitlines()[2:], problems

    return copied


def test_bits_that_arrive_are_compared():
    """On a CPU device, where the time of a copy is that of nothing."""
    pairs = [["/cpu:0", "/cpu:0"]] * 2
    copier = [sys.executable, copies.__file__.replace("copies", "copier"), json.dumps([pairs, 240])]
    lines = subprocess.check_output(copier, timeout=280).decode().splitlines()
    assert len(lines) == 2 and all(re.fullmatch(r"[\d.]+|\?", line) for line in lines)


def test_a_copy_that_does_not_end_is_a_fault_of_its_pair(said, monkeypatch):
    monkeypatch.setattr(copies, "LIMIT", 0.001)
    _, (problem,) = said(["/cpu:0", "/device:CPU:0"])
    assert problem.startswith("! copies /cpu:0 → /device:CPU:0: no answer in time: end other")
    assert "turn off the IOMMU and ACS in the firmware, or update the driver" in problem


@pytest.mark.parametrize("device", ["/gpu:99", "gpu"])
def test_a_device_that_does_not_exist_is_a_problem(said, device):
    _, (problem,) = said([device, "/cpu:0"])
    assert problem.startswith(f"! copies {device} → /cpu:0: the process ended: status 1: ")
    words = ("Error", "explicitly assigned", "specification")  # the second on TensorFlow 1.15
    assert any(word in problem for word in words)


@pytest.mark.parametrize(
    "lines, cause",
    [
        ([E_LINE, F_LINE], f"SIGABRT: {E_LINE}"),
        ([F_LINE], f"SIGABRT: {F_LINE}"),
        ([], "SIGABRT"),
    ],
)
def test_a_signal_is_told_with_its_cause(said, monkeypatch, tmp_path, lines, cause):
    (tmp_path / "tensorflow.py").write_text(DIES.format(lines=lines))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    _, (problem,) = said(GPUS)
    assert problem.startswith(f"! copies /gpu:0 → /gpu:1: the process ended: {cause}: end other")


def test_what_was_measured_is_not_lost_if_tensorflow_dies(copied):
    table, (problem,) = copied(["20.1"])
    assert table == [
        "/gpu:0         .      20.1         –",
        "/gpu:1         –         .         –",
        "/gpu:2         –         –         .",
    ]
    assert problem.startswith("! copies /gpu:0 → /gpu:2: the process ended: SIGABRT: end other")


def test_pairs_whose_bits_differ_are_in_one_line(copied):
    _, (problem,) = copied(["DIFFER"] * 6)
    assert problem.startswith("! copies /gpu:0 → /gpu:1, /gpu:0 → /gpu:2, ")
    assert "/gpu:2 → /gpu:1: other bits arrive: end other programs" in problem


def test_speeds_and_faults_of_gpus_are_in_one_table(copied):
    table, problems = copied(["22.4", "DIFFER", "22.1", "?"])  # too short to be timed
    assert table == [
        "/gpu:0         .      22.4    DIFFER",
        "/gpu:1      22.1         .         ?",
        "/gpu:2         –         –         .",
    ]
    assert [problem.partition(": end other")[0] for problem in problems] == [
        "! copies /gpu:0 → /gpu:2: other bits arrive",
        "! copies /gpu:2 → /gpu:0: the process ended: SIGABRT",
    ]
