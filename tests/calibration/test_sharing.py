"""Which copies wait for each other is found from their times alone, on machines whose links are known."""

import pytest
from helpers.machines import SimulatedTimer

from hier_allreduce.calibration.sharing import Machine, Search, Way, cliques, predicted, ways_of
from hier_allreduce.calibration.timer import Transfer
from hier_allreduce.topology import load, subset


def found_on(topology, noise):
    """What the search finds: {pairs: bytes/s}, and the worst pattern's measured over predicted time."""
    timer = SimulatedTimer(topology, noise)
    links = {(link.src, link.dst): link.bandwidth for link in topology.links}
    machine = Machine(len(topology), links, topology.speeds.copy_latency)
    found = Search(timer, machine, 3 if noise else 1, lambda: None).find()
    return {way.pairs: way.speed for way in found.ways}, max(found.ratios)


@pytest.mark.parametrize(
    "name, devices, noise, count",
    [
        ("dgx-1v", range(8), 0.02, 10),  # buses that it takes three copies to fill; NVLinks that share nothing
        ("pcie-sockets", (0, 1, 4, 5), 0.02, 6),
        ("dgx-a100", range(4), 0.02, 4),  # ports into a switch
        ("hgx-a100-4", range(4), 0.02, 0),
        ("pcie-sockets", (0, 1), 0.02, 0),
    ],
)
def test_every_shared_way_is_found_and_no_other(name, devices, noise, count):
    topology = subset(load(name), devices)
    true = ways_of(topology)
    found, worst = found_on(topology, noise) if len(topology) > 2 else ({}, 1.0)
    assert len(true) == count
    assert found.keys() == true.keys()
    assert found == {pairs: pytest.approx(speed, rel=0.05) for pairs, speed in true.items()}
    assert worst < 1.05


def test_a_bus_that_uplinks_hide_is_found_in_parts():
    """Most copies across it are slowed more by their uplinks. Predictions are right all the same."""
    true = ways_of(load("pcie-pairs"))
    found, worst = found_on(load("pcie-pairs"), 0)
    (bus,) = true.keys() - found.keys()
    parts = found.keys() - true.keys()
    assert bus <= frozenset().union(*parts)
    for part in found:
        assert found[part] == pytest.approx(next(true[way] for way in true if part <= way), rel=0.01)
    assert worst < 1.01


def test_copies_on_one_way_divide_it_evenly():
    machine = Machine(4, {(0, 2): 10e9, (1, 3): 10e9, (2, 0): 10e9}, 1e-5)
    transfers = [Transfer(0, 2, 10**7), Transfer(1, 3, 10**7), Transfer(2, 0, 10**7)]
    way = Way(frozenset({(0, 2), (1, 3)}), 10e9)
    assert predicted(machine, transfers, [way]) == pytest.approx([2.01e-3, 2.01e-3, 1.01e-3])


def test_a_conflict_in_two_ways_makes_them_no_single_one():
    a, b, c, d = (0, 4), (1, 4), (0, 6), (2, 5)
    # a and b leave by one way and arrive by another; c only leaves with them, d only arrives
    conflicts = {frozenset(two) for two in [(a, b), (b, c), (a, d), (b, d)]}
    assert [set(members) for members, _ in cliques(conflicts)] == [{a, b, c}, {a, b, d}]
