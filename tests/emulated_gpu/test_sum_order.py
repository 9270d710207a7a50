"""Towers stay equal to the bit, although each GPU adds up rows of equal index in its own order."""

import pytest
from emulated_gpu import tables
from helpers.forks import run_forked
from helpers.graphs import XPU

pytestmark = pytest.mark.skipif(XPU != "gpu", reason="make test-gpu")


def ends(name, folder, monkeypatch):
    """Run a training of tables.py; return how many different ends 2, 3, … towers have."""
    monkeypatch.setenv("EMULATED_GPU_SUM_SEED", "7")
    program = f"from emulated_gpu import tables\ntables.run({name!r})"
    done = run_forked(program, folder=folder)
    assert done.status == 0, done.err[-3000:]
    said = [line.split(" towers: ") for line in done.out.splitlines() if " towers: " in line]
    return {int(towers): int(count) for towers, count in said}


@pytest.mark.parametrize("name", ["replicated", "main", "mirrored", "tensorpack"])
def test_towers_are_equal_to_the_bit_after_50_steps(name, tmp_path, monkeypatch):
    assert ends(name, tmp_path, monkeypatch) == dict.fromkeys(tables.TOWERS, 1)


def test_towers_that_add_up_the_same_rows_differ(tmp_path, monkeypatch):
    """The test above can fail."""
    assert min(ends("by_each_tower", tmp_path, monkeypatch).values()) > 1
