"""``hier-allreduce tune``: its options, exit status and files."""

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.timed_programs import WAITS, left_over

from hier_allreduce import Strategy
from hier_allreduce_tools import main
from hier_allreduce_tools.tune.progress import Progress

FASTER = "train(200, 9.0 if algorithm == 'tree' else 10.0)"
ONLY = ["--only", "tree", "--minutes", "5"]


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    monkeypatch.setattr("hier_allreduce_tools.tune.rounds.MOST_ROUNDS", 6)


def test_the_fastest_candidate_is_written_with_the_table(program, capsys):
    assert main(["tune", *ONLY, "-o", "new/best.yaml", "--", *program(FASTER)]) == 0
    out = capsys.readouterr().out
    assert "tree takes 10% less time a step" in out and "← use this" in out
    assert Strategy.load("new/best.yaml") == Strategy("tree", missing="zeros")
    written = Path("new/best.yaml").read_text(encoding="utf-8")
    assert "# use tree, and not the program as it is" in written and "null" not in written
    # its own file is written again, but none of somebody else
    assert main(["tune", *ONLY, "-o", "new/best.yaml", "--", *program(FASTER)]) == 0


FLAT = {"algorithm": "flat", "chunk_bytes": 8 << 20, "sparse": "rows"}
IN_GROUPS = {"algorithm": "hierarchical", "groups": [[0, 2], [1, 3]]}
OWN = {"algorithm": None, "sparse": "rows"}  # a function


@pytest.mark.parametrize(
    ("kept", "name", "strategy"),
    [
        (IN_GROUPS, "no-edges", Strategy("hierarchical", None, ((0, 2), (1, 3)), edges=False)),
        (FLAT, "no-edges", Strategy("flat", 8 << 20, sparse="rows", edges=False)),
        (FLAT, "tree", Strategy("tree", sparse="rows")),
        (OWN, "tree", Strategy("tree", sparse="rows")),
    ],
)
def test_the_file_has_what_was_measured(program, kept, name, strategy):
    command = program(f"train(200, 9.0 if asked.changes else 10.0, kept={kept})")
    options = ["--only", name, "--minutes", "5", "-o", "best.yaml"]
    assert main(["tune", *options, "--", *command]) == 0
    assert Strategy.load("best.yaml") == strategy


def test_a_function_of_the_program_is_in_no_file(program, capsys):
    command = program(f"train(200, 9.0 if asked.changes else 10.0, kept={OWN})")
    options = ["--only", "no-edges", "--minutes", "5", "-o", "best.yaml"]
    assert main(["tune", *options, "--", *command]) == 0
    assert (
        "best.yaml is not written: a file cannot have the function that is your algorithm; write"
        " edges=False into your Strategy" in capsys.readouterr().err
    )
    assert not Path("best.yaml").exists()


@pytest.fixture
def others_file(tmp_path):
    """``others_file(kind)``: the path of a file that ``tune`` has not written."""

    def others_file(kind):
        path = tmp_path / kind
        if kind == "pipe":
            os.mkfifo(str(path))
        elif kind == "link to nothing":
            path.symlink_to(tmp_path / "nothing")
        elif kind == "link":
            path.symlink_to(tmp_path / "train.py")
        elif kind == "strategy":
            path.write_text("algorithm: flat\n", encoding="utf-8")
        return path

    return others_file


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("train.py", "tune has not written it: choose another name"),
        ("link", "tune has not written it: choose another name"),
        ("strategy", "tune has not written it: choose another name"),
        ("pipe", "exists, and is no file"),
        ("link to nothing", "exists, and is no file"),
    ],
)
def test_nothing_of_others_is_overwritten(program, others_file, capsys, kind, fault):
    command = program(FASTER)
    path = others_file(kind)
    assert main(["tune", *ONLY, "-o", str(path), "--", *command]) == 2
    error = capsys.readouterr().err
    assert f"-o: {str(path)!r}" in error and fault in error and not Path("groups").exists()
    assert FASTER in Path("train.py").read_text(encoding="utf-8")


