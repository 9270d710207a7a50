"""The formulas for several hosts, against counting hops and bytes by hand."""

import math

import pytest

from hier_allreduce import presets
from hier_allreduce.errors import ClusterError
from hier_allreduce.topology.network import ENGINE, HOP, Network

SLOW_HOPS, SLOW_WIRE = Network(1e30, 1.0, engine=math.inf), Network(1.0, 0.0)


@pytest.mark.parametrize(("hosts", "hops"), [(1, 0), (2, 2), (3, 4), (4, 6), (128, 254)])
def test_hops(hosts, hops):
    assert SLOW_HOPS.ring_seconds(hosts, 1.0, 1) == pytest.approx(hops)
    assert SLOW_HOPS.ring_seconds(hosts, 1.0, 5) == pytest.approx(5 * hops)


@pytest.mark.parametrize(("hosts", "sent"), [(1, 0), (2, 12), (3, 16), (4, 18)])
def test_bytes_that_a_host_sends(hosts, sent):
    assert SLOW_WIRE.ring_seconds(hosts, 12.0, 7) == pytest.approx(sent)


def test_the_processor_needs_the_hops_and_the_bytes_on_any_card():
    network = Network(nic=1e9, hop=1e-3, nics=2, engine=0.5e9)
    for card in (1e6, 1e12):
        assert network._replace(nic=card).processor_seconds(4, 1e6, 3) == pytest.approx(3 * 6e-3 + 1.5 * 2e-3)
    assert network.processor_seconds(1, 1e6, 3) == 0


def test_the_wires_bound_is_what_a_host_sends_by_all_its_cards():
    network = Network(nic=1e9, hop=1.0, nics=4, engine=1e6)
    assert network.wire_seconds(1, 1e6) == 0
    assert network.wire_seconds(2, 1e6) == pytest.approx(1e6 / 4e9)
    assert network.wire_seconds(4, 1e6) == pytest.approx(1.5 * 1e6 / 4e9)


def test_cards_are_shared_evenly_by_devices_in_their_order():
    def cards(devices, nics):
        return [SLOW_WIRE._replace(nics=nics).nic_of(device, devices) for device in range(devices)]

    assert cards(8, 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert cards(3, 2) == [0, 0, 1]
    assert cards(2, 8) == [0, 1]


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
    assert Network.load("ib-edr-4").wire == 4 * 100e9 / 8


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
