"""Commands in this process."""

import io

import pytest

from hier_allreduce_tools import main


@pytest.fixture(autouse=True)
def patient_copier(monkeypatch):
    """``doctor --copies`` waits longer for a pair, because other tests use the cores too."""
    monkeypatch.setattr("hier_allreduce_tools.doctor.copies.LIMIT", 240.0)


@pytest.fixture
def run(capsys, monkeypatch):
    """``run("doctor", "--topo", "-", stdin="…")``: exit status, output, and standard error."""

    def run(*arguments, stdin=""):
        data = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        status = main([str(argument) for argument in arguments])
        return (status, *capsys.readouterr())

    return run


@pytest.fixture
def fails(run):
    """``fails("doctr")``: the error, which is one line, with status 2 and no output."""

    def fails(*arguments, stdin=""):
        status, out, err = run(*arguments, stdin=stdin)
        assert (status, out, err.count("\n")) == (2, "", 1), err
        return err.rstrip("\n")

    return fails
