"""The formulas of several hosts, against counting hops and bytes by hand."""

import pytest

from hier_allreduce.scaling import HOSTS, Network, efficiency, ring_seconds, table, tree_pays_from, tree_seconds

SLOW_HOPS, SLOW_WIRE = Network(1e30, 1.0), Network(1.0, 0.0)


@pytest.mark.parametrize(("hosts", "ring", "tree"), [(1, 0, 0), (2, 2, 2), (3, 4, 4), (4, 6, 4), (128, 254, 14)])
def test_hops(hosts, ring, tree):
    assert ring_seconds(hosts, 1.0, 1, SLOW_HOPS) == pytest.approx(ring)
    assert tree_seconds(hosts, 1.0, 5, SLOW_HOPS) == pytest.approx(5 * tree)


@pytest.mark.parametrize(("hosts", "ring", "tree"), [(1, 0, 0), (2, 12, 24), (3, 16, 24), (4, 18, 24)])
def test_bytes_that_a_host_sends(hosts, ring, tree):
    assert ring_seconds(hosts, 12.0, 7, SLOW_WIRE) == pytest.approx(ring)
    assert tree_seconds(hosts, 12.0, 7, SLOW_WIRE) == pytest.approx(tree)


def test_a_tree_pays_from_where_the_rings_hops_outweigh_its_bytes():
    network = Network(1e9, 1e-4)
    first = tree_pays_from(1e7, 1, network)
    assert tree_seconds(first, 1e7, 1, network) < ring_seconds(first, 1e7, 1, network)
    assert tree_seconds(first - 1, 1e7, 1, network) >= ring_seconds(first - 1, 1e7, 1, network)
    assert tree_pays_from(1e7, 1, SLOW_WIRE) is None
    assert tree_pays_from(1e7, 1, Network(1e30, 1.0)) == 4


def test_the_table_has_every_number_of_hosts():
    assert efficiency(3.0, 1.0) == 0.75
    lines = table().splitlines()
    assert sum(line.startswith("ring") for line in lines) == 8
    assert all(str(hosts) in lines[1] for hosts in HOSTS)
