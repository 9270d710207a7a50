"""Programs that hang, stop, die, fork: what ``tune`` says, and that nobody is left over."""

import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import List

import pytest
from helpers.timed_programs import WAITS, left_over

from hier_allreduce_tools.tune.candidates import Candidate
from hier_allreduce_tools.tune.faults import NothingMeasured, explained

AS_IT_IS = Candidate()
SLOW_AT_FIRST = """
def train(steps):
    build()
    with open(asked.clock, "a") as file:
        for step in range(steps):
            print(min(step, 10) + 0.01 * step, file=file)
"""


def test_a_program_that_trains_is_measured_in_windows(program, runner):
    run = runner(program("train(200)")).run(AS_IT_IS, 0.0, 1)
    assert len(run.seconds) == 9 and run.step == pytest.approx(0.01)
    assert not left_over()


@pytest.mark.parametrize(("steps", "windows"), [(31, 1), (50, 1), (51, 2), (3000, 149)])
def test_windows_have_20_steps_after_the_first_10(program, runner, steps, windows):
    run = runner(program(SLOW_AT_FIRST + f"train({steps})")).run(AS_IT_IS, 1e6, 1)
    assert run.seconds == pytest.approx([0.01] * windows)


def test_a_run_ends_when_it_has_many_steps(program, runner):
    run = runner(program("train(2100)" + WAITS)).run(AS_IT_IS, 1e6, 1)
    assert not run.fault and len(run.seconds) == 104


def test_a_run_with_enough_steps_counts_at_the_deadline(program, runner, monkeypatch):
    runs = runner(program("train(200)" + WAITS))

    def end_now(_, text):
        runs.deadline = 0.0 if text.endswith("step 200") else runs.deadline

    monkeypatch.setattr("hier_allreduce_tools.tune.progress.Progress.show", end_now)
    run = runs.run(AS_IT_IS, 1e6, 1)
    assert not run.fault and len(run.seconds) == 9


@pytest.fixture
def virtual_time(monkeypatch, tmp_path):
    """``virtual_time(start=300.0)``: after these seconds a program has a step in every look."""

    def virtual_time(start):
        now = [0.0]

        def sleep(_):
            now[0] += 10.0
            for clock in tmp_path.glob("outputs-*/*.log"):
                with clock.with_suffix(".clock").open("a") as file:
                    file.write(f"{now[0]}\n" if now[0] > start else "")

        clock = SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0], sleep=sleep)
        monkeypatch.setattr("hier_allreduce_tools.tune.run.time", clock)

    return virtual_time


def test_patience_is_for_one_step_and_a_share_begins_with_the_first(program, runner, virtual_time):
    virtual_time(start=300.0)
    run = runner(program(WAITS), seconds=1e5).run(AS_IT_IS, 1000.0, 1)
    # the first step is at 310 s, and the run ends after more than 1000 s with steps
    assert run.fault == "" and run.seconds == [10.0] * 4
    assert 310 <= run.overhead < 330


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


@pytest.mark.parametrize("steps", [5, 200])
def test_a_hang_after_some_steps_has_the_programs_last_line(program, runner, hours_pass, steps):
    run = runner(program(f"train({steps}){WAITS}"), seconds=1e5).run(AS_IT_IS, 1e6, 1)
    assert run.fault == f"hung: no step after step {steps} for 30 s, killed; last line: waits"
    assert run.seconds == []
    assert run.output.read_text() == "waits\n" and not left_over()


@pytest.mark.parametrize(
    ("end", "fault"),
    [
        ("raise KeyError('w')", "failed: status 1 after 5 steps; KeyError: 'w'"),
        ("sys.exit('OOM when allocating x')", "after 5 steps; out of memory; last line: OOM when"),
        ("sys.exit('CUDA_ERROR_OUT_OF_MEMORY')", "after 5 steps; out of memory; last line: CUDA"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "failed: SIGKILL after 5 steps; last line: none"),
    ],
)
def test_a_program_that_dies_too_early_has_failed(program, runner, end, fault):
    run = runner(program(f"train(5)\n{end}")).run(AS_IT_IS, 0.0, 1)
    assert fault in run.fault and not left_over()


