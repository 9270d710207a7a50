"""The bench on several hosts: both tables from one round, and a peer that trains to the same weights."""

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from helpers.clusters import job
from helpers.graphs import IS_TF2

from hier_allreduce import ClusterError
from hier_allreduce.bench import multi_host as bench_hosts
from hier_allreduce.cli import entry as cli
from hier_allreduce.cluster import launcher

after_one_round = pytest.mark.xdist_group("bench on hosts")  # one worker runs them, so that the fixture runs once
EVERY_DEVICE = Path(__file__).parents[2] / "benchmarks" / "every_device.py"
ONE_ROUND = ["--devices", "2", "--rounds", "1"]


def launch(hosts, command, write, addresses):
    """Fork the hosts, with small gradients, instead of starting them."""
    program, *arguments = command[command.index("bench") - 1 :]
    with job("bench", hosts, addresses=addresses, program=program, arguments=arguments) as started:
        for task, host in enumerate(started):
            for line in host.facts().splitlines():
                write(f"[host {task}] {line}\n")
    return 0


def printed_by(run, arguments):
    """Return what a program prints after one round on two hosts."""
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(io.StringIO()) as out:
        patched.setattr(bench_hosts, "launch", launch)
        assert run(arguments) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def printed():
    """What the command prints."""
    return printed_by(cli.main, ["bench", "hosts", "2", *ONE_ROUND])


def towers_of_the_peer(text):
    """Return the peer's towers on each host, or its error; check that it trains to our weights."""
    assert re.search(r"^ours +2 +[\d.]+ \(.*?\) +1\.00$", text, re.MULTILINE)
    assert float(re.search(r"largest difference of a final weight from ours: (\S+)$", text).group(1)) < 1e-5
    return re.search(r"^MultiWorkerMirroredStrategy(?:  +(\d)|: (cannot run))", text, re.MULTILINE).groups()


@after_one_round
def test_every_case_is_measured(printed):
    for case in ("4 × 6.4 MB", "160 × 16 kB"):
        assert re.search(rf"^{re.escape(case)}( +[\d.]+ \(.*?\)){{3}} +[\d.]+$", printed, re.MULTILINE)


@after_one_round
def test_all_contenders_train_to_the_same_weights(printed):
    assert towers_of_the_peer(printed) == (("1", None) if IS_TF2 else (None, "cannot run"))


@pytest.mark.skipif(not IS_TF2, reason="TensorFlow 1 has no public MultiWorkerMirroredStrategy")
def test_the_peer_on_every_device_trains_to_the_same_weights():
    program = runpy.run_path(str(EVERY_DEVICE))
    assert towers_of_the_peer(printed_by(program["run"], ["--hosts", "2", *ONE_ROUND])) == ("2", None)


def test_the_cases_are_what_their_names_say():
    large, small = (case.shapes for case in bench_hosts.cases(["/cpu:0", "/cpu:1"]).values())
    assert [shape.dense_bytes for shape in large] == [6_400_000] * 4
    assert [shape.dense_bytes for shape in small] == [16_000] * 160


def test_hosts_run_the_same_command_and_no_address_is_given_twice_even_if_each_drawing_is_the_same(monkeypatch):
    started = {}

    def start(command, environment):
        started.update(command=command, hosts=json.loads(environment["TF_CONFIG"])["cluster"]["worker"])
        raise ClusterError("enough")

    monkeypatch.setattr(launcher, "_start_process", start)
    for module in (launcher, bench_hosts):
        monkeypatch.setattr(module, "free_addresses", lambda count: [f"127.0.0.1:{5000 + k}" for k in range(count)])
    asked = ["bench", "hosts", "3", "--devices", "5", "--rounds", "7"]
    assert cli.main(asked) == 2
    command = [sys.executable, "-m", "hier_allreduce.cli", *asked, "--peers"]
    assert started["command"][: len(command)] == command
    addresses = started["command"][len(command) :]
    assert len(addresses) == len(started["hosts"]) == 3
    assert len({*addresses, *started["hosts"]}) == 6
