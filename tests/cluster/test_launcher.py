"""``hier-allreduce launch``: a process for each host with its TF_CONFIG, all stopped when one fails."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys

import pytest

from hier_allreduce.cli.entry import main
from hier_allreduce.cluster.launcher import launch

SECONDS = 150  # for anything that should happen
PLACE = "import json, os; place = json.loads(os.environ['TF_CONFIG']); task = place['task']['index']\n"


def launched(hosts, program, restarts=0):
    """Return the exit status and the lines of a Python program."""
    lines = []
    return launch(hosts, [sys.executable, "-c", PLACE + program], lines.append, restarts), lines


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


def test_no_line_is_lost_however_late_it_is_read():
    """Nothing is read before the process has ended; its child holds the pipe open for much longer."""
    program = (
        "import os, subprocess, sys; subprocess.Popen(['sleep', '1000']); print(os.getpid());"
        "print('line\\n' * 5000 + 'without an end', end='')"
    )
    lines = []

    def write(line):
        if not lines:
            with contextlib.suppress(ChildProcessError):  # waited for already
                os.waitid(os.P_PID, int(line.split()[-1]), os.WEXITED | os.WNOWAIT)
        lines.append(line)

    assert launch(1, [sys.executable, "-c", program], write) == 0
    assert lines[1:] == ["[host 0] line\n"] * 5000 + ["[host 0] without an end\n"]


def test_a_command_goes_through_no_shell(tmp_path):
    words = [f"; touch {tmp_path / 'made'}", "$(ls)", "`ls`", "*"]
    lines = []
    assert launch(1, [sys.executable, "-c", "import sys; print(sys.argv[1:])", *words], lines.append) == 0
    assert lines == [f"[host 0] {words}\n"] and not list(tmp_path.iterdir())


@pytest.fixture
def pipe(tmp_path):
    """A named pipe for hosts to write to, and its end to read from."""
    name = str(tmp_path / "pipe")
    os.mkfifo(name)
    end = os.open(name, os.O_RDONLY | os.O_NONBLOCK)  # without waiting for a writer
    yield name, end
    os.close(end)


def heard(end):
    """Return the next letter from a pipe; nothing once all processes that could write one have ended."""
    assert select.select([end], [], [], SECONDS)[0], "no process writes, but one is alive"
    return os.read(end, 1)


@pytest.mark.parametrize(
    ("death", "status"),
    [("raise SystemExit(7)", 7), ("os.kill(os.getpid(), 9)", 137)],
    ids=["exit", "signal"],
)
def test_when_one_fails_the_others_and_children_are_ended(death, status, tmp_path, pipe):
    """Host 1 fails once each host has reported that its child runs; all children hold the pipe open."""
    name, end = pipe
    os.mkfifo(str(tmp_path / "started"))
    waiting = os.open(str(tmp_path / "started"), os.O_RDWR)
    program = (
        "import subprocess\n"
        f"pipe = open({name!r}, 'wb')\n"
        "child = subprocess.Popen(['sleep', '1000'], stdout=pipe)\n"
        f"started = open({str(tmp_path / 'started')!r}, 'r+b', buffering=0)\n"
        "started.write(b'x')\n"
        f"if task == 1:\n    [started.read(1) for _ in range(3)]\n    {death}\n"
        "child.wait()"
    )
    code, lines = launched(3, program)
    os.close(waiting)
    assert code == status
    assert f"[host 1] ended with exit status {status}; the others are stopped\n" in lines
    assert heard(end) == b""


@pytest.mark.parametrize(("fails", "status", "tries"), [(1, 0, 2), (9, 9, 3)], ids=["once", "always"])
def test_all_hosts_are_started_again_after_a_fault(fails, status, tries, tmp_path):
    """Host 1 fails with the number of its try; host 0 never ends in such a try."""
    program = (
        f"import sys, time; from pathlib import Path; tried = Path({str(tmp_path)!r}, str(task))\n"
        "with open(tried, 'a') as file: file.write('x')\n"
        "number = len(tried.read_text()); print('try', number)\n"
        f"if number <= {fails}: sys.exit(6 + number) if task == 1 else time.sleep(1000)"
    )
    code, lines = launched(2, program, restarts=2)
    assert code == status
    assert [line for line in lines if line.startswith("[host 1] try")] == [
        f"[host 1] try {n + 1}\n" for n in range(tries)
    ]
    again = [line for line in lines if line.startswith("all hosts")]
    assert again == [f"all hosts are started again: restart {n} of 2\n" for n in range(1, tries)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_command_ends_all_hosts(number, pipe):
    name, end = pipe
    program = f"import time\npipe = open({name!r}, 'wb', buffering=0)\npipe.write(b'x')\ntime.sleep(1000)"
    arguments = ["launch", "-n", "2", "--", sys.executable, "-c", program]
    # under nohup, SIGHUP is ignored and stays so in child processes
    command = subprocess.Popen(
        [sys.executable, "-m", "hier_allreduce", *arguments],
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    assert [heard(end), heard(end)] == [b"x", b"x"]
    command.send_signal(number)
    assert command.wait(SECONDS) == 128 + number
    assert heard(end) == b""


def test_hosts_whose_lines_nobody_reads_are_stopped():
    """As with ``hier-allreduce launch … | head``; they would wait for ever."""
    endless = [sys.executable, "-c", "while True: print('x' * 1000)"]
    arguments = [sys.executable, "-m", "hier_allreduce", "launch", "-n", "2", "--", *endless]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as command:
        try:
            assert command.stdout.readline().startswith(b"[host ")
            command.stdout.close()
            assert command.wait(SECONDS) == 0
        finally:
            command.terminate()


def test_the_command_passes_the_programs_own_options_on(capsys):
    assert main(["launch", "-n", "1", "--", sys.executable, "-c", "import sys; print(sys.argv)", "-n", "5"]) == 0
    assert capsys.readouterr().out == "[host 0] ['-c', '-n', '5']\n"


def test_on_windows_it_says_what_to_do_instead(monkeypatch, capsys):
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setattr("hier_allreduce.cluster.launcher._start_process", None)
    assert main(["launch", "-n", "2", "--", "true"]) == 2
    error = capsys.readouterr().err
    assert "cannot be started on Windows" in error and "TF_CONFIG" in error and error.count("\n") == 1


def test_a_program_that_cannot_start_is_an_error_of_one_line(capsys):
    for arguments, words in (
        (["-n", "2"], "no program"),
        (["-n", "1", "--", "no-such-program"], "no-such-program cannot be started"),
    ):
        assert main(["launch", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