@pytest.mark.parametrize(("minutes", "patience"), [(1, 20), (10, 200), (100, 600)])
def test_a_hang_before_the_first_step_is_one_within_any_minutes(
    program, runner, virtual_time, minutes, patience
):
    virtual_time(start=1e9)
    run = runner(program(WAITS), seconds=60.0 * minutes).run(AS_IT_IS, 0.0, 1)
    assert run.fault.startswith(f"hung: no step at all for {patience} s, killed; last line: ")


def test_a_run_without_any_step_when_the_time_is_over_has_its_last_line(
    program, rounds, hours_pass
):
    over = "the time was over: no step yet for 1000. s; last line: waits: more --minutes"
    with pytest.raises(NothingMeasured, match=over):
        rounds(program(WAITS), seconds=1e3).run_all()
    assert not left_over()


def test_a_run_with_too_few_steps_when_the_time_is_over_says_so(program, runner, hours_pass):
    run = runner(program(f"train(5){WAITS}"), seconds=1e3).run(AS_IT_IS, 0.0, 1)
    assert run.is_cut and run.fault.startswith("the time was over before step 31; last line: waits")


SEEN = """
import json
seen = {"seconds": 40, "imports_ours": True, "front_end": "keras"}
Path(asked.clock + ".seen").write_text(json.dumps(seen))
"""


def test_only_the_first_run_has_to_show_an_allreduce_of_ours(program, runner, hours_pass):
    command = program(SEEN + WAITS)
    assert runner(command, seconds=1e5).run(AS_IT_IS, 0.0, 1).has_hung and not left_over()
    with pytest.raises(NothingMeasured, match="TensorFlow runs, but no all-reduce"):
        runner(command, seconds=1e5).run(AS_IT_IS, 0.0, 0)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("train(5)", "train.py ended after 5 steps, 31 are needed; last line: none: let it train"),
        ("sys.exit('no data')", "failed: status 1 before its first step; last line: no data"),
        (WAITS, "hung: no step at all for 600 s, killed; last line: waits"),
        ("input('really? ')", "the program reads its standard input, which is closed here"),
        ("import torch.nn_", "before its first step; ModuleNotFoundError: No module named 'torch"),
        ("train(200, 0.0)", "train.py failed: the times cannot be read: times do not rise; see "),
        ("", "ended after 0 steps, 31 are needed; last line: none: it built no all-reduce of this"),
    ],
)
def test_the_cause_is_named_where_nothing_can_be_measured(program, rounds, hours_pass, text, cause):
    with pytest.raises(NothingMeasured, match=re.escape(cause)):
        rounds(program(text), seconds=1e5).run_all()
    assert not left_over()


def test_children_that_ignore_sigterm_are_ended_too(program, runner, monkeypatch):
    monkeypatch.setattr("hier_allreduce_tools.tune.processes.MERCY", 0.3)
    forks = "train(200)\nif os.fork() == 0:\n"
    forks += "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    time.sleep(1000)"
    assert runner(program(forks)).run(AS_IT_IS, 0.0, 1).seconds and not left_over()


def test_children_that_have_left_the_process_group_are_ended_too(program, runner):
    leaves = "import subprocess\n"
    leaves += "child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
    leaves += "with open('groups', 'a') as file:\n    print(child.pid, file=file)\ntrain(200)"
    assert runner(program(leaves)).run(AS_IT_IS, 0.0, 1).seconds and not left_over()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere an orphan has another parent")
def test_orphans_that_have_left_session_and_environment_are_ended_too(program, runner):
    leaves = "import subprocess\n"
    leaves += "options = dict(env={}, start_new_session=True, stdout=subprocess.PIPE)\n"
    leaves += "shell = ['/bin/sh', '-c', 'sleep 1000 >&2 & echo $$']\n"
    leaves += "out = subprocess.run(shell, **options).stdout.decode()\n"
    leaves += "with open('groups', 'a') as file:\n    print(out, file=file)\ntrain(200)"
    assert runner(program(leaves)).run(AS_IT_IS, 0.0, 1).seconds and not left_over()


