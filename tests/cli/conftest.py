"""Commands in this process."""

import io

import pytest

from hier_allreduce.cli import entry as cli


@pytest.fixture
def run(capsys, monkeypatch):
    """``run("topo", "dgx-1v", stdin="…")``: exit status, standard output, standard error."""

    def run(*arguments, stdin=""):
        data = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        status = cli.main(list(arguments))
        return (status, *capsys.readouterr())

    run.err = lambda: capsys.readouterr().err
    return run
