"""The command line: options and their errors, standard streams, and imports."""

import io
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hier_allreduce import __version__
from hier_allreduce_tools import entry


@pytest.mark.parametrize(
    "command, option, value, form",
    [
        ("tune", "--patience", "fast", "invalid float value: 'fast'"),
        ("tune", "--minutes", "soon", "invalid float value: 'soon'"),
        ("doctor", "--copies", "0,", "invalid gpu_numbers value: '0,'"),
        ("doctor", "--copies", "/gpu:0,/gpu:1", "invalid gpu_numbers value: '/gpu:0,/gpu:1'"),
        ("tune", "-o", "/dev/null/x.yaml", "its folder cannot be written"),
        ("tune", "-o", "no-such-folder/x.yaml", "its folder cannot be written"),
        ("tune", "-o", ".", "'.' exists, or"),
        ("tune", "-o", "", "'' exists, or"),
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
        (["tune"], "one of the arguments PROGRAM --continue is required"),
    ],
)
def test_typos_are_argparses_errors(fails, arguments, words):
    assert words in fails(*arguments)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="a folder that nobody can write to")
def test_a_file_that_cannot_be_written_is_an_error(fails, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    path = "/proc/best.yaml"
    assert f"argument -o: '{path}' exists, or its folder cannot" in fails("tune", "-o", path)


def test_the_words_behind_two_dashes_are_the_programs():
    words = ["python", "train.py", "--lr", "3", "--", "-o", "x"]
    args = entry.parser().parse_args(["tune", "--minutes", "5", "--", *words])
    assert args.program == words


@pytest.fixture
def command_that(monkeypatch):
    """``command_that(main)``: replace the command ``doctor`` by a function."""

    def replaced(main):
        module = SimpleNamespace(add_arguments=lambda parser: None, main=main)
        monkeypatch.setitem(entry.COMMANDS, "doctor", (module, "as the test says"))

    return replaced


def test_an_interrupted_command_has_a_status_and_no_traceback(run, command_that):
    def interrupted(_):
        raise KeyboardInterrupt

    command_that(interrupted)
    assert run("doctor") == (130, "", "")


def test_a_character_that_the_encoding_lacks_loses_no_table(monkeypatch, command_that):
    command_that(lambda _: print("a → b", flush=True))
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "latin-1"))
    entry.main(["doctor"])
    assert printed.getvalue() == b"a ? b\n"


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
