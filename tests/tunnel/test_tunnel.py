"""Four plans in the wind tunnel: TensorFlow executes them in their order, and in the time that is predicted."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.graphs import IS_TF2

pytestmark = pytest.mark.xdist_group("tunnel")
TOP = Path(__file__).parents[2]
PROGRAM = """
import json, sys
from tunnel.__main__ import machine
from tunnel.emulation import Run
from hier_allreduce.planning import choose
cells = []
for name, size, algorithm in json.loads(sys.argv[1]):
    topology = machine(name)
    choice = choose(topology, size, algorithm)
    runs = [Run(choice.recipe.plan(), topology, choice.recipe.sizes(size), ordered) for ordered in (True, False)]
    executed = [(run.seconds(), run.before_its_turn()) for run in runs]
    cells.append([choice.seconds, *executed])
print(json.dumps(cells))
"""
CELLS = {
    "a tree on a switch": ("dgx-a100", 10**6, None),
    "groups over sockets": ("pcie-sockets", 10**6, None),
    "a ring on a cube mesh": ("dgx-1v", 10**8, "ring"),
    "NVLink pairs": ("nvlink-bridges", 10**7, None),
}


@pytest.fixture(scope="module")
def cells():
    """Predicted seconds; executed seconds and copies before their turn, in the plan's order and in TensorFlow's."""
    if not IS_TF2:
        pytest.skip("the tunnel is for TensorFlow 2")
    if not shutil.which(os.environ.get("CXX", "g++")):
        pytest.skip("no C++ compiler")
    environment = {**os.environ, "PYTHONPATH": str(TOP), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", PROGRAM, json.dumps(list(CELLS.values()))]
    done = subprocess.run(command, stdout=subprocess.PIPE, cwd=str(TOP), env=environment, timeout=280, check=True)
    return dict(zip(CELLS, json.loads(done.stdout.decode().splitlines()[-1])))


@pytest.mark.parametrize("cell", CELLS)
def test_plans_take_the_predicted_time(cells, cell):
    predicted, (executed, _), _ = cells[cell]
    assert executed == pytest.approx(predicted, rel=0.02)


@pytest.mark.parametrize("cell", CELLS)
def test_copies_leave_in_the_plans_order(cells, cell):
    _, (_, in_order), (_, in_tensorflows_order) = cells[cell]
    assert in_order == 0
    if cell == "a tree on a switch":
        assert in_tensorflows_order > 0


def test_tensorflows_own_order_is_slower(cells):
    _, (executed, _), (unordered, _) = cells["a tree on a switch"]
    assert unordered > 1.1 * executed
