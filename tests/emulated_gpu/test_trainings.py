"""Whole programs on eight emulated GPUs train the same weights, however long a device delays."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from emulated_gpu import plugin
from helpers.forks import run_forked
from helpers.real_gpus import ARE_EMULATED

from hier_allreduce_tools.doctor import copies

pytestmark = pytest.mark.skipif(not ARE_EMULATED, reason="needs emulated GPUs")
EXAMPLES = Path(__file__).parents[2] / "examples"
TRAININGS = ["replicated", "once", "sharded", "loop", "fit", "tensorpack"]


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """``trained(name, SEED="2")`` runs a training of trainings.py, and returns what it prints.

    The keywords are options of the plug-in.
    """

    def trained(name, **options):
        for option, value in {"DELAY_US": "300", **options}.items():
            monkeypatch.setenv(f"EMULATED_GPU_{option}", value)
        program = f"from emulated_gpu import trainings\ntrainings.run({name!r})"
        done = run_forked(program, folder=tmp_path)
        return done.out.splitlines()[-1] if done.status == 0 else f"failed: {done.err[-3000:]}"

    return trained


@pytest.mark.parametrize("name", TRAININGS)
def test_other_delays_give_the_same_bits(trained, name):
    first = trained(name, SEED="1")
    assert first.startswith("finite ") and trained(name, SEED="2") == first


@pytest.mark.parametrize("name", TRAININGS)
def test_without_the_order_of_streams_a_training_fails(trained, name):
    """The test above can fail: it does if no stream waits for another."""
    assert not trained(name, SEED="1", WAITS="0").startswith("finite ")


def command(*arguments, folder):
    """Run ``hier-allreduce`` on two GPUs; return its status and what it prints."""
    gpus = plugin.environment(count=2, memory_mb=512)
    program = [sys.executable, "-m", "hier_allreduce_tools", *map(str, arguments)]
    done = subprocess.run(
        program,
        cwd=folder,
        env={**os.environ, **gpus},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=250,
    )
    return done.returncode, done.stdout.decode()


def test_doctor_compares_copies_of_gpus(tmp_path):
    _, out = command("doctor", "--copies", folder=tmp_path)
    assert "CUDA, GPUs: 2" in out
    assert re.search(r"^/gpu:0 +\. +[\d.]+\n/gpu:1 +[\d.]+ +\.$", out, re.MULTILINE), out


def test_a_gpu_without_memory_is_a_fault_of_the_first_pair(monkeypatch):
    monkeypatch.setenv("EMULATED_GPU_MEMORY_MB", "256")  # TensorFlow leaves most of it alone
    _, fault = copies.copies_between(["/gpu:0", "/gpu:1"])
    assert fault.startswith("! copies /gpu:0 → /gpu:1: the process ended: ")
    assert "ResourceExhaustedError" in fault


def test_tune_measures_a_program_on_gpus(tmp_path):
    program = [sys.executable, EXAMPLES / "towers.py", "--gpus", "--devices", "2", "--steps", "50"]
    options = ["--yes", "--minutes", "2", "--only", "tower-0-sum"]
    status, out = command("tune", *options, "--", *program, folder=tmp_path)
    assert status == 0 and re.search(r"^tower-0-sum +\d", out, re.MULTILINE), out
