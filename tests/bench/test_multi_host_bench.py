"""The bench of several hosts: both tables, from one round, and a peer that trains to the same weights."""

import contextlib
import io
import json
import re
import sys

import pytest
from helpers.clusters import job
from helpers.graphs import IS_TF2

from hier_allreduce import ClusterError
from hier_allreduce.bench import multi_host as bench_hosts
from hier_allreduce.cli import entry as cli
from hier_allreduce.cluster import launcher


@pytest.fixture(scope="module")
def printed():
    """What the command prints after one round of small gradients on two hosts, which are forked, not started."""

    def launch(hosts, command, write, addresses):
        with job("bench", hosts, addresses=addresses, arguments=command[3:]) as started:  # after python -m …cli
            for task, host in enumerate(started):
                for line in host.facts().splitlines():
                    write(f"[host {task}] {line}\n")
        return 0

    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(io.StringIO()) as out:
        patched.setattr(bench_hosts, "launch", launch)
        assert cli.main(["bench", "--hosts", "2", "--devices", "2", "--rounds", "1"]) == 0
    return out.getvalue()


def test_every_case_is_measured(printed):
    for case in ("4 × 6.4 MB", "160 × 16 kB"):
        assert re.search(rf"^{re.escape(case)}( +[\d.]+ \(.*?\)){{3}} +[\d.]+$", printed, re.MULTILINE)


def test_everybody_trains_to_the_same_weights(printed):
    assert re.search(r"^ours +2 +[\d.]+ \(.*?\) +1\.00$", printed, re.MULTILINE)
    found = re.findall(r"^MultiWorkerMirroredStrategy, \S.*?(?:  +(\d) |: (cannot run))", printed, re.MULTILINE)
    assert found == ([("1", ""), ("2", "")] if IS_TF2 else [("", "cannot run")] * 2)
    assert float(re.search(r"largest difference of a weight to ours at the end: (\S+)$", printed).group(1)) < 1e-5


def test_the_cases_are_what_their_names_say():
    large, small = (case.shapes for case in bench_hosts.cases(["/cpu:0", "/cpu:1"]).values())
    assert [shape.dense_bytes for shape in large] == [6_400_000] * 4
    assert [shape.dense_bytes for shape in small] == [16_000] * 160


def test_hosts_run_the_same_command_and_no_address_is_given_twice_even_if_each_drawing_is_the_same(monkeypatch):
    started = {}

    def start(command, environment, output):
        started.update(command=command, hosts=json.loads(environment["TF_CONFIG"])["cluster"]["worker"])
        raise ClusterError("enough")

    monkeypatch.setattr(launcher, "_started", start)
    for module in (launcher, bench_hosts):
        monkeypatch.setattr(module, "free_addresses", lambda count: [f"127.0.0.1:{5000 + k}" for k in range(count)])
    asked = ["bench", "--hosts", "3", "--devices", "5", "--rounds", "7"]
    assert cli.main(asked) == 2
    command = [sys.executable, "-m", "hier_allreduce.cli", *asked, "--peers"]
    assert started["command"][: len(command)] == command
    addresses = started["command"][len(command) :]
    assert len(addresses) == len(started["hosts"]) == 3
    assert len({*addresses, *started["hosts"]}) == 6
