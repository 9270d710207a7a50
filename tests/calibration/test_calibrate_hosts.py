"""``calibrate`` over several hosts, which are processes on loopback; and the options that it refuses."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.demo import FORKED_HOSTS, forked_command
from helpers.ports import free_addresses

from hier_allreduce.cli import main
from hier_allreduce.topology import Network

# smaller sums and fewer rounds; the hosts are forked from the process that runs this
_QUICK = (
    "import hier_allreduce.calibration as c, hier_allreduce.calibration.network as n;"
    " import hier_allreduce.calibration.network_calibration as t;"
    " c.NETWORK_SIZES = t.NETWORK_SIZES = (4096, 65536, 1 << 20); n.ROUNDS = 2"
)
_DIES = "import os; from hier_allreduce.cluster import NetworkTimer; NetworkTimer.hops = lambda *arguments: os._exit(7)"


def cluster_file(folder, **values):
    """Write a cluster of two hosts on loopback; return the file's path."""
    lines = {"hosts": f"[{', '.join(free_addresses(2))}]", "devices_per_host": 2, "timeout": 12, **values}
    file = folder / "cluster.yaml"
    file.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()), encoding="utf-8")
    return str(file)


def test_two_hosts_write_a_network_that_plan_reads(tmp_path, capsys):
    options = ["calibrate", "-o", "network.yaml", "--noise", "1000"]
    done = forked_command(
        tmp_path,
        "launch",
        "-n",
        "2",
        "--",
        "python",
        "-m",
        "hier_allreduce.cli",
        *options,
        code=f"{FORKED_HOSTS}; {_QUICK}",
    )
    assert done.status == 0, done
    assert "[host 0] written: network.yaml" in done.out and "gRPC copy, GB/s" in done.out
    assert "[host 1] host 1 (127.0.0.1:" in done.out and "[host 1] written" not in done.out
    assert "[host 0] calibrate: copies between hosts" in done.out  # progress
    file = str(tmp_path / "network.yaml")
    network = Network.load(file)
    assert network.nic >= network.engine
    assert main(["plan", "dgx-2", "--hosts", "4", "--network", file]) == 0
    assert "joined by a network measured on 20" in capsys.readouterr().out


def test_a_host_that_ends_while_it_measures_is_named_by_the_other(tmp_path):
    options = [
        "calibrate",
        "--cluster",
        cluster_file(tmp_path),
        "--noise",
        "1000",
        "-o",
        str(tmp_path / "network.yaml"),
    ]

    def run(task):
        return forked_command(tmp_path, *options, "--task", str(task), code=[_QUICK, f"{_QUICK}; {_DIES}"][task])

    with ThreadPoolExecutor(2) as threads:
        other, ended = threads.map(run, range(2))
    assert (other.status, ended.status) == (2, 7), other
    assert "hier-allreduce calibrate: host 1 (127.0.0.1:" in other.err and "its process ended" in other.err
    assert not (tmp_path / "network.yaml").exists()


@pytest.mark.parametrize(
    "options, message",
    [
        (["--task", "1"], "--task is this host's index in a --cluster: give --cluster too"),
        (["--cluster", "loopback-2x4"], "--cluster loopback-2x4 needs --task"),
        (["--cluster", "loopback-2x4", "--task", "2"], "task=2: expected the index of a host, 0 to 1"),
        (["--cluster", "nowhere", "--task", "0"], "'nowhere' is neither a file nor one of the clusters"),
        (["--network", "10gbe"], "--network is for several hosts"),
        (["--cluster", "loopback-2x4", "--task", "0", "--network", "10gb"], "did you mean '10gbe'"),
        (["--cluster", "loopback-2x4", "--task", "0", "--split-gpu", "2"], "--split-gpu is for one host"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_starts(options, message, capsys, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert main(["calibrate", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, message",
    [
        ("hosts: [127.0.0.1:5001]\ndevices_per_host: 2\n", "between one host and itself there is no network"),
        ("hosts: [127.0.0.1:5001, here]\ndevices_per_host: 2\n", "'here' is not an address"),
        ("hosts: [127.0.0.1:5001, 127.0.0.1:5002]\n", "devices_per_host is missing"),
        (
            "hosts: [127.0.0.1:5001, 127.0.0.1:5002]\ndevices_per_host: 2\nnetwork: wifi\n",
            "'wifi' is neither a file nor",
        ),
    ],
)
def test_a_broken_file_is_refused_by_its_name(tmp_path, text, message, capsys):
    file = tmp_path / "broken.yaml"
    file.write_text(text, encoding="utf-8")
    assert main(["calibrate", "--cluster", str(file), "--task", "0"]) == 2
    error = capsys.readouterr().err
    assert message in error and str(file) in error


def test_broken_hosts_in_the_environment_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["127.0.0.1:5001"')
    assert main(["calibrate"]) == 2
    assert "TF_CONFIG=" in capsys.readouterr().err


@pytest.mark.parametrize("index", ["-1", "one", "9999999"])
def test_an_index_that_is_none_is_refused(index, capsys):
    with pytest.raises(SystemExit):
        main(["calibrate", "--cluster", "loopback-2x4", "--task", index])
    assert "expected the index of a host" in capsys.readouterr().err
