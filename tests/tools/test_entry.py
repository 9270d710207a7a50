"""The command line: options and their errors, standard streams, and imports."""

import io
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hier_allreduce import __version__
from hier_allreduce_tools import entry, main

# output that is not buffered has no rest that fails again at exit
COMMAND = ["env", "-u", "PYTHONUNBUFFERED", sys.executable, "-m", "hier_allreduce_tools"]


def in_a_shell(redirected, *arguments):
    """Exit status, output and errors of the command with ``redirected`` behind it."""
    call = ["sh", "-c", f'"$@" {redirected}', "sh", *COMMAND, *arguments]
    done = subprocess.run(call, capture_output=True, timeout=280)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize(
    "command, option, value, form",
    [
        ("tune", "--patience", "25000h", "expected a time above 0, up to a day, in ms"),
        ("tune", "--patience", "-5ms", "in ms, s, min, h, such as 10s"),
        ("tune", "--patience", "0ms", "above 0"),
        ("tune", "--patience", "fast", "such as 10s"),
        ("tune", "--minutes", "0", "--minutes: '0': expected a time above 0"),
        ("tune", "--minutes", "soon", "such as 10min"),
        ("tune", "-o", "/dev/null/x.yaml", "cannot be written"),
        ("tune", "-o", ".", "exists: choose another name"),
        ("tune", "-o", "", "exists: choose another name"),
        ("doctor", "--copies", "yes", "such as /gpu:0,/gpu:1"),
        ("doctor", "--copies", "/cpu:0", "expected two or more different devices"),
        ("doctor", "--copies", "/gpu:0,/gpu:0", "'/gpu:0,/gpu:0': expected two or more different"),
    ],
)
def test_an_error_names_the_option_and_the_right_form(fails, command, option, value, form):
    given = [option, value] if option == "-o" else [f"{option}={value}"]
    error = fails(command, *given)
    begin = f"hier-allreduce {command}: error: argument {option}: "
    assert error.startswith(begin) and form in error


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "required: COMMAND"),
        (["doctr"], "invalid choice: 'doctr' (choose from"),
        (["doctor", "--", "x"], "unrecognized arguments: -- x"),
        (["doctor", "--copy"], "unrecognized arguments: --copy"),
        (["doctor", "--copies", "--topo", os.devnull], "not allowed with argument --copies"),
        (["tune", "--minutes"], "argument --minutes: expected one argument"),
        (["tune", "python", "train.py", "--lr", "3"], "unrecognized arguments: --lr 3"),
        (["tune"], "expected a program: hier-allreduce tune -- python train.py"),
    ],
)
def test_typos_are_argparses_errors(fails, arguments, words):
    assert words in fails(*arguments)


@pytest.mark.parametrize(
    "text, seconds", [("60ms", 0.06), ("0.1s", 0.1), ("1min", 60), ("2 ms", 0.002), ("3", 3)]
)
def test_times_are_read_with_their_units(text, seconds):
    args = entry.parser().parse_args(["tune", "--patience", text, "--", "x"])
    assert args.patience == pytest.approx(seconds)


def test_the_folder_of_an_output_is_not_made_before_it_is_written(tmp_path):
    given = str(tmp_path / "a" / "b" / "c.yaml")
    assert str(entry.parser().parse_args(["tune", "-o", given, "--", "x"]).o) == given
    assert not (tmp_path / "a").exists()


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="a folder that nobody can write to")
@pytest.mark.parametrize("path", ["/proc/best.yaml", "/proc/folder/best.yaml"])
def test_a_file_that_cannot_be_written_is_an_error(fails, monkeypatch, path):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert f"argument -o: '{path}' cannot be written" in fails("tune", "-o", path)


def test_the_words_behind_two_dashes_are_the_programs():
    words = ["python", "train.py", "--lr", "3", "--", "-o", "x"]
    args = entry.parser().parse_args(["tune", "--minutes", "5", "--", *words])
    assert args.program == words


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device here")
def test_a_full_disk_is_one_line():
    status, out, err = in_a_shell("> /dev/full", "doctor")
    assert (status, out) == (2, "")
    assert err.endswith("hier-allreduce doctor: [Errno 28] No space left on device\n")


def test_without_standard_output_nothing_breaks():
    status, out, err = in_a_shell(">&-", "doctor")
    assert status in (0, 1) and out == "" and "Error" not in err


def test_a_reader_that_ends_early_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)  # as `| head` does, sooner or later
    with open(writing, "wb") as pipe:
        done = subprocess.run(
            [*COMMAND, "doctor"], stdout=pipe, stderr=subprocess.PIPE, timeout=280
        )
    assert done.returncode == 0 and b"Error" not in done.stderr


@pytest.fixture
def command_that(monkeypatch):
    """``command_that(main)``: replace the command ``doctor`` by a function."""

    def replaced(main):
        module = SimpleNamespace(add_arguments=lambda parser: None, main=main)
        monkeypatch.setitem(entry.COMMANDS, "doctor", (module, "as the test says"))

    return replaced


def test_an_interrupted_command_is_one_line(run, command_that):
    def interrupted(_):
        raise KeyboardInterrupt

    command_that(interrupted)
    assert run("doctor") == (130, "", "hier-allreduce doctor: interrupted\n")


def test_an_encodings_missing_characters_are_printed_as_question_marks(monkeypatch, command_that):
    command_that(lambda _: print("/gpu:0 → /gpu:1") or 0)
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with monkeypatch.context() as patched:
        patched.setattr("sys.stdout", output)
        assert main(["doctor"]) == 0
    assert output.buffer.getvalue() == b"/gpu:0 ? /gpu:1\n"


def test_commands_import_no_more_than_they_need():
    program = (
        "import sys; from hier_allreduce_tools import main\n"
        "try: main(sys.argv[1:])\nfinally: print(*sys.modules)"
    )
    for arguments in (["--version"], ["tune", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, timeout=280
        )
        lines = done.stdout.decode().splitlines()
        assert __version__ in lines[0] or "tune" in lines[0]
        assert not {"tensorflow", "matplotlib"} & set(lines[-1].split())
