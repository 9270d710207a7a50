"""``doctor --copies``: bits and speeds of copies, on CPU devices and as GPUs give them."""

from itertools import permutations

import pytest

from hier_allreduce_tools.doctor import copies

CPUS = ["/cpu:0", "/cpu:1"]
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
# A TensorFlow that does as the copier with its first pair, and dies at the second.
DIES_LATER = """
import os
print('[0, 2e10]', flush=True)
os.abort()
"""


@pytest.fixture
def said():
    """``said(devices)``: the table of copies, and its problems."""

    def said(devices):
        table, *problems = copies.report(devices, *copies.copy_all(devices))
        return table, problems

    return said


def test_bits_of_cpu_devices_are_compared(said):
    found, fault = copies.copy_all(CPUS)
    assert list(found) == [("/cpu:0", "/cpu:1"), ("/cpu:1", "/cpu:0")]
    assert [differ for differ, _ in found.values()] == [0, 0] and fault == ""
    (table,) = copies.report(CPUS, found, fault)
    assert table.splitlines() == [
        "bits after copies of 32 MiB, from row to column",
        "          /cpu:0    /cpu:1",
        "/cpu:0         .     equal",
        "/cpu:1     equal         .",
    ]


def test_a_copy_that_does_not_end_is_a_fault_of_its_pair(said, monkeypatch):
    monkeypatch.setattr(copies, "LIMIT", 0.001)
    _, (problem,) = said(CPUS)
    assert problem.startswith("! copies /cpu:0 → /cpu:1: no answer in time: end other programs")
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


def test_what_was_measured_is_not_lost_if_tensorflow_dies(said, monkeypatch, tmp_path):
    (tmp_path / "tensorflow.py").write_text(DIES_LATER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    table, (problem,) = said(GPUS)
    assert table.splitlines()[2:] == [
        "/gpu:0         .        20         –",
        "/gpu:1         –         .         –",
        "/gpu:2         –         –         .",
    ]
    assert problem.startswith("! copies /gpu:0 → /gpu:2: the process ended: SIGABRT: end other")


def test_pairs_whose_bits_differ_are_in_one_line():
    found = {pair: (9**k, 9e9) for k, pair in enumerate(permutations(GPUS, 2))}
    _, problem = copies.report(GPUS, found, "")
    assert problem.startswith("! copies /gpu:0 → /gpu:1, /gpu:0 → /gpu:2, ")
    assert "/gpu:2 → /gpu:1: up to 59049 bytes of 32 MiB arrive changed: end other" in problem


def test_speeds_and_faults_of_gpus_are_in_one_table():
    found = {pair: (0, 22.4e9) for pair in permutations(GPUS, 2) if pair[0] != "/gpu:2"}
    found["/gpu:0", "/gpu:2"] = (3, 9e9)
    found["/gpu:1", "/gpu:2"] = (0, 0.0)  # too short to be timed
    table, *problems = copies.report(GPUS, found, "/gpu:2 → /gpu:0: no answer in time")
    assert table.splitlines() == [
        "GB/s of copies of 32 MiB, from row to column",
        "          /gpu:0    /gpu:1    /gpu:2",
        "/gpu:0         .        22    DIFFER",
        "/gpu:1        22         .         ?",
        "/gpu:2         –         –         .",
    ]
    assert [problem.partition(": end other")[0] for problem in problems] == [
        "! copies /gpu:0 → /gpu:2: up to 3 bytes of 32 MiB arrive changed",
        "! copies /gpu:2 → /gpu:0: no answer in time",
    ]
