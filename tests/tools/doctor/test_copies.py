"""``doctor --copies``: bits and speeds of copies, on CPU devices and as GPUs give them."""

from itertools import permutations

import pytest

from hier_allreduce_tools.doctor import copies
from hier_allreduce_tools.doctor.copies import MeasuredCopy

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
print('{}', '{"differ": 0, "rate": 2e10}', sep=os.linesep, flush=True)
os.abort()
"""


def test_bits_of_cpu_devices_are_compared():
    found = copies.copy_all(CPUS)
    assert list(found) == [("/cpu:0", "/cpu:1"), ("/cpu:1", "/cpu:0")]
    assert [(copy.differ, copy.fault) for copy in found.values()] == [(0, "")] * 2
    assert copies.problems(found) == []
    assert copies.report(CPUS, found).splitlines() == [
        "bits after copies of 32 MiB, from row to column",
        "        /cpu:0  /cpu:1",
        "/cpu:0       .   equal",
        "/cpu:1   equal       .",
    ]


def test_a_copy_that_does_not_end_is_a_fault_of_its_pair(monkeypatch):
    monkeypatch.setattr(copies, "LIMIT", 0.001)
    (problem,) = copies.problems(copies.copy_all(CPUS))
    assert problem.fact == "copies /cpu:0 → /cpu:1: no answer in time"
    assert "turn off the IOMMU and ACS in the firmware, or update the driver" in problem.remedy


def test_a_device_that_does_not_exist_is_a_problem():
    (problem,) = copies.problems(copies.copy_all(["/gpu:99", "/cpu:0"]))
    pairs = "copies /gpu:99 → /cpu:0: TensorFlow cannot use /gpu:99"
    assert problem.fact.startswith(pairs)
    assert "Error" in problem.fact or "explicitly assigned" in problem.fact  # TensorFlow 1.15


@pytest.mark.parametrize(
    "lines, cause",
    [
        ([E_LINE, F_LINE], f"SIGABRT: {E_LINE}"),
        ([F_LINE], f"SIGABRT: {F_LINE}"),
        ([], "SIGABRT"),
    ],
)
def test_a_signal_is_told_with_its_cause(monkeypatch, tmp_path, lines, cause):
    (tmp_path / "tensorflow.py").write_text(DIES.format(lines=lines))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    fault = f"TensorFlow cannot use /gpu:0, the process ended: {cause}"
    (problem,) = copies.problems(copies.copy_all(GPUS))
    assert problem.fact == f"copies /gpu:0 → /gpu:1: {fault}"


def test_what_was_measured_is_not_lost_if_tensorflow_dies(monkeypatch, tmp_path):
    (tmp_path / "tensorflow.py").write_text(DIES_LATER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = copies.copy_all(GPUS)
    first, second, *others = found.values()
    assert first == MeasuredCopy(rate=2e10)
    assert second.fault == "the process ended: SIGABRT"
    assert all(copy.fault.startswith("not tried") for copy in others) and len(others) == 4
    (problem,) = copies.problems(found)
    assert problem.fact == "copies /gpu:0 → /gpu:2: the process ended: SIGABRT"
    assert "–" in copies.report(GPUS, found)


def test_pairs_whose_bits_differ_are_in_one_line():
    found = {pair: MeasuredCopy(differ=9**k) for k, pair in enumerate(permutations(GPUS, 2))}
    (problem,) = copies.problems(found)
    assert problem.fact.startswith("copies /gpu:0 → /gpu:1, /gpu:0 → /gpu:2, ")
    assert problem.fact.endswith("/gpu:2 → /gpu:1: 1 to 59049 bytes of 32 MiB arrive changed")


def test_speeds_and_faults_of_gpus_are_in_one_table():
    found = {pair: MeasuredCopy(rate=22.4e9) for pair in permutations(GPUS, 2)}
    found["/gpu:0", "/gpu:2"] = MeasuredCopy(differ=3, rate=9e9)
    found["/gpu:1", "/gpu:2"] = MeasuredCopy(fault="no answer in time")
    found["/gpu:2", "/gpu:0"] = MeasuredCopy(fault="the process ended: InternalError")
    found["/gpu:2", "/gpu:1"] = MeasuredCopy(rate=0.0)
    assert copies.report(GPUS, found).splitlines() == [
        "GB/s of copies of 32 MiB, from row to column",
        "        /gpu:0  /gpu:1  /gpu:2",
        "/gpu:0       .      22  DIFFER",
        "/gpu:1      22       .  FAILED",
        "/gpu:2  FAILED       ?       .",
    ]
    assert [problem.fact for problem in copies.problems(found)] == [
        "copies /gpu:0 → /gpu:2: 3 bytes of 32 MiB arrive changed",
        "copies /gpu:1 → /gpu:2: no answer in time",
        "copies /gpu:2 → /gpu:0: the process ended: InternalError",
    ]
