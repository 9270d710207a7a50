"""From times between hosts to a network: robust fits, errors that name hosts, and a file for every reader."""

import random

import pytest

from hier_allreduce.calibration import NETWORK_SIZES, NetworkRuns, calibrate_network
from hier_allreduce.cluster import Cluster
from hier_allreduce.errors import CalibrationError, ClusterError
from hier_allreduce.topology import Network

HOSTS = ("10.0.0.1:2222", "10.0.0.2:2222", "10.0.0.3:2222")
TRUE = Network(nic=1.25e9, hop=0.2e-3, engine=0.9e9)
VERSIONS = {"date": "2026-11-22", "tensorflow": "2.21.0", "hier_allreduce": "0.1.0"}
COPY, START = 1.1e9, 0.15e-3


class Simulated:
    """Times between hosts that ``network`` joins, up to ``noise`` slower; copies of ``slow`` pairs: ten times as long.

    Attributes:
        ran: the bytes of each run.
    """

    def __init__(self, hosts=HOSTS, network=TRUE, noise=0.0, slow=()):
        self.hosts, self.network, self.slow, self.ran = tuple(hosts), network, slow, []
        self._draw, self._noise = random.Random(0), noise

    def sums(self, count, size):
        """Sums as the formula of a network has them."""
        return self._taken(size, self.network.ring_seconds(len(self.hosts), count * size, count))

    def copies(self, pairs, size):
        """Copies between different hosts do not slow each other."""
        return self._taken(size, max(2 * START + size / COPY * (10 if pair in self.slow else 1) for pair in pairs))

    def hops(self, pair, count, size):
        """One copy after another."""
        return self._taken(size, 1e-3 + count * START)

    def _taken(self, size, seconds):
        self.ran.append(size)
        return seconds * (1 + self._draw.uniform(0, self._noise))

    def calibrated(self, noise=0.25, assumed=None, tick=lambda stage: None):
        runs = NetworkRuns(self.hosts, self.sums, self.copies, self.hops)
        return calibrate_network(runs, noise, VERSIONS, assumed, tick)


@pytest.mark.parametrize("hosts", [2, 3])
def test_the_collectives_and_copies_are_those_of_the_network(hosts):
    stages = []
    found = Simulated(HOSTS[:hosts], noise=0.02).calibrated(tick=stages.append)
    assert found.network.hop == pytest.approx(TRUE.hop, rel=0.05)
    assert found.network.engine == pytest.approx(TRUE.engine, rel=0.05)
    assert found.measurement.copy_start == pytest.approx(START, rel=0.05)
    assert sorted(found.measurement.copies) == sorted((a, b) for a in range(hosts) for b in range(hosts) if a != b)
    assert all(line.rate == pytest.approx(COPY, rel=0.05) for line in found.measurement.copies.values())
    assert found.measurement.check == pytest.approx(1, abs=0.05)
    assert list(dict.fromkeys(stages)) == ["sums over all hosts", "copies between hosts"]


def test_all_hosts_measure_the_same_again_because_they_see_the_same_times():
    first, second = (Simulated(noise=0.6) for _ in range(2))
    assert str(first.calibrated(noise=0.3)) == str(second.calibrated(noise=0.3))
    assert first.ran == second.ran


def test_a_slow_network_is_measured_with_fewer_bytes():
    slow = Simulated(network=Network(nic=5e6, engine=5e6))
    assert slow.calibrated().network.engine == pytest.approx(5e6, rel=0.05)
    assert slow.ran.count(NETWORK_SIZES[-1]) == 10 * 7  # those of copies, which are not slow here: six pairs, and all


def test_a_slow_cable_is_shown_with_its_hosts():
    printed = str(Simulated(slow=[(1, 2)]).calibrated())
    slow = [line for line in printed.splitlines() if "0.11 " in line and "from" not in line]
    assert [line.split("  ")[-3:-1] for line in slow if "host" in line and ":" in line] == [
        ["host 1 (10.0.0.2:2222)", "host 2 (10.0.0.3:2222)"]
    ]


def test_noise_is_an_error_that_names_the_hosts():
    with pytest.raises(CalibrationError, match=r"sum.* over host 0 \(10.0.0.1:2222\), host 1 .*too noisy"):
        Simulated(noise=3).calibrated(noise=0.05)


def test_noisy_copies_are_an_error_that_names_the_pair(monkeypatch):
    runs = Simulated()
    calm, draw = runs.copies, random.Random(0)
    monkeypatch.setattr(
        runs, "copies", lambda pairs, size: calm(pairs, size) * (draw.uniform(1, 9) if (1, 2) in pairs else 1)
    )
    with pytest.raises(CalibrationError, match=r"from host 1 \(10.0.0.2:2222\) to host 2 \(10.0.0.3:2222\): too noisy"):
        runs.calibrated(noise=0.05)


def test_cards_are_those_that_are_known_or_what_was_seen():
    assert Simulated().calibrated().network.nic == pytest.approx(COPY, rel=0.1)
    known = Simulated().calibrated(assumed=Network.load("ib-edr-4")).network
    assert (known.nic, known.nics) == (12.5e9, 4)
    assert Simulated().calibrated(assumed=Network(1e6, nics=2)).network.nic == pytest.approx(COPY / 2, rel=0.1)


def test_the_report_has_what_was_assumed_beside_it():
    calibration = Simulated().calibrated()
    lines = {line.split("  ")[0]: line.split() for line in str(calibration).splitlines()}
    assert lines["hop of a collective"][-2:] == ["300", "µs"]
    assert lines["collectives, GB/s of a host, several"][-1] == "0.8"
    assert lines["card, GB/s"][-1] == "–"
    assert any(line.split() == ["measured", "quartiles", "assumed"] for line in str(calibration).splitlines())


def test_plans_and_clusters_read_the_file(tmp_path):
    file = str(tmp_path / "network.yaml")
    found = Simulated().calibrated()
    assert found.save(file) == file
    assert Network.load(file) == found.network
    assert Network.load(file).name == "a network measured on 2026-11-22"
    assert Cluster(HOSTS, 0, 8, network=file).network == found.network
    text = (tmp_path / "network.yaml").read_text(encoding="utf-8")
    assert text.startswith(f"# 3 hosts ({', '.join(HOSTS)}), 2026-11-22, TensorFlow 2.21.0\n")


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "folder").write_text("", encoding="utf-8")
    with pytest.raises(CalibrationError, match="cannot be written"):
        Simulated().calibrated().save(str(tmp_path / "folder" / "network.yaml"))


def test_what_no_network_can_be_is_an_error():
    with pytest.raises(ClusterError, match=r"measured network: engine: expected bytes/s from 1e6"):
        Simulated(network=Network(nic=1e5, engine=1e5)).calibrated()
