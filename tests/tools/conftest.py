"""Commands in this process."""

from typing import Any

import pytest

from hier_allreduce_tools import main


@pytest.fixture(autouse=True)
def patient_copier(monkeypatch):
    """``doctor --copies`` waits longer for a pair, because other tests use the cores too."""
    monkeypatch.setattr("hier_allreduce_tools.doctor.copies.LIMIT", 240.0)


@pytest.fixture
def run(capsys):
    """``run("doctor", "--topo", "topo.txt")``: exit status, output, and standard error."""

    def run(*arguments):
        try:
            status: Any = main([str(argument) for argument in arguments])
        except SystemExit as ended:  # argparse has printed an error
            status = ended.code
        return (status, *capsys.readouterr())

    return run


@pytest.fixture
def fails(run):
    """``fails("doctr")``: the error, which is the last line, with status 2 and no output."""

    def fails(*arguments):
        status, out, err = run(*arguments)
        assert (status, out) == (2, "") and err.startswith(("hier-allreduce", "usage: ")), err
        return err.splitlines()[-1]

    return fails
