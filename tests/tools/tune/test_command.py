"""``hier-allreduce tune``: its options, questions, exit status, files and signals."""

import functools
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.timed_programs import WAITS, left_over

from hier_allreduce import Strategy
from hier_allreduce_tools import main

FASTER = "train(60, 9.0 if algorithm == 'tree' else 10.0)"
ONLY = ["--yes", "--only", "tree", "--minutes", str(5 / 60)]
COMMAND = [sys.executable, "-m", "hier_allreduce_tools", "tune"]


def last_line_of(*arguments):
    """Return the last line about an error of arguments."""
    done = subprocess.run([*COMMAND, *arguments], stderr=subprocess.PIPE, timeout=250)
    assert done.returncode == 2
    return done.stderr.decode().splitlines()[-1]


def test_the_fastest_candidate_is_written_with_the_table(program, capsys):
    options = [*ONLY[:-1], str(15 / 60), "-o", "best.yaml"]
    assert main(["tune", *options, "--", *program(FASTER)]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"^tree .* 0\.900 \(.*\) +\d+$", out, re.MULTILINE)
    assert "[y/N]" not in err and "Each run starts the program, which really trains" in err
    assert Strategy.load("best.yaml") == Strategy("tree", missing="zeros")
    assert "# use tree\n" in Path("best.yaml").read_text(encoding="utf-8")
    assert main(["tune", *options[:-1], "b.yaml", "--", *program("train(60)")]) == 0
    assert "b.yaml is not written: keep the program as it is" in capsys.readouterr().err


def test_a_function_of_the_program_is_written_into_no_file(program, capsys):
    own = {"algorithm": "<function ring at 0x7f>"}
    text = f"build(strategy=dict({own}, **changes))\nstep(60, 9.0 if changes else 10.0)"
    text = text.replace("**changes", "edges=changes.get('edges', True)")
    Path("plain.yaml").write_text("edges: false\n", encoding="utf-8")
    options = ["--yes", "--only", "plain.yaml", "--minutes", str(15 / 60), "-o", "best.yaml"]
    assert main(["tune", *options, "--", *program(text)]) == 2
    out, err = capsys.readouterr()
    assert out.endswith("\nuse plain.yaml\n")
    assert err.splitlines()[-1].startswith(
        "hier-allreduce tune: algorithm='<function ring at 0x7f>'"
    )
    assert not Path("best.yaml").exists()


