"""``hier-allreduce demo`` in a process of its own, in an empty folder, without a keyboard."""

import io
import os
import re
import sys

import pytest
from helpers.demo import cold_demo, demo

from hier_allreduce.cli import entry as cli
from hier_allreduce.cli.demo.terminal import only_for_us

after_one_run = pytest.mark.xdist_group("demo")  # one worker runs them, so that the fixture runs once


@pytest.fixture(scope="module")
def passed(tmp_path_factory):
    """A run that is long enough to pass, started as people start it."""
    folder = tmp_path_factory.mktemp("demo")
    return (folder, *cold_demo(folder, "--devices", "3", "--epochs", "14"))


@after_one_run
def test_it_passes_and_says_so(passed):
    _, status, report, _ = passed
    assert status == 0, report
    assert "FAILED" not in report
    assert float(re.search(r"test accuracy .* ([\d.]+)%  \(not judged: fewer than 60 epochs\)", report).group(1)) >= 98
    loss, weight = (float(number) for number in re.findall(r"([\d.e-]+)  \(at most 1e-05\)", report))
    assert 0 < loss <= 1e-5 and 0 < weight <= 1e-5
    assert re.search(r"any weight between the 3 devices +0  \(exactly 0\)", report)


@after_one_run
def test_its_table_has_the_executed_copies(passed):
    """Three chunks (two large gradients, one bucket), each in 2 copies to the sum and 2 back."""
    report = passed[2]
    assert [line.split()[:2] for line in report.splitlines() if "/cpu:" in line] == [
        [str(i), f"/cpu:{i}"] for i in range(3)
    ]
    assert "hierarchical, 3 chunks, 12 copies, planned = executed" in report


@after_one_run
def test_the_terminal_gets_the_report_and_nothing_else(passed):
    """Neither TensorFlow's messages nor tensorpack's: they are in the log."""
    folder, _, report, complaints = passed
    assert complaints == ""
    # a step of a bar takes 0.1 or 10 seconds: 10step/s or 10s/step
    lines = [line for line in report.replace("\r", "\n").splitlines() if line and not re.search("step/s|s/step", line)]
    assert len(lines) == 13, lines
    assert "Start Epoch 14" in (folder / "train_log/digits/training.log").read_text(encoding="utf-8")


class Console(io.RawIOBase):
    """Standard output as Python has it in a Windows console: no other file can take its number and be written to."""

    def __init__(self):
        self._own = os.fstat(1)

    def writable(self):
        return True

    def write(self, data):
        if not os.path.samestat(os.fstat(1), self._own):
            raise OSError("[WinError 6] The handle is invalid")
        return os.write(1, data)


def test_on_a_windows_console_too(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BufferedWriter(Console()), encoding="utf-8"))
    path = tmp_path / "log"
    with path.open("w", buffering=1, encoding="utf-8") as log, only_for_us(log) as terminal:
        print("Python's")
        os.write(1, b"C++'s\n")
        print("for people", file=terminal)
    assert path.read_text(encoding="utf-8") == "Python's\nC++'s\n"
    assert capfd.readouterr().out == "for people\n"


@after_one_run
def test_the_checkpoint_is_there(passed):
    folder, _, report, _ = passed
    (path,) = re.findall(r"^checkpoint: (.*)$", report, re.MULTILINE)
    assert (folder / f"{path}.index").exists()


def test_with_fewer_epochs_accuracy_is_not_judged(tmp_path):
    status, report, _ = demo(tmp_path, "--devices", "2", "--epochs", "1")
    assert status == 0 and "FAILED" not in report, report
    assert float(re.search(r"test accuracy .* ([\d.]+)%  \(not judged", report).group(1)) < 98


@after_one_run
def test_it_fails_where_accuracy_or_equality_misses(passed):
    """One epoch is too short, if that is the default; no difference at all is too much to ask for."""
    code = "import hier_allreduce.cli.demo.digits as digits; digits.DIFFERENCE, digits.EPOCHS = 0, 1"
    status, report, _ = demo(passed[0], "--devices", "3", "--epochs", "1", code=code)
    assert status == 1
    assert re.search(r"test accuracy .*%  \(at least 98%\)$", report, re.MULTILINE)
    assert re.search("^FAILED: test accuracy .* is under 98%$", report, re.MULTILINE)
    assert re.search("^FAILED: a loss differs by .*, more than 0e[+]00$", report, re.MULTILINE)
    assert re.search("^FAILED: a weight differs by .*, more than 0e[+]00$", report, re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--devices", "/cpu:0,/gpu:7"], "pass", ["tower 1: /gpu:7", "There are /cpu:0;"]),
        ([], "open('train_log', 'w').close()", ["train_log/digits: the folder of the log", "Not a directory"]),
    ],
    ids=["device", "folder"],
)
def test_what_cannot_work_is_one_line(tmp_path, options, code, words):
    status, _, complaints = demo(tmp_path, *options, code=code)
    assert status == 2
    assert complaints.startswith("hier-allreduce demo: ") and complaints.count("\n") == 1, complaints
    for word in words:
        assert word in complaints


@pytest.mark.parametrize(
    ("option", "value", "most"),
    [("--epochs", "0", 10**6), ("--devices", "0", 256), ("--devices", "99999999", 256)],
)
def test_numbers_are_checked_at_once(capsys, option, value, most):
    with pytest.raises(SystemExit):
        cli.main(["demo", option, value])
    assert f"{option}: '{value}': expected a whole number from 1 to {most}" in capsys.readouterr().err


def test_options_are_checked_before_a_folder_is_made(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, error = run("demo", "--strategy", "megengin")
    assert status == 2 and error.startswith("hier-allreduce demo: ") and "did you mean 'megengine'" in error
    for package in ("sklearn", "tensorpack"):
        monkeypatch.setitem(sys.modules, package, None)
        status, _, error = run("demo")
        assert status == 2 and f"hier-allreduce demo: the demo needs {package}: " in error
        assert 'python -m pip install ".[demo]"' in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())
