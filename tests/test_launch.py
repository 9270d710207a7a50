"""``hier-allreduce launch``: one process for each host, each knowing its place, all ended when one fails."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hier_allreduce.cli import main
from hier_allreduce.launcher import launch

PLACE = "import json, os; place = json.loads(os.environ['TF_CONFIG']); task = place['task']['index']\n"


def launched(hosts, program):
    """The exit status and the lines of a Python program."""
    lines = []
    return launch(hosts, [sys.executable, "-c", PLACE + program], lines.append), lines


def test_each_host_gets_its_place_and_its_lines_are_marked():
    status, lines = launched(3, "import sys; print(json.dumps(place), flush=True); print('ärger', file=sys.stderr)")
    assert status == 0
    assert sorted(line for line in lines if "rger" in line)[2].startswith("[host 2] ")
    places = {line[:9]: json.loads(line[9:]) for line in lines if "rger" not in line}
    assert {key: place["task"] for key, place in places.items()} == {
        f"[host {task}] ": {"type": "worker", "index": task} for task in range(3)
    }
    (hosts,) = {tuple(place["cluster"]["worker"]) for place in places.values()}
    assert len(set(hosts)) == 3
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # as before
    assert all(host.startswith("127.0.0.1:") for host in hosts)


def lives(process):
    """Whether a process runs: it may wait for its parent to hear of its end."""
    try:
        state = Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


@pytest.mark.parametrize(
    ("death", "status"),
    [("raise SystemExit(7)", 7), ("os.kill(os.getpid(), 9)", 137)],
    ids=["exit", "signal"],
)
def test_when_one_fails_the_others_and_what_they_started_are_ended(death, status):
    """Host 1 fails once the others have said which process they have started."""
    with tempfile.TemporaryDirectory() as folder:
        others = (
            "import pathlib, subprocess\n"
            f"folder = pathlib.Path({folder!r})\n"
            "child = subprocess.Popen(['sleep', '100'])\n"
            "(folder / str(child.pid)).touch()\n"
            f"if task == 1:\n    while len(list(folder.iterdir())) < 3: pass\n    {death}\n"
            "child.wait()"
        )
        code, lines = launched(3, others)
        assert code == status
        assert f"[host 1] ended with exit status {status}; the others are stopped\n" in lines
        children = os.listdir(folder)
        assert len(children) == 3
        # the signal was sent; the system may take a moment to act on it
        patience = time.monotonic() + 10
        while any(map(lives, children)) and time.monotonic() < patience:
            pass
        assert [child for child in children if lives(child)] == []


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no such signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_who_ends_the_command_ends_all_hosts(number):
    with tempfile.TemporaryDirectory() as folder:
        program = f"import os, pathlib, time\n(pathlib.Path({folder!r}) / str(os.getpid())).touch()\ntime.sleep(100)"
        arguments = ["launch", "-n", "2", "--", sys.executable, "-c", program]
        # under nohup SIGHUP is ignored, and stays so in what is started
        command = subprocess.Popen(
            [sys.executable, "-m", "hier_allreduce.cli", *arguments],
            preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
        )
        patience = time.monotonic() + 60
        while len(os.listdir(folder)) < 2 and time.monotonic() < patience:
            pass
        command.send_signal(number)
        assert command.wait(30) == 128 + number
        hosts = os.listdir(folder)
        assert len(hosts) == 2 and not any(map(lives, hosts))


def test_hosts_whose_lines_nobody_reads_are_stopped():
    """As of ``hier-allreduce launch … | head``; they would wait for ever."""
    endless = [sys.executable, "-c", "while True: print('x' * 1000)"]
    arguments = [sys.executable, "-m", "hier_allreduce.cli", "launch", "-n", "2", "--", *endless]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as command:
        try:
            assert command.stdout.readline().startswith(b"[host ")
            command.stdout.close()
            assert command.wait(60) == 0
        finally:
            command.terminate()


def test_the_command_passes_the_programs_own_options_on(capsys):
    assert main(["launch", "-n", "1", "--", sys.executable, "-c", "import sys; print(sys.argv)", "-n", "5"]) == 0
    assert capsys.readouterr().out == "[host 0] ['-c', '-n', '5']\n"


def test_what_cannot_be_started_is_one_line(capsys):
    for arguments, words in (
        (["-n", "2"], "no program"),
        (["-n", "0", "--", "true"], "0 hosts"),
        (["-n", "1", "--", "no-such-program"], "no-such-program cannot be started"),
    ):
        assert main(["launch", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
