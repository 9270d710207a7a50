"""The command line: options and their errors, standard streams, and imports."""

import io
import os
import subprocess
import sys

import pytest

from hier_allreduce import Topology, __version__
from hier_allreduce.cli import main, options, plan, prediction

# output that is not buffered has no rest that fails again at exit
COMMAND = ["env", "-u", "PYTHONUNBUFFERED", sys.executable, "-m", "hier_allreduce"]


def in_a_shell(redirected, *arguments):
    """Exit status, output and errors of the command with ``redirected`` behind it."""
    call = ["sh", "-c", f'"$@" {redirected}', "sh", *COMMAND, *arguments]
    done = subprocess.run(call, capture_output=True, timeout=280)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize(
    "option, value, form",
    [
        ("--step", "180", "'180' has no unit; write 180ms or 180s"),
        ("--step", "25000h", "expected a time above 0, up to a day, in us"),
        ("--step", "-5ms", "in us, µs, ms, s, min, such as 60ms"),
        ("--backward", "0ms", "above 0"),
        ("--backward", "fast", "such as 60ms"),
        ("--bytes", "100", "'100' has no unit; write 100MB or 100B"),
        ("--bytes", "100M", "such as 16MB"),
        ("--bytes", "0B", "expected bytes above 0, up to 1000GB, in B, kB"),
        ("--model", "resnet5", "did you mean 'resnet50'?"),
        ("--model", "", "there are alexnet"),
        ("--picture", "x.pgn", "'x.pgn' cannot be written: Format 'pgn' is not supported"),
        ("--picture", "picture", "cannot be written"),
        ("--picture", "/dev/null/x.png", "its folder cannot be made"),
        ("--picture", ".", "such as folder/file"),
        ("--json", "yes", "takes no value, not 'yes'"),
    ],
)
def test_an_error_names_the_option_and_the_right_form(fails, option, value, form):
    error = fails("plan", "dgx-1v", f"{option}={value}")
    assert error.startswith(f"hier-allreduce plan: {option}: ") and form in error


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "hier-allreduce: name a command: plan, doctor, tune"),
        (["topo"], "hier-allreduce: 'topo' is no command"),
        (["plam"], "did you mean 'plan'?"),
        (["--jsn"], "hier-allreduce: --jsn: no such option"),
        (
            ["--json", "plan"],
            "hier-allreduce: --json: no such option; did you mean '--version'? there are --help",
        ),
        (["-o", "x.yaml", "doctor"], "hier-allreduce: -o: no such option"),
        (["doctor", "--", "x"], "'x' is one argument too many"),
        (
            ["tune", "python", "train.py", "--lr", "3"],
            "write -- before the program: hier-allreduce tune -- python …",
        ),
        (
            ["plan", "dgx-1v", "--modle", "resnet50"],
            "hier-allreduce plan: --modle: no such option; did you mean '--model'?",
        ),
        (["plan", "dgx-1v", "--mod=resnet50"], "did you mean '--model'?"),
        (["plan", "dgx-1v", "dgx-2"], "'dgx-2' is one argument too many"),
        (
            ["plan", "dgx-1v", "--step"],
            "--step: expected one argument TIME, seconds of a step on one GPU",
        ),
        (["plan", "dgx1v"], "did you mean 'dgx-1v'?"),
        (["plan", "dgx-1v", "--", "python"], "'python' is one argument too many"),
        (["plan", "dgx-1v", "--model=vgg16", "--bytes=1MB"], "name one of them"),
        (
            ["plan", "dgx-1v", "--step=50ms", "--backward=60ms"],
            "--backward 60 ms is longer than --step 50 ms",
        ),
        (["plan", "-"], "hier-allreduce plan: standard input: no table of GPUs"),
    ],
)
def test_typos_and_contradictions_are_one_line(fails, arguments, words):
    assert words in fails(*arguments)


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("60ms", 0.06),
        ("500us", 0.0005),
        ("500µs", 0.0005),
        ("0.1s", 0.1),
        ("1min", 60),
        ("2 ms", 0.002),
    ],
)
def test_times_are_read_with_their_units(text, seconds):
    assert options.time(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text, size",
    [
        ("100MB", 10**8),
        ("64 kB", 64_000),
        ("10MiB", 10 << 20),
        ("1.5GB", 1_500_000_000),
        ("4096B", 4096),
    ],
)
def test_sizes_are_read_with_their_units(text, size):
    assert options.size(text) == size


def test_folders_of_an_output_are_made(tmp_path):
    assert options.output(str(tmp_path / "a" / "b" / "c.yaml")).parent.is_dir()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device here")
def test_a_full_disk_is_one_line():
    assert in_a_shell("> /dev/full", "plan", "p3.8xlarge") == (
        2,
        "",
        "hier-allreduce plan: [Errno 28] No space left on device\n",
    )


def test_without_standard_streams_nothing_breaks():
    assert in_a_shell(">&-", "plan", "p3.8xlarge") == (0, "", "")
    status, out, err = in_a_shell("<&-", "plan", "-")
    assert (status, out) == (2, "") and "standard input is closed" in err


def test_a_reader_that_ends_early_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)  # as `| head` does, sooner or later
    with open(writing, "wb") as pipe:
        done = subprocess.run(
            [*COMMAND, "plan", "p3.8xlarge"], stdout=pipe, stderr=subprocess.PIPE, timeout=280
        )
    assert done.returncode == 0 and b"Error" not in done.stderr


def test_an_interrupted_command_is_one_line(run, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "predict", interrupted)
    assert run("plan", "dgx-1v") == (130, "", "hier-allreduce plan: interrupted\n")


def test_an_encodings_missing_characters_are_printed_as_question_marks(monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with monkeypatch.context() as patched:
        patched.setattr("sys.stdout", output)
        assert main(["plan", "p3.8xlarge"]) == 0
    assert "?" in output.buffer.getvalue().decode("ascii")


def test_version_and_plan_import_no_more_than_they_need():
    program = "import sys; from hier_allreduce.cli import main\ntry: main(sys.argv[1:])\nfinally: print(*sys.modules)"
    for arguments in (["--version"], ["plan", "p3.8xlarge"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, timeout=280
        )
        lines = done.stdout.decode().splitlines()
        assert __version__ in lines[0] or "V100" in lines[0]
        assert not {"tensorflow", "matplotlib", "numpy"} & set(lines[-1].split())


def test_plan_without_a_machine_is_for_this_machine(run, fails, monkeypatch):
    assert "nvidia-smi shows no GPUs here; name a machine, one of 2x-rtx-5090" in fails("plan")
    monkeypatch.setattr(plan, "this_machine", lambda: Topology.load("p3.8xlarge"))
    assert run("plan") == run("plan", "p3.8xlarge")
    assert prediction.MODEL in run("plan")[1]
