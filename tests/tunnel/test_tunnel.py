"""Plans in the wind tunnel: TensorFlow executes them in their order, and in the time that is predicted."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from helpers.graphs import IS_TF2
from helpers.project import TOP

pytestmark = pytest.mark.xdist_group("tunnel")
PROGRAM = """
import json, sys
from tunnel.__main__ import machine
from tunnel.emulation import Run
from helpers.machines import without_host
from hier_allreduce.planning import IDLE, best_plan
cells = []
for name, size, algorithm, lanes, training in json.loads(sys.argv[1]):
    if training:
        found = best_plan(machine(name), size, None, algorithm, lanes)
    else:
        found = best_plan(without_host(machine(name)), size, IDLE, algorithm, lanes)
    sizes = found.plan.sizes(size)
    runs = [Run(found.plan, found.topology, sizes, ordered, found.backward) for ordered in (True, False)]
    executed = [(run.seconds() - found.backward.seconds, run.before_its_turn()) for run in runs]
    cells.append([found.seconds, *executed])
from tunnel.links import found
topology, measurement, rates, ways, _ = found("pcie-sockets:0,1,4,5", arrival=2e-5)
ways = [sorted([sorted(pairs), speed] for pairs, speed in own.items()) for own in ways]
starts = [measurement.starts.start.median, measurement.starts.arrival.median]
print(json.dumps([cells, list(rates.values()), ways, starts]))
"""
CELLS = {
    "a tree on a switch": ("dgx-a100", 10**6, None, 0, False),
    "groups over sockets": ("pcie-sockets", 10**6, None, 0, False),
    "a ring on a cube mesh": ("dgx-1v", 10**8, "ring", 0, False),
    "NVLink pairs": ("nvlink-bridges", 10**7, None, 0, False),
    "over lanes": ("dgx-1v", 10**7, None, 4, False),
    "a backward pass": ("p3.8xlarge", 10**7, None, 0, True),
    "a host with little time": ("8x-rtx-4090-sys-pxb-pix-nic2", 10**7, "flat", 0, True),
}


@pytest.fixture(scope="module")
def results():
    """What the program prints: cells of the table; true and measured links and ways; what a copy's start takes."""
    if not IS_TF2:
        pytest.skip("the tunnel is for TensorFlow 2")
    if not shutil.which(os.environ.get("CXX", "g++")):
        pytest.skip("no C++ compiler")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TOP), str(TOP / "tests")]),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps(list(CELLS.values()))]
    done = subprocess.run(command, stdout=subprocess.PIPE, cwd=str(TOP), env=environment, timeout=280, check=True)
    return json.loads(done.stdout.decode().splitlines()[-1])


@pytest.fixture(scope="module")
def cells(results):
    """Predicted seconds; executed seconds and copies before their turn, in the plan's order and in TensorFlow's."""
    return dict(zip(CELLS, results[0]))


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


def test_a_calibration_finds_the_links_of_an_emulated_machine(results):
    _, links, (true, found), (start, arrival) = results
    assert len(links) == 12
    assert [rate for _, rate in links] == pytest.approx([rate for rate, _ in links], rel=0.05)
    assert (start, arrival) == (pytest.approx(10e-6, rel=0.05), pytest.approx(20e-6, rel=0.05))
    assert len(true) == 6
    assert [pairs for pairs, _ in found] == [pairs for pairs, _ in true]
    assert [speed for _, speed in found] == pytest.approx([speed for _, speed in true], rel=0.05)