@pytest.fixture
def others_file(tmp_path):
    """``others_file(kind)``: the path of a file that ``tune`` has not written."""

    def others_file(kind):
        path = tmp_path / kind
        if kind == "pipe":
            os.mkfifo(str(path))
        elif kind == "link":
            path.symlink_to(tmp_path / "train.py")
        elif kind == "strategy":
            path.write_text("algorithm: flat\n", encoding="utf-8")
        return path

    return others_file


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("train.py", "exists, or its folder cannot be written"),
        ("link", "exists, or its folder cannot be written"),
        ("strategy", "exists, or its folder cannot be written"),
        ("pipe", "exists, or its folder cannot be written"),
    ],
)
def test_nothing_of_others_is_overwritten(program, others_file, kind, fault):
    command = program(FASTER)
    path = others_file(kind)
    error = last_line_of(*ONLY, "-o", str(path), "--", *command)
    assert f"-o: {str(path)!r}" in error and fault in error and not Path("groups").exists()
    assert FASTER in Path("train.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("stdin", ["</dev/null", "<&-"])
def test_without_an_answer_it_starts_nothing_unless_that_is_meant(program, stdin):
    command = [*COMMAND, "--only", "tree", "--", *program(FASTER)]
    command = ["sh", "-c", f'exec "$@" {stdin}', "sh", *command]
    done = subprocess.run(command, stderr=subprocess.PIPE, timeout=250)
    said = done.stderr.decode()
    assert done.returncode == 1 and not Path("groups").exists()
    assert "which really trains" in said and "goes into a new folder" in said
    assert said.endswith("nothing was started; --yes starts without asking\n")


@pytest.mark.parametrize(("answer", "status"), [("y\n", 0), ("n\n", 1), ("\n", 1)])
def test_on_a_terminal_it_waits_for_a_y(program, answer, status):
    command = [*COMMAND, *ONLY[1:], "-o", "best.yaml", "--", *program(FASTER)]
    writing, reading = pty.openpty()
    with subprocess.Popen(
        command, stdin=reading, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        asked = b""
        while not asked.endswith(b"[y/N] "):
            assert process.poll() is None and process.stderr is not None
            asked += process.stderr.read(1)
        assert not Path("groups").exists()
        assert b'"tune" if "HIER_ALLREDUCE_TUNE" in os.environ else "train_log"' in asked
        os.write(writing, answer.encode())
        process.communicate(timeout=120)
    os.close(writing)
    os.close(reading)
    assert process.returncode == status and Path("groups").exists() == (status == 0)


@pytest.mark.parametrize(
    "text", ["if algorithm:\n    build()\n    time.sleep(1000)\ntrain(60)", "sys.exit('no data')"]
)
def test_the_status_is_1_if_nothing_can_be_compared(program, text):
    assert main(["tune", *ONLY, "--patience", "1", "--", *program(text)]) == 1
    assert not left_over()


def test_a_rough_answer_is_continued_from_the_journal(program, capsys):
    slow = "time.sleep(0.5)\n" + FASTER
    assert main(["tune", *ONLY, "--", *program(slow)]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"^tree .* 0\.900 \(rough\) +\d$", out, re.MULTILINE)
    while "use tree" not in out:  # once with more minutes, and more often on a busy machine
        (missing,) = re.findall(r"for a certain answer (\d) more pairs of runs are missing", err)
        (again,) = re.findall(r"hier-allreduce (tune --continue .*)", err)
        assert main([*again.split()[:-1], str(8 / 60), "--yes"]) == 0
        out, err = capsys.readouterr()
    assert out.endswith("\nuse tree\n") and int(missing) < 8
    # it has the earlier runs
    (runs,) = re.findall(r"^tree .*\) +(\d+)$", out, re.MULTILINE)
    assert int(runs) >= 8


@pytest.mark.parametrize("text", ["", "no JSON\n", '{"run": 1}\n', '{"program": ["x"]}\n'])
def test_another_file_is_no_journal(tmp_path, capsys, text):
    (tmp_path / "file").write_text(text)
    assert main(["tune", "--continue", str(tmp_path / "file"), "--yes"]) == 2
    error = capsys.readouterr().err
    assert "file is no journal of tune" in error.splitlines()[-1]


def test_a_run_that_cannot_start_is_one_line_and_those_before_are_in_the_journal(program, capsys):
    command = program("train(60)\nif changes:\n    Path('start').unlink()")
    Path("start").write_text(f"#!/bin/sh\nexec {' '.join(command)}\n", encoding="utf-8")
    Path("start").chmod(0o755)
    assert main(["tune", *ONLY, "--", "./start"]) == 2
    err = capsys.readouterr().err
    last = err.splitlines()[-1]
    assert last.startswith("hier-allreduce tune: ") and "'./start'" in last and not left_over()
    (journal,) = re.findall(r"go into (/\S+/journal.jsonl)\.$", err, re.MULTILINE)
    Path("start").write_text(f"#!/bin/sh\nexec {' '.join(command)}\n", encoding="utf-8")
    Path("start").chmod(0o755)
    main(["tune", "--yes", "--continue", journal, "--minutes", "0.001"])
    assert "\ntree " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments PROGRAM --continue is required"),
        (["--continue", "j", "--", "python"], "PROGRAM: not allowed with argument --continue"),
        (["--only", "hierarchica", "--", "python"], "nor one of the strategies; there are auto, "),
        (["--minutes", "soon", "--", "python"], "--minutes: invalid float value: 'soon'"),
    ],
)
def test_errors_end_in_one_line(program, arguments, message):
    program("")
    assert message in last_line_of("--yes", *arguments)


@pytest.mark.parametrize("arguments", [["--", "no-such-file"], ["--continue", "no-such-file"]])
def test_what_does_not_exist_is_named(program, arguments):
    program("")
    last = last_line_of("--yes", *arguments)
    assert "No such file or directory: '" in last and "such-file'" in last


def processes_of(path):
    """Return the processes that have a path among their arguments, even before they run it."""
    listed = subprocess.run(
        ["ps", "-ewwo", "stat=,args="], stdout=subprocess.PIPE, check=True, timeout=60
    ).stdout.decode()
    return [line for line in listed.splitlines() if str(path) in line and line[0] != "Z"]


@pytest.mark.parametrize("runs", [0, 1, 2, 5])
@pytest.mark.parametrize("ending", ["SIGINT", "SIGQUIT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_no_signal_leaves_a_process_behind(program, tmp_path, ending, runs):
    """Each comes when so many programs have begun; the next may be about to."""
    python, script = program(FASTER + ("" if runs < 5 else WAITS))
    path = tmp_path / script
    # a test that runs in the background, or under nohup, ignores some, and its children would, too
    heeded = signal.SIGTERM if ending == "SIGKILL" else getattr(signal, ending)
    heed = functools.partial(signal.signal, heeded, signal.SIG_DFL)
    command = [*COMMAND, "--yes", "--only", "tree", "--minutes", "1", "--", python, str(path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=heed
    ) as process:
        assert processes_of(path)
        while runs and not (tmp_path / "groups").exists():
            assert process.poll() is None
        while runs < 5 and len((tmp_path / "groups").read_text().split() if runs else []) < runs:
            assert process.poll() is None
        process.send_signal(getattr(signal, ending))
        out, _ = process.communicate(timeout=60)
    while ending == "SIGKILL" and processes_of(path):  # the kernel ends the program afterwards
        pass
    assert not processes_of(path)
    if runs == 2 and ending != "SIGKILL":
        assert process.returncode == 130 and "the program as it is" in out.decode()


def test_nohup_lets_it_outlive_its_terminal(program):
    ignore = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    with subprocess.Popen(
        [*COMMAND, *ONLY, "--", *program(FASTER)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=ignore,
    ) as process:
        while not Path("groups").exists():
            assert process.poll() is None
        process.send_signal(signal.SIGHUP)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err.decode()
    assert "tree" in out.decode() and not left_over()
