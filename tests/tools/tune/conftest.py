"""Programs that ``tune`` runs: they need no TensorFlow, since they write the journal themselves.

So their steps take exactly as long as they say.
"""

import os
import sys
import time
from pathlib import Path

import pytest
from helpers.timed_programs import BEGIN

from hier_allreduce_tools.tune.journal import append
from hier_allreduce_tools.tune.run import Runner


@pytest.fixture
def program(tmp_path, monkeypatch):
    """``program(text)``: the command of a program that runs in an empty folder."""
    # Relative folders would be others in a process that starts in the new folder.
    folders = [str(Path(folder).absolute()) for folder in sys.path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    monkeypatch.chdir(tmp_path)

    def program(text):
        Path("train.py").write_text(BEGIN + text, encoding="utf-8")
        return [sys.executable, "train.py"]

    return program


@pytest.fixture
def runner(tmp_path):
    """``runner(command)``: runs a program, for so many seconds."""

    def runner(command, patience=30.0, seconds=300.0):
        folder = tmp_path / f"outputs-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        journal = folder / "journal.jsonl"
        settings = {"program": command, "folder": str(Path.cwd()), "only": []}
        append(journal, {"settings": settings})
        return Runner(journal, settings, patience, time.monotonic() + seconds, [])

    return runner
