"""Programs that hang, stop, die, fork: what ``tune`` says, and that nobody is left over."""

import re
import sys
from pathlib import Path

import pytest
from helpers.timed_programs import WAITS, left_over

from hier_allreduce.commands.tune.faults import NothingMeasured, own_last_line
from hier_allreduce.planning.candidate import Candidate

NOW = Candidate("now")


def test_a_program_that_trains_is_measured_in_windows(program, runner):
    run = runner(program("train(200)")).run(NOW, 0.0, 1)
    assert len(run.seconds) == 9 and run.step == pytest.approx(0.01)
    assert not left_over()


def test_a_hang_after_some_steps_has_the_programs_last_line(program, runner):
    run = runner(program("train(5)" + WAITS), patience=1.0).run(NOW, 0.0, 1)
    assert run.fault == "hung: no step after step 5 for 1 s, killed; last line: waits"
    assert run.output.read_text() == "waits\n" and not left_over()


@pytest.mark.parametrize(
    ("end", "fault"),
    [
        ("raise KeyError('w')", "failed: status 1 after 5 steps; last line: KeyError: 'w'"),
        ("sys.exit('OOM when allocating x')", "after 5 steps; out of memory; last line: OOM when"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "failed: SIGKILL after 5 steps; last line: none"),
    ],
)
def test_a_program_that_dies_too_early_has_failed(program, runner, end, fault):
    run = runner(program(f"train(5)\n{end}")).run(NOW, 0.0, 1)
    assert fault in run.fault and not left_over()


def test_a_run_without_enough_time_is_none(program, runner):
    assert runner(program(WAITS), seconds=1.0).run(NOW, 0.0, 1) is None
    assert not left_over()


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("train(5)", "train.py ended after 5 steps, 31 are needed; last line: none: let it train"),
        ("sys.exit('no data')", "failed: status 1 before its first step; last line: no data"),
        (WAITS, "hung: no step at all for 2 s, killed; last line: waits"),
        ("input('really? ')", "the program reads its standard input, which is closed here"),
        ("import torch.nn_", "last line: ModuleNotFoundError: No module named 'torch"),
        ("", "ended after 0 steps, 31 are needed; last line: none: it built no all-reduce of this"),
    ],
)
def test_the_cause_is_named_where_nothing_can_be_measured(program, search, text, cause):
    start_patience = 2.0 if text == WAITS else 60.0
    with pytest.raises(NothingMeasured, match=re.escape(cause)):
        search(program(text), start_patience=start_patience).run_all()
    assert not left_over()


def test_children_that_ignore_sigterm_are_ended_too(program, runner, monkeypatch):
    monkeypatch.setattr("hier_allreduce.commands.tune.run.MERCY", 0.3)
    forks = "train(200)\nif os.fork() == 0:\n"
    forks += "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    time.sleep(1000)"
    assert runner(program(forks)).run(NOW, 0.0, 1).seconds and not left_over()


def test_children_that_have_left_the_process_group_are_ended_too(program, runner):
    leaves = "import subprocess\n"
    leaves += "child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
    leaves += "with open('groups', 'a') as file:\n    print(child.pid, file=file)\ntrain(200)"
    assert runner(program(leaves)).run(NOW, 0.0, 1).seconds and not left_over()


def test_the_last_line_is_the_programs_own():
    text = """Epoch 3\r 12/100 examples
2026-11-25 17:00:00.123456: I tensorflow/core/platform/cpu_feature_guard.cc:210] This TensorFlow …
To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow …
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795629992.339589    2106 port.cc:153] oneDNN custom operations are on.
/usr/lib/python3/x.py:3: DeprecationWarning: old
  warnings.warn(

"""
    assert own_last_line(text) == "12/100 examples"
    assert own_last_line("") == ""


@pytest.mark.parametrize("imports_ours", [False, True])
def test_a_program_that_trains_without_ours_is_ended_with_the_change(
    program, search, imports_ours, monkeypatch
):
    # a package of this name, whose session waits as TensorFlow's does
    folder = Path("tensorflow", "python", "client")
    folder.mkdir(parents=True)
    for package in (folder, *folder.parents):
        (package / "__init__.py").touch() if str(package) != "." else None
    (folder / "session.py").write_text("import time\ndef run():\n    time.sleep(1000)\n")
    monkeypatch.setenv("PYTHONPATH", f"{Path.cwd()}:{':'.join(filter(None, sys.path))}")
    monkeypatch.setattr("hier_allreduce.commands.tune.observer.SEEN_AFTER", 0.4)
    train = "class MirroredStrategy:\n    pass\nstrategy = MirroredStrategy()\n"
    train += "import tensorflow.python.client.session as session\nsession.run()\n"
    Path("own.py").write_text("import hier_allreduce\n" * imports_ours + train)
    with pytest.raises(NothingMeasured, match=r"(?s)TensorFlow runs, but.*cross_device_ops="):
        search([sys.executable, "own.py"], start_patience=120.0).run_all()
