"""Programs that train, hang, stop, die, fork: what ``tune`` says about them, and that nobody is left over.

They need no TensorFlow: they write the clock file themselves, so that their steps take exactly as long as they say.
"""

import functools
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hier_allreduce import HierAllreduceError, Strategy, tune
from hier_allreduce.commands import main
from hier_allreduce.planning.candidate import Candidate

BEGIN = """
import os, signal, sys, time
from pathlib import Path
from hier_allreduce.measured import measurement

with open("groups", "a") as file:
    print(os.getpgrp(), file=file)
candidate, slow = measurement(), 1.0

def train(steps):
    candidate.note(towers=4, gpus=False, bytes=1 << 20, chunk_bytes=8 << 20, algorithm="flat", is_default=True,
                   kept={"missing": "zeros"})
    with open(candidate.clock, "a") as file:
        for step in range(steps):
            print(100 + 0.010 * slow * step, file=file)
"""
FOREVER = "\nprint('waits', flush=True)\ntime.sleep(1000)\n"
SLOWER = """
slow = {"": 1.0, "4194304": 0.9, "16777216": 1.2, "0": 1.1}[str(candidate.changes.get("chunk_bytes", ""))]
train(200)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """``program(text)``: the command of a program that runs in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def program(text):
        Path("train.py").write_text(BEGIN + text, encoding="utf-8")
        return [sys.executable, "train.py"]

    return program


def left_over():
    """Return the process groups of programs in which a process lives."""
    groups = set(Path("groups").read_text().split())
    assert groups
    listed = subprocess.run(
        ["ps", "-eo", "pgid=,stat="], stdout=subprocess.PIPE, check=True, timeout=60
    ).stdout.decode()
    return groups & {line.split()[0] for line in listed.splitlines() if "Z" not in line}


def runs_of(command):
    return list(tune.measure_all(command, 60.0, 1.0, ["rule"], Path.cwd()))


def test_a_program_without_a_step_hangs(program, monkeypatch):
    monkeypatch.setattr("hier_allreduce.tune.runs.START", 5.0)
    with pytest.raises(
        HierAllreduceError, match=r"no all-reduce.*hung: no step at all for 5 s.*last line: waits"
    ):
        runs_of(program(FOREVER))
    assert not left_over()


def test_a_program_that_dies_before_its_first_allreduce_is_an_error(program):
    with pytest.raises(
        HierAllreduceError, match=r"no all-reduce of this package: failed: status 1 .*no data"
    ):
        runs_of(program("candidate.note(front_end='keras')\nsys.exit('no data')"))


def test_a_program_that_stops_making_steps_hangs_with_its_last_line(program):
    only_five, *_ = runs_of(program("train(5)" + FOREVER))
    assert only_five.fault == "hung: no step after step 5 for 1 s, killed; last line: waits"
    assert only_five.output.read_text() == "waits\n" and not left_over()


