"""Programs that hang, stop, die, fork: what ``tune`` says, and that nobody is left over."""

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import List

import pytest
from helpers.timed_programs import WAITS, left_over

from hier_allreduce_tools.tune.journal import Candidate, Journal
from hier_allreduce_tools.tune.rounds import NothingMeasured, Rounds
from hier_allreduce_tools.tune.run import reason_in

CURRENT = Candidate()


def rounds_of(runner):
    return Rounds(runner, [], print)


@pytest.mark.parametrize("steps", [41, 60, 3000])
def test_a_step_is_the_median_of_three_windows_after_the_first_10(program, runner, steps):
    text = f"""
build()
skipped = [3.0 * step for step in range(10)]
windows = [30 + 0.01 * step + (7 if step > 15 else 0) for step in range({steps - 10})]
tell(*({{"sum": "1", "time": time}} for time in skipped + windows))
"""
    run = runner(program(text)).run(CURRENT, 1)
    assert (run.step, run.fault) == (pytest.approx(0.01), "")
    assert run.built.bytes == 1 << 20 and not left_over()


def test_only_the_sums_of_the_training_count(program, runner):
    evaluates = """
build(2, bytes=8)
build(3)
build(1)
for number in range(50):
    step(1, 0.0, begin=100 + 0.03 * number)
    step(20, 1.0, number=2, begin=100.005 + 0.03 * number)
step(3, number=3)
"""
    run = runner(program(evaluates)).run(CURRENT, 1)
    assert run.step == pytest.approx(0.03) and run.built.bytes == 1 << 20


def test_a_process_of_an_earlier_run_makes_no_steps(program, runner):
    run = runner(program("asked['run'] = 0\ntrain(60)")).run(CURRENT, 1)
    assert run.fault.startswith("ended after 0 steps")


@pytest.fixture
def hours_pass(monkeypatch, tmp_path):
    """Hours pass once, when the program has said that it waits: no test waits for a hang."""
    looks: List[str] = []

    def sleep(seconds):
        time.sleep(seconds)
        logs = [path.read_text() for path in tmp_path.glob("outputs-*/*.log")]
        looks.extend(log for log in logs if log.startswith("waits"))

    def monotonic():  # after the second look, since the first one may be the first to see steps
        return time.monotonic() + (1e4 if len(looks) > 1 else 0.0)

    clock = SimpleNamespace(monotonic=monotonic, time=time.time, sleep=sleep)
    monkeypatch.setattr("hier_allreduce_tools.tune.run.time", clock)


def test_a_hang_after_some_steps_has_the_programs_last_line(program, runner, hours_pass):
    run = runner(program(f"train(5){WAITS}"), seconds=1e5).run(CURRENT, 1)
    assert run.fault == "hung: no step after step 5 for 30 s, killed; last line: waits"
    assert run.step == 0 and not left_over()


@pytest.mark.parametrize("steps", [5, 60])
@pytest.mark.parametrize(
    ("end", "fault"),
    [
        ("raise KeyError('w')", "failed: status 1 after {} steps; KeyError: 'w'"),
        ("sys.exit('OOM when allocating x')", "status 1 after {} steps; last line: OOM when alloc"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "failed: SIGKILL after {} steps; last line: none"),
    ],
)
def test_a_program_whose_status_is_not_0_has_failed_whatever_it_did(
    program, runner, steps, end, fault
):
    run = runner(program(f"train({steps})\n{end}")).run(CURRENT, 1)
    assert fault.format(steps) in run.fault and run.step == 0 and not left_over()


def test_a_run_is_cut_when_the_time_is_over_and_fails_if_the_clock_is_set(
    program, runner, hours_pass
):
    assert runner(program(f"train(5){WAITS}"), seconds=1e3).run(CURRENT, 1) is None
    assert not left_over()
    run = runner(program("train(60, -1.0)")).run(CURRENT, 1)
    assert (run.step, run.fault) == (0, "failed: the clock of the system was set; last line: none")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("train(5)", "train.py ended after 5 steps, 41 are needed; last line: none: let it train"),
        ("sys.exit('no data')", "failed: status 1 after 0 steps; last line: no data; see "),
        (WAITS, "hung: no step after step 0 for 600 s, killed; last line: waits: it has imported"),
        ("input('really? ')", "the program reads its standard input, which is closed here"),
        ("import torch.nn_", "after 0 steps; ModuleNotFoundError: No module named 'torch"),
        ("", "ended after 0 steps, 41 are needed; last line: none: it has imported no TensorFlow"),
        ("tell({'tensorflow': '2.15'})", "last line: none: it has TensorFlow, but built no all-re"),
    ],
)
def test_the_cause_is_named_where_nothing_can_be_measured(program, runner, hours_pass, text, cause):
    with pytest.raises(NothingMeasured, match=re.escape(cause)):
        rounds_of(runner(program(text), seconds=1e5)).run_all(["flat"], None)
    assert not left_over()


def test_a_python_that_ignores_the_path_of_tune_is_named(program, runner):
    python, script = program("")
    Path("train.py").write_text("print('trains')", encoding="utf-8")
    with pytest.raises(NothingMeasured, match="no Python in it has the PYTHONPATH that tune sets"):
        rounds_of(runner([python, "-E", script])).run_all(["flat"], None)


def test_children_that_ignore_sigterm_are_ended_too(program, runner, monkeypatch):
    monkeypatch.setattr("hier_allreduce_tools.tune.run.TERM_SECONDS", 0.3)
    forks = "train(200)\nif os.fork() == 0:\n"
    forks += "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    time.sleep(1000)"
    assert runner(program(forks)).run(CURRENT, 1).step and not left_over()


def test_a_half_line_of_a_killed_program_spoils_no_other(program, runner, tmp_path):
    text = (
        "train(41)\nwith open(asked['journal'], 'a') as file:\n    file.write('{\"run\": 1, \"su')"
    )
    runs = runner(program(text))
    made = [runs.run(CURRENT, round) for round in (1, 2)]
    (path,) = tmp_path.glob("outputs-*/journal.jsonl")
    assert Journal(path).read()[1] == made and made[1].step > 0


OUTPUT = """Epoch 3\r 12/100 examples
2026-11-25 17:00:00.123456: I tensorflow/core/platform/cpu_feature_guard.cc:210] This TensorFlow …
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795629992.339589    2106 port.cc:153] oneDNN custom operations are on.
/usr/lib/python3/x.py:3: DeprecationWarning: old
  warnings.warn(

"""
NO_KERNEL = "InvalidArgumentError: No OpKernel was registered to support Op 'NcclAllReduce'"
TRACEBACK = f"""Traceback (most recent call last):
  File "train.py", line 7, in <module>
    model.fit(x, y)
tensorflow.python.framework.errors_impl.{NO_KERNEL}
Registered devices: [CPU, GPU]
Exception ignored in: <function x>
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "last line: none"),
        (OUTPUT, "last line: 12/100 examples"),
        ("shape " * 40, "last line: " + ("shape " * 40)[:160]),
        (OUTPUT + TRACEBACK, f"tensorflow.python.framework.errors_impl.{NO_KERNEL}"[:160]),
        ("x.InternalError: Graph execution error:\n(0) no\n", "last line: (0) no"),
        ("\x1b[2J\x1b]0;owned\x07 \x1b[31mx\x1b[0m\n", "last line: x"),
    ],
)
def test_a_failed_program_shows_its_first_error_or_its_own_last_line(tmp_path, text, words):
    log = tmp_path / "log"
    log.write_text(text, encoding="utf-8")
    assert reason_in(log) == words