def test_other_children_of_this_process_live_on(program, runner):
    with subprocess.Popen(["sleep", "1000"]) as own:
        assert runner(program("train(200)")).run(AS_IT_IS, 0.0, 1).seconds
        assert own.poll() is None
        own.kill()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("100 - step", "times do not rise"),
        ("1700000000.0", "times do not rise"),
        ("'nan'", "times do not rise"),
        ("'x y'", "could not convert string to float: 'x y'"),
    ],
)
def test_a_run_whose_times_cannot_be_read_has_failed(program, runner, line, why):
    text = "build()\nwith open(asked.clock, 'a') as file:\n    for step in range(31):\n"
    run = runner(program(f"{text}        print({line}, file=file)")).run(AS_IT_IS, 0.0, 1)
    assert (run.seconds, run.fault) == ([], f"failed: the times cannot be read: {why}")


def test_a_run_fails_if_somebody_sets_the_clock(program, runner, monkeypatch):
    hours = iter([0.0, 3600.0])
    clock = SimpleNamespace(
        monotonic=time.monotonic, sleep=time.sleep, time=lambda: time.time() + next(hours)
    )
    monkeypatch.setattr("hier_allreduce_tools.tune.run.time", clock)
    run = runner(program("train(200)")).run(AS_IT_IS, 0.0, 1)
    assert run.seconds == [] and run.fault.endswith("the system's clock was set")


def test_a_python_that_ignores_the_path_of_tune_is_named(program, rounds, runner):
    python, script = program("")
    Path("train.py").write_text("print('trains')", encoding="utf-8")
    with pytest.raises(NothingMeasured, match="no Python in it has the PYTHONPATH that tune sets"):
        rounds([python, "-E", script]).run_all()
    # a later run is one candidate's only
    run = runner([python, "-E", script]).run(AS_IT_IS, 0.0, 1)
    assert run.fault.startswith("ended after 0 steps")


OUTPUT = """Epoch 3\r 12/100 examples
2026-11-25 17:00:00.123456: I tensorflow/core/platform/cpu_feature_guard.cc:210] This TensorFlow …
To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow …
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

\t [[StatefulPartitionedCall/sgd/NcclAllReduce]] [Op:__inference_multi_step_on_iterator_712]
Exception ignored in: <function x>
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "last line: none"),
        (OUTPUT, "last line: 12/100 examples"),
        ("shape " * 1000, "last line: " + ("shape " * 100)[:160]),
        (OUTPUT + TRACEBACK, NO_KERNEL),
        (
            "x.InternalError: Graph execution error:\n(0) no\n",
            "InternalError: Graph execution error:; last line: (0) no",
        ),
    ],
)
def test_a_failed_program_shows_its_first_error_or_its_own_last_line(tmp_path, text, words):
    log = tmp_path / "log"
    log.write_text(text, encoding="utf-8")
    assert explained("failed", log) == f"failed; {words}"


def test_a_program_that_hangs_shows_its_last_line_too(tmp_path):
    log = tmp_path / "log"
    log.write_text("ValueError: caught\nwaits for data\n", encoding="utf-8")
    assert explained("hung", log) == "hung; ValueError: caught; last line: waits for data"


@pytest.mark.parametrize("imports_ours", [False, True])
def test_a_program_that_trains_without_ours_is_ended_with_the_change(
    program, rounds, imports_ours, monkeypatch
):
    # a package of this name, whose session waits as TensorFlow's does
    folder = Path("tensorflow", "python", "client")
    folder.mkdir(parents=True)
    for package in (folder, *folder.parents):
        (package / "__init__.py").touch() if str(package) != "." else None
    (folder / "session.py").write_text("import time\ndef run():\n    time.sleep(1000)\n")
    monkeypatch.setenv("PYTHONPATH", f"{Path.cwd()}:{':'.join(filter(None, sys.path))}")
    train = "class MirroredStrategy:\n    pass\nstrategy = MirroredStrategy()\n"
    train += "import tensorflow.python.client.session as session\nsession.run()\n"
    Path("own.py").write_text("import hier_allreduce\n" * imports_ours + train)
    monkeypatch.setattr("hier_allreduce_tools.tune.observer.BUILT_WITHIN", 6.0)
    with pytest.raises(NothingMeasured, match=r"(?s)TensorFlow runs, but.*cross_device_ops="):
        rounds([sys.executable, "own.py"]).run_all()