@pytest.mark.parametrize(
    ("end", "fault"),
    [
        ("", "ended after 5 steps, 31 are needed"),
        (
            "raise KeyError('weights')",
            "failed: status 1 after 5 steps; last line: KeyError: 'weights'",
        ),
        (
            "sys.exit('OOM when allocating x')",
            "failed: status 1 after 5 steps, out of memory; last line: OOM when all",
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", "failed: SIGKILL after 5 steps; last line: none"),
    ],
)
def test_a_program_that_ends_too_early_has_failed(program, end, fault):
    first, *_ = runs_of(program(f"train(5)\n{end}"))
    assert first.fault.startswith(fault) and not left_over()


def test_children_that_ignore_sigterm_are_ended_too(program, monkeypatch):
    monkeypatch.setattr("hier_allreduce.tune.runs.MERCY", 0.3)
    forks = "train(200)\nif os.fork() == 0:\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    time.sleep(1000)"
    assert [len(run.seconds) for run in runs_of(program(forks))] == [9] * 4
    assert not left_over()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the environment of a process")
def test_children_that_have_left_the_process_group_are_ended_too(program):
    leaves = (
        "import subprocess\nchild = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
    )
    runs_of(
        program(
            f"{leaves}with open('groups', 'a') as file:\n    print(child.pid, file=file)\ntrain(200)"
        )
    )
    assert not left_over()


def test_the_longest_time_is_said_after_the_first_run(program, capsys):
    runs_of(program("train(40)\ntime.sleep(2)"))
    assert (
        "4 runs of 31 to 2011 steps: at most about 1.0 min; --only A,B" in capsys.readouterr().err
    )
    again = Path.cwd() / "again"
    again.mkdir()
    list(tune.measure_all(program("time.sleep(1)\ntrain(40)"), 0.1, 9.0, ["rule"], again))
    assert (
        "at most about 0.0 min" not in capsys.readouterr().err
    )  # runs of 31 steps take longer than 0.1 s


def test_ctrl_c_ends_the_program_and_prints_what_there_is(program):
    command = program("if candidate.changes:\n    time.sleep(1000)\ntrain(200)")
    ours = [
        sys.executable,
        "-m",
        "hier_allreduce",
        "tune",
        "--only",
        "rule",
        "--json",
        "--",
        *command,
    ]
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
    (now,) = json.loads(out)["candidates"]
    assert now["candidate"] == "now" and now["step"] == pytest.approx(0.01)


def test_the_fastest_candidate_is_written_with_the_table(program, capsys):
    assert main(["tune", "-o", "new/best.yaml", "--", *program(SLOWER)]) == 0
    out = capsys.readouterr().out
    steps = [line.split()[:2] for line in out.splitlines()[1:6]]
    assert steps == [
        ["now", "10"],
        ["tower-0-sum", "11"],
        ["rule", "9"],
        ["half-chunks", "9"],
        ["double-chunks", "12"],
    ]
    assert "← best" in out.splitlines()[3] and out.endswith("use rule\n")
    assert Strategy.load("new/best.yaml") == Strategy("flat", chunk_bytes=4 << 20, missing="zeros")
    assert "# now " in Path("new/best.yaml").read_text(encoding="utf-8")


def test_a_program_that_is_kept_gets_no_file_and_is_told_so(program, capsys):
    assert main(["tune", "--only", "rule", "-o", "best.yaml", "--", *program("train(200)")]) == 0
    out, err = capsys.readouterr()
    assert (
        "keep the program as it is" in out
        and "\nbest.yaml is not written: " in err
        and not Path("best.yaml").exists()
    )


def runs_with(**milliseconds):
    """Return two runs of every candidate: a number is the step of both, two are those of the first and the second."""
    runs, peers = [], {"NcclAllReduce": "NcclAllReduce"}
    for name, steps in milliseconds.items():
        for step in steps if isinstance(steps, tuple) else (steps, steps):
            fault = "hung: no step" if step is None else ""
            runs.append(
                tune.Run(
                    Candidate(name, peers.get(name, "")),
                    [] if fault else [step * 1e-3] * 5,
                    Path("log"),
                    fault,
                )
            )
    return runs


@pytest.mark.parametrize(
    ("milliseconds", "advice"),
    [
        ({"now": 100, "NcclAllReduce": 99, "rule": 98}, "keep NcclAllReduce"),
        ({"now": 100, "NcclAllReduce": 101, "rule": 100}, "keep NcclAllReduce"),
        ({"now": 100, "NcclAllReduce": 120, "rule": 99}, "keep the program as it is"),
        ({"now": 100, "NcclAllReduce": 120, "rule": 97}, "use rule"),
        ({"now": (96, 104), "rule": 95}, "keep the program as it is"),
        ({"now": 100, "rule": (92, 98)}, "keep the program as it is"),
        ({"now": 100, "rule": (92, 95)}, "use rule"),
        (
            {"now": (98, 102), "rule": (34, 70)},
            "nothing is decided: two runs of rule differ by 106%",
        ),
        (
            {"now": (100, 150), "NcclAllReduce": 140},
            "nothing is decided: two runs of now differ by 50%",
        ),
        ({"now": (100,), "rule": (50,)}, "nothing is decided: no candidate has run twice"),
        ({"now": None, "rule": 95}, "use rule"),
        ({"now": None, "NcclAllReduce": 95}, "keep NcclAllReduce"),
        ({"now": None}, "no candidate was measured"),
    ],
)
def test_a_winner_beats_the_noise_and_two_percent(milliseconds, advice):
    found = tune.verdict(runs_with(**milliseconds))
    assert found.advice.startswith(advice) and (found.best is not None) == advice.startswith("use")
    assert advice in tune.report(found)


def test_a_fault_is_in_its_row_of_the_table():
    rows = [
        line.split()
        for line in tune.report(tune.verdict(runs_with(now=None, rule=95))).splitlines()
    ]
    assert rows[1] == ["now", "hung:", "no", "step"] and rows[2] == [
        "rule",
        "95",
        "(95–95)",
        "1.00",
        "0.0%",
        "←",
        "best",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a program: hier-allreduce tune -- python train.py"),
        (
            ["--only", "ruel", "--", "python"],
            r"--only: 'ruel' is no candidate; did you mean 'rule'",
        ),
        (["--", "no-such-program"], "'no-such-program' cannot be started here"),
        (["--patience", "60", "--", "python"], "'60' has no unit; write 60ms or 60s"),
    ],
)
def test_errors_have_one_line(arguments, message, capsys):
    assert main(["tune", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_several_hosts_are_not_measured(monkeypatch, capsys):
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    assert main(["tune", "--", sys.executable, "-c", "pass"]) == 2
    assert "this environment describes 2 hosts, and tune measures one" in capsys.readouterr().err


def test_candidates_fit_the_program():
    facts = {
        "front_end": "keras",
        "towers": 8,
        "gpus": True,
        "bytes": 1 << 20,
        "chunk_bytes": 4 << 20,
    }
    facts.update(algorithm="hierarchical", is_default=False)
    names = [candidate.name for candidate in tune.candidates(facts)]
    assert names[:4] == [
        "now",
        "NcclAllReduce",
        "ReductionToOneDevice",
        "HierarchicalCopyAllReduce",
    ]
    assert names[4:] == ["planned", "rule", "half-chunks", "double-chunks"]
    names = [
        candidate.name
        for candidate in tune.candidates({**facts, "front_end": "tensorpack", "gpus": False})
    ]
    assert names[1:4] == ["tensorpack-hierarchical", "tensorpack-gpu", "tensorpack-cpu"]
    with pytest.raises(HierAllreduceError, match="'float16' is not for this program"):
        tune.candidates(facts, ["float16"])
    (_, half) = tune.candidates({**facts, "front_end": "towers"}, ["float16"])
    assert Strategy(**half.changes).wire_dtype == "float16"
