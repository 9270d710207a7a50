"""How far the bound is from what any plan can do: sums and copies may go along different trees.

The linear program has a rate for each root, and for each root and pair of devices the bytes/s of sums and of copies.
By Edmonds' theorem on disjoint branchings, rates that bring at least ``rate`` bytes/s out of each set of devices with
the root in it, and into it, can be packed by trees.
"""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from hier_allreduce.planning import Plan, best_plan, idle_bound
from hier_allreduce.planning.bounds import _copied_back, exposed_bound
from hier_allreduce.planning.candidates import candidates
from hier_allreduce.planning.simulator import simulate
from hier_allreduce.planning.spanning_trees import pack
from hier_allreduce.topology import calibrated, load, resources, subset

GB = 10**9
BRIDGES = Path(__file__).parents[1] / "topology" / "nvidia_smi" / "8x-a800-80gb-pcie-sys-pix-nv8-nic2.txt"


def rate_with_different_trees(topology):
    """Return the bytes/s of the best packing in which sums and copies have trees of their own."""
    count = len(topology)
    names, paths = resources(topology)
    pairs = list(paths)
    use = np.zeros((len(names), len(pairs)))  # in seconds for each GB
    for column, pair in enumerate(pairs):
        for resource, seconds in paths[pair]:
            use[resource, column] += seconds * 1e9
    around = [set(chosen) for size in range(1, count) for chosen in combinations(range(count), size)]
    leaving = np.array([[src in inside and dst not in inside for src, dst in pairs] for inside in around], float)
    entering = np.array([[dst in inside and src not in inside for src, dst in pairs] for inside in around], float)
    roots = np.array([[device in inside for device in range(count)] for inside in around], float)
    variables = count + 2 * count * len(pairs)  # the rates, then copies and sums for each root
    rows, upper = [], []
    for resource in use:
        rows.append(np.concatenate([np.zeros(count), np.tile(resource, 2 * count)]))
        upper.append(1.0)
    for root in range(count):
        for number in np.flatnonzero(roots[:, root]):
            for kind, crossing in enumerate((leaving[number], entering[number])):
                row = np.zeros(variables)
                row[root] = 1.0
                start = count + (kind * count + root) * len(pairs)
                row[start : start + len(pairs)] = -crossing
                rows.append(row)
                upper.append(0.0)
    objective = np.zeros(variables)
    objective[:count] = -1.0
    return -linprog(objective, np.array(rows), upper, bounds=(0, None), method="highs").fun * 1e9


@pytest.mark.parametrize(
    "name, count, gain",
    [
        ("p3.8xlarge", 4, 1.042),
        ("dgx-1v", 5, 1.053),
        ("dgx-1v", 6, 1.029),
        ("dgx-1v", 7, 1.026),
        ("dgx-1v", 8, 1.0),
        ("pcie-sockets", 8, 1.0),
        ("hgx-a100-4", 4, 1.0),
        ("nvlink-bridges", 5, 1.001),
        ("h100-nvl-4", 4, 1.0),
    ],
)
def test_trees_of_their_own_for_sums_and_copies_gain_little(name, count, gain):
    machine = subset(load(name), range(count))
    assert rate_with_different_trees(machine) / pack(machine).limit == pytest.approx(gain, abs=2e-3)


@settings(max_examples=10, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(
    name=st.sampled_from(["pcie-sockets", "nvlink-bridges", str(BRIDGES)]),
    nvlink=st.floats(3e9, 40e9),
    pcie=st.floats(8e9, 30e9),
    far=st.floats(4e9, 20e9),
)
def test_no_plan_is_faster_than_the_bound_whatever_the_speeds(name, nvlink, pcie, far):
    """Copies and sums start at once here: with many bytes the best plans come near the bound."""
    speeds = {"copy_latency": 1e-9, "kernel": 1e-9, "memory": 1e15, "nvlink": nvlink, "pcie": pcie}
    machine = calibrated(load(name), {"speeds": speeds, "links": {"SYS": far}})
    for candidate in candidates(machine)[::8]:
        plan = Plan(len(machine), candidate.chunks, candidate.steps)
        timing = simulate(plan, machine, [GB / candidate.chunks] * candidate.chunks, ordered=False)
        assert timing.seconds > idle_bound(machine, GB) * 0.999


@pytest.mark.parametrize("name", ["p3.8xlarge", "pcie-sockets", "hgx-a100-4"])
def test_copying_back_takes_about_half_of_an_all_reduce(name):
    machine = load(name)
    assert _copied_back(machine) * GB == pytest.approx(idle_bound(machine, GB) / 2, rel=0.05)


@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize("name", ["p3.8xlarge", "dgx-a100"])
def test_no_plan_leaves_less_than_the_bound(name, lanes):
    machine = load(name)
    for size in (10**6, 10**8):
        found = best_plan(machine, size, lanes=lanes)
        assert 0 < exposed_bound(machine, size, found.backward, found.plan.lanes) == found.bound <= found.seconds


@pytest.mark.parametrize("lanes, copies", [(0, 1), (1, 1), (2, 2), (3, 3), (4, 3)])
def test_a_gpu_sends_a_copy_for_each_lane_and_link_at_a_time(lanes, copies):
    machine = load("hgx-a100-4")  # four GPUs with like links, and no ports
    like_links = machine.link(0, 1).bandwidth * 4 / 2 / 3  # as for reduce-scatter and all-gather
    assert pack(machine, lanes=lanes).limit == pytest.approx(copies * like_links, rel=2e-3)
