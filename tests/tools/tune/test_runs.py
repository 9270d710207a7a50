"""Programs that hang, stop, die, fork: what ``tune`` says, and that nobody is left over."""

import re
import time
from types import SimpleNamespace
from typing import List

import pytest
from helpers.timed_programs import WAITS, left_over

from hier_allreduce_tools.tune.candidates import CURRENT
from hier_allreduce_tools.tune.journal import Run, read
from hier_allreduce_tools.tune.report import report, verdict
from hier_allreduce_tools.tune.rounds import run_rounds
from hier_allreduce_tools.tune.run import TimeOver


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
    assert run.bytes == 1 << 20 and not left_over()


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
    assert run.step == pytest.approx(0.03) and run.bytes == 1 << 20


def test_the_sums_of_an_optimizer_are_the_trainings_whatever_an_evaluation_adds_up(program, runner):
    text = """
build(2, bytes=1 << 30)
build(1, update="sharded")
step(60, 1.0, number=2)
step(60, 10.0)
"""
    run = runner(program(text)).run(CURRENT, 1)
    assert run.step == pytest.approx(0.01) and run.bytes == 1 << 20


def test_a_process_of_an_earlier_run_makes_no_steps(program, runner):
    run = runner(program("step(60)")).run(CURRENT, 1)
    assert run.fault.startswith("ended with status 0 after step 0 of 41")


@pytest.fixture
def hours_pass(monkeypatch, tmp_path):
    """Hours pass once, when the program has said that it waits: no test waits for a hang."""
    looks: List[str] = []

    def monotonic():  # after some looks, since the first one may be the first to see steps
        logs = [path.read_text() for path in tmp_path.glob("outputs-*/*.log")]
        looks.extend(log for log in logs if log.startswith("waits"))
        return time.monotonic() + (1e4 if len(looks) > 6 else 0.0)

    monkeypatch.setattr("hier_allreduce_tools.tune.run.time", SimpleNamespace(monotonic=monotonic))


def test_a_hang_after_some_steps_has_the_programs_last_line(program, runner, hours_pass):
    runs = runner(program(f"train(5){WAITS}"), seconds=1e5)
    run, log = runs.run(CURRENT, 1), runs.journal.with_name("1.log")
    hung = "hung: no step after step 5 for 30 s (--patience)"
    assert run.fault == f"{hung}; last line of {log}: 'waits'"
    assert run.step == 0 and not left_over()


@pytest.mark.parametrize("steps", [5, 60])
@pytest.mark.parametrize(
    ("end", "fault"),
    [
        (
            "raise KeyError('w')",
            r"ended with status 1 after step {} of 41; last line of \S+: \"KeyError: 'w'\"",
        ),
        (
            "sys.exit('OOM when allocating x')",
            r"status 1 after step {} of 41; last line of \S+: 'OOM when",
        ),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            r"ended with status -9 after step {} of 41; last line of \S+: ''",
        ),
    ],
)
def test_a_program_whose_status_is_not_0_has_failed_whatever_it_did(
    program, runner, steps, end, fault
):
    run = runner(program(f"train({steps})\n{end}")).run(CURRENT, 1)
    assert re.search(fault.format(steps), run.fault) and run.step == 0 and not left_over()


def test_a_run_is_cut_when_the_time_is_over(program, runner, hours_pass):
    with pytest.raises(TimeOver):
        runner(program(f"train(5){WAITS}"), seconds=1e3).run(CURRENT, 1)
    assert not left_over()


def test_one_jump_of_the_clock_decides_nothing(program, runner):
    text = """
build()
tell(*({"sum": "1", "time": 0.01 * step - (9e9 if step > 25 else 0)} for step in range(50)))
"""
    run = runner(program(text)).run(CURRENT, 1)
    assert run.step == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("train(5)", r"ended with status 0 after step 5 of 41; last line of \S+: ''"),
        (
            "sys.exit('no data')",
            r"ended with status 1 after step 0 of 41; last line of \S+: 'no data'",
        ),
        (
            WAITS,
            r"hung: no step after step 0 for 30 s \(--patience\); last line of \S+: 'wai",
        ),
        ("input('really? ')", "EOFError: EOF when reading a line"),
        ("import torch.nn_", "after step 0 of 41; .*ModuleNotFoundError: No module named 'torch"),
        ("", r"ended with status 0 after step 0 of 41; last line of \S+: ''"),
    ],
)
def test_the_cause_is_named_where_nothing_can_be_measured(program, runner, hours_pass, text, cause):
    runs: List[Run] = []
    left_out = run_rounds(runner(program(text), seconds=1e5), runs, ["flat"])
    said = report(verdict(runs), left_out)
    assert re.match(f"not measured: {CURRENT}: .*{cause}", said)
    assert "nothing was measured: the program has to make 41 steps with an all-reduce" in said
    assert "Its Python needs the PYTHONPATH of tune: no -E, -I, -S" in said and not left_over()


def test_children_that_ignore_sigterm_are_ended_too(program, runner, monkeypatch):
    monkeypatch.setattr("hier_allreduce_tools.tune.run.TERM_SECONDS", 0.3)
    forks = "train(200)\nif os.fork() == 0:\n"
    forks += "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    time.sleep(1000)"
    assert runner(program(forks)).run(CURRENT, 1).step
    while left_over():  # the kernel ends it a moment after it was killed
        pass


def test_a_half_line_of_a_killed_program_spoils_no_other(program, runner, tmp_path):
    text = "train(41)\nopen(asked['journal'], 'a').write('{\"sum\": \"1\", \"ti')"
    runs = runner(program(text))
    made = [runs.run(CURRENT, round) for round in (1, 2)]
    (path,) = tmp_path.glob("outputs-*/journal.jsonl")
    assert read(path)[1] == made and made[1].step > 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "''"),
        ("Epoch 3\r 12/100 examples\n\n", "' 12/100 examples'"),
        ("shape " * 40, repr(("shape " * 40)[:160])),
        ("Traceback (most recent call last):\n  x\nKeyError: 'w'\n", "\"KeyError: 'w'\""),
        ("\x1b[2J\x1b]0;owned\x07 \x1b[31mx\n", r"'\x1b[2J\x1b]0;owned\x07 \x1b[31mx'"),
    ],
)
def test_the_last_line_of_a_failed_program_is_quoted(program, runner, text, words):
    runs = runner(program(f"sys.stdout.write({text!r})\nsys.exit(1)"))
    fault = runs.run(CURRENT, 1).fault
    log = runs.journal.with_name("1.log")
    assert fault == f"ended with status 1 after step 0 of 41; last line of {log}: {words}"
