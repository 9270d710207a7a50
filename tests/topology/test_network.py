"""The formulas of several hosts, against counting hops and bytes by hand."""

import math

import pytest

from hier_allreduce import presets
from hier_allreduce.errors import ClusterError
from hier_allreduce.topology.network import (
    ENGINE,
    HOP,
    Network,
    balanced_chunk,
    latency_overtakes,
    ring_seconds,
    tree_pays_from,
    tree_seconds,
)

SLOW_HOPS, SLOW_WIRE = Network(1e30, 1.0, engine=math.inf), Network(1.0, 0.0)


@pytest.mark.parametrize(("hosts", "ring", "tree"), [(1, 0, 0), (2, 2, 2), (3, 4, 4), (4, 6, 4), (128, 254, 14)])
def test_hops(hosts, ring, tree):
    assert ring_seconds(hosts, 1.0, 1, SLOW_HOPS) == pytest.approx(ring)
    assert tree_seconds(hosts, 1.0, 5, SLOW_HOPS) == pytest.approx(5 * tree)


@pytest.mark.parametrize(("hosts", "ring", "tree"), [(1, 0, 0), (2, 12, 24), (3, 16, 24), (4, 18, 24)])
def test_bytes_that_a_host_sends(hosts, ring, tree):
    assert ring_seconds(hosts, 12.0, 7, SLOW_WIRE) == pytest.approx(ring)
    assert tree_seconds(hosts, 12.0, 7, SLOW_WIRE) == pytest.approx(tree)


def test_a_tree_pays_from_where_the_rings_hops_outweigh_its_bytes():
    network = Network(1e9, 1e-4, engine=math.inf)
    first = tree_pays_from(1e7, 1, network)
    assert tree_seconds(first, 1e7, 1, network) < ring_seconds(first, 1e7, 1, network)
    assert tree_seconds(first - 1, 1e7, 1, network) >= ring_seconds(first - 1, 1e7, 1, network)
    assert tree_pays_from(1e7, 1, SLOW_WIRE) is None
    assert tree_pays_from(1e7, 1, SLOW_HOPS) == 4


@pytest.mark.parametrize(("hosts", "collectives"), [(2, 1), (5, 3), (64, 10)])
def test_where_hops_and_bytes_take_equally_long(hosts, collectives):
    network = Network(nic=1e9, hop=1e-4, nics=2, engine=1.5e9)
    hops, wire = network._replace(nic=math.inf, engine=math.inf), network._replace(hop=0.0)
    size = collectives * balanced_chunk(hosts, network)
    assert ring_seconds(hosts, size, collectives, hops) == pytest.approx(ring_seconds(hosts, size, 1, wire))
    assert latency_overtakes(size, collectives, network) == pytest.approx(hosts)
    assert latency_overtakes(size, 1, wire) == math.inf


def test_hosts_move_what_their_cards_carry_or_what_the_runtime_moves():
    assert Network(nic=1e9, nics=4, engine=3e9).bytes_per_second == 3e9
    assert Network(nic=1e9, nics=2, engine=3e9).bytes_per_second == Network(nic=1e9, nics=2, engine=3e9).wire == 2e9


def test_presets_are_in_bytes_and_say_where_each_number_is_from():
    for name in presets.names("networks"):
        network = Network.load(name)
        assert 1e9 < network.nic < 1e11 and (network.hop, network.engine) == (HOP, ENGINE)
        lines = presets.find("networks", name, ClusterError).read_text().splitlines()
        assert all("#" in line for line in lines if line.startswith(("nic:", "hop:", "engine:")))
    assert Network.load("10gbe").wire == 10e9 / 8
    assert Network.load("ib-hdr-8").wire == 8 * 200e9 / 8


def test_a_file_can_say_all_of_it(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("nic: 1e9\nnics: 2\nhop: 2.0e-5\nengine: 5e9\n")
    assert Network.load(str(path)) == Network(1e9, 2e-5, 2, 5e9, "mine")
    path.write_text("nic: 1e9\nname: our switch\n")
    assert Network.load(str(path)) == Network(1e9, name="our switch")


@pytest.mark.parametrize(
    "text, message",
    [
        ("nics: 2", "nic is missing"),
        ("nic: 1e9\nhops: 1", "'hops' is unknown; did you mean 'hop'"),
        ("nic: fast", "nic: expected bytes/s from 1e6 to 1e15 (12 GB/s are 12e9), not 'fast'"),
        ("nic: 1e9\nengine: .inf", "engine: expected bytes/s"),
        ("nic: 10", "nic: expected bytes/s"),
        ("nic: 1e9\nhop: -1", "hop: expected seconds above 0, up to 1"),
        ("nic: 1e9\nnics: 1.5", "nics: expected a whole number of 1 or more, not 1.5"),
        ("nic: 1e9\nnics: true", "nics: expected a whole number"),
        ("nic: 1e9\nname: ''", "name: expected text, such as '10 Gbit/s Ethernet', not ''"),
        ("nic: 1e9\nname:", "name: expected text, such as '10 Gbit/s Ethernet', not None"),
        ("nic: 1e9\nname: 10", "not 10"),
        ("- 1", "expected `key: value` lines"),
    ],
)
def test_a_file_that_cannot_be_right(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ClusterError) as caught:
        Network.load(str(path))
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_the_nearest_network_is_named():
    with pytest.raises(ClusterError, match="did you mean '10gbe'"):
        Network.load("10gb")
