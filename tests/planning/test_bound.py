"""How far the bound is from what any plan can do: sums and copies may go along different trees.

The linear program has a rate for each root, and for each root and pair of devices the bytes/s of sums and of copies.
By Edmonds' theorem on disjoint branchings, rates that bring at least ``rate`` bytes/s out of each set of devices with
the root in it, and into it, can be packed by trees.
"""

from itertools import combinations

import numpy as np
import pytest
from scipy.optimize import linprog

from hier_allreduce.planning.spanning_trees import pack
from hier_allreduce.topology import load, resources, subset


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
    assert rate_with_different_trees(machine) / pack(machine).bound == pytest.approx(gain, abs=2e-3)
