"""The bench of several hosts: both tables, from one round, and a peer that trains to the same weights."""

import re
import subprocess
import sys

from conftest import IS_TF2


def test_everybody_is_measured_and_trains_to_the_same_weights():
    command = [sys.executable, "-m", "hier_allreduce.bench_cluster", "--devices", "2", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, timeout=240)
    text = done.stdout.decode()
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    assert re.search(r"^4 × 6\.4 MB( +[\d.]+ \(.*?\)){3} +[\d.]+$", text, re.MULTILINE)
    assert re.search(r"^160 × 16 kB( +[\d.]+ \(.*?\)){3} +[\d.]+$", text, re.MULTILINE)
    assert re.search(r"^ours +2 +[\d.]+ \(.*?\) +1\.00$", text, re.MULTILINE)
    peers = re.findall(r"^MultiWorkerMirroredStrategy, \S.*?(?:  +(\d) |: (cannot run))", text, re.MULTILINE)
    assert peers == ([("1", ""), ("2", "")] if IS_TF2 else [("", "cannot run")] * 2)
    assert float(re.search(r"largest difference of a weight to ours at the end: (\S+)$", text).group(1)) < 1e-5
