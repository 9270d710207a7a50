"""Programs that ``tune`` runs: they need no TensorFlow, since they write the clock file themselves.

So their steps take exactly as long as they say.
"""

import sys
from pathlib import Path

import pytest
from helpers.timed_programs import BEGIN

from hier_allreduce_tools.tune.progress import Progress
from hier_allreduce_tools.tune.rounds import Rounds
from hier_allreduce_tools.tune.run import Runner


@pytest.fixture
def program(tmp_path, monkeypatch):
    """``program(text)``: the command of a program that runs in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def program(text):
        Path("train.py").write_text(BEGIN + text, encoding="utf-8")
        return [sys.executable, "train.py"]

    return program


@pytest.fixture
def runner(tmp_path):
    """``runner(command)``: runs a program; its options are those of ``Runner``."""

    def runner(command, patience=30.0, seconds=300.0):
        folder = tmp_path / f"outputs-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return Runner(command, patience, seconds, folder, Progress(seconds))

    return runner


@pytest.fixture
def rounds(runner):
    """``rounds(command)``: rounds that may be run; its options are those of ``Runner``."""

    def rounds(command, only=("flat",), **options):
        return Rounds(runner(command, **options), None, only, Progress(300.0))

    return rounds