def test_a_program_that_stays_gets_no_file_and_no_folder(program, capsys):
    command = program("train(200)")
    assert main(["tune", *ONLY, "-o", "new/best.yaml", "--json", "--", *command]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["best"] is None and not Path("new").exists()
    assert "new/best.yaml is not written: keep the program as it is: no other one is faster" in err


@pytest.mark.parametrize("package", ["psutil", "tqdm"])
def test_a_missing_package_is_named_before_any_run(program, monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(sys, "meta_path", [])
    assert main(["tune", *ONLY, "--", *program(FASTER)]) == 2
    error = capsys.readouterr().err
    assert f'tune needs {package}: python -m pip install ".[commands]"' in error
    assert error.count("\n") == 1 and not Path("groups").exists()


@pytest.mark.parametrize(
    "text", ["if algorithm:\n    build()\n    time.sleep(1000)\ntrain(200)", "sys.exit('no data')"]
)
def test_the_status_is_1_if_nothing_can_be_compared(program, text):
    assert main(["tune", *ONLY, "--patience", "1", "--", *program(text)]) == 1
    assert not left_over()


def test_ctrl_c_ends_the_program_and_prints_what_there_is(program):
    command = program("if algorithm:\n    time.sleep(1000)\ntrain(200)")
    ours = [sys.executable, "-m", "hier_allreduce", "tune", *ONLY, "--json", "--", *command]
    # a test run in the background ignores Ctrl-C, and its children would too
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        ours, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed
    ) as process:
        while not Path("groups").exists() or len(Path("groups").read_text().split()) < 2:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and not left_over()
    (row,) = json.loads(out)["candidates"]
    assert row["candidate"] == "the program as it is" and row["step"] == pytest.approx(0.01)


def test_nohup_lets_it_outlive_its_terminal(program):
    ours = [sys.executable, "-m", "hier_allreduce", "tune", "--only", "tree", "--minutes", "20s"]
    ignore = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    with subprocess.Popen(
        [*ours, "--", *program(FASTER)],
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


def test_a_run_that_cannot_start_leaves_the_table_of_those_before(program, capsys):
    command = program("train(200)\nif asked.changes:\n    Path('start').unlink()")
    Path("start").write_text(f"#!/bin/sh\nexec {' '.join(command)}\n", encoding="utf-8")
    Path("start").chmod(0o755)
    assert main(["tune", *ONLY, "--", "./start"]) == 2
    out, err = capsys.readouterr()
    assert "\nthe program as it is " in out and "\ntree " in out
    last = err.splitlines()[-1]
    assert last.startswith("hier-allreduce tune: ") and "'./start'" in last and not left_over()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a program: hier-allreduce tune -- python train.py"),
        (["noop.py"], "write -- before the program: hier-allreduce tune -- python noop.py"),
        (["--", "noop.py"], "'noop.py' cannot be started; write: hier-allreduce tune -- python no"),
        (["--", "no-such-program"], "'no-such-program' cannot be started"),
        (["--", "python", "trian.py"], "'trian.py': there is no such file in"),
        (["-output", "best.yaml", "--", "python"], "-output: no such option; write -o FILE"),
        (
            ["--only", "flat", "tree", "--", "python"],
            "'tree' belongs to no option: names have com",
        ),
        (
            ["--only", "hierarchica", "--", "python"],
            "--only: 'hierarchica' is no candidate; there are",
        ),
        (["--only", "", "--", "python"], "--only: '' is no candidate; there are auto, flat,"),
        (["--minutes", "soon", "--", "python"], "--minutes: 'soon': expected a time above 0"),
    ],
)
def test_errors_have_one_line(program, arguments, message, capsys):
    program("")
    assert main(["tune", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "text", "seconds"),
    [
        ("minutes", "5", 300),
        ("minutes", "5min", 300),
        ("minutes", "90s", 90),
        ("minutes", "24h", 86400),
        ("patience", "60", 60),
        ("patience", "2min", 120),
        ("patience", "0.5h", 1800),
    ],
)
def test_times_have_the_usual_unit(option, text, seconds):
    from hier_allreduce_tools.entry import parser

    args = parser().parse_args(["tune", f"--{option}", text, "--", "python", "--minutes", "x"])
    assert getattr(args, option) == seconds and args.program == ["python", "--minutes", "x"]


def test_a_pipe_gets_a_line_every_30_seconds(monkeypatch, capsys):
    clock = SimpleNamespace(monotonic=iter([0, 29, 31, 59, 62]).__next__)
    monkeypatch.setattr("hier_allreduce_tools.tune.progress.time", clock)
    progress = Progress(300.0)
    for look in range(1, 5):
        progress.show(f"look {look}")
    assert capsys.readouterr().err == "31 of 300 s, look 2\n62 of 300 s, look 4\n"


def test_a_line_says_how_far_the_run_is(program, monkeypatch, capsys):
    monkeypatch.setattr("hier_allreduce_tools.tune.progress.BETWEEN_LINES", 0.0)
    main(["tune", "--minutes", "3s", "--", *program(WAITS)])
    assert " of 3 s, the program as it is: no step yet for " in capsys.readouterr().err


def test_several_hosts_are_not_measured(monkeypatch, capsys):
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    assert main(["tune", "--", sys.executable, "-c", "pass"]) == 2
    assert "this environment describes 2 hosts, and tune measures one" in capsys.readouterr().err
