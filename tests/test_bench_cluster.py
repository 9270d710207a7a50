"""The bench of several hosts: both tables, from one round, and a peer that trains to the same weights."""

import json
import re
import subprocess
import sys

import pytest
from conftest import IS_TF2

from hier_allreduce import ClusterError, bench_cluster, launcher


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


def test_no_address_is_given_twice_even_if_ports_are_drawn_in_the_same_order(monkeypatch):
    started = {}

    def start(command, environment):
        started.update(command=command, hosts=json.loads(environment["TF_CONFIG"])["cluster"]["worker"])
        raise ClusterError("enough")

    monkeypatch.setattr(launcher, "_started", start)
    for module in (launcher, bench_cluster):
        monkeypatch.setattr(module, "free_ports", lambda count: range(5000, 5000 + count))
    monkeypatch.setattr(sys, "argv", ["bench_cluster", "--hosts", "3"])
    with pytest.raises(ClusterError, match="enough"):
        bench_cluster.main()
    peers = started["command"][started["command"].index("--peers") + 1 :]
    assert len(peers) == len(started["hosts"]) == 3
    assert len({*peers, *started["hosts"]}) == 6
