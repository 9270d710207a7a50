"""The probe of other hosts, and the check of this host's port."""

import socket
import threading

import pytest
from helpers.ports import free_addresses

from hier_allreduce.cluster import addresses, liveness

SECONDS = 150  # for anything that should happen


def test_all_hosts_are_probed_at_once(monkeypatch):
    """No host name is looked up before all look-ups have begun."""
    getaddrinfo, together = socket.getaddrinfo, threading.Barrier(4)

    def look_up(*args, **options):
        together.wait(SECONDS)
        return getaddrinfo(*args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    hosts = dict(enumerate(free_addresses(4)))
    assert liveness.faults(hosts, SECONDS) == dict.fromkeys(hosts, liveness.GONE)


def test_a_slow_lookup_is_a_host_that_does_not_answer(monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: over.wait(SECONDS) and [])
    assert liveness.faults({1: "slow:1"}, 0.1) == {1: liveness.SILENT}
    over.set()


def test_an_invalid_host_name_cannot_be_reached():
    assert liveness.faults({1: "a..b:1"}, 10.0)[1].startswith("cannot be reached: ")


@pytest.mark.parametrize(("system", "shared"), [("linux", 1), ("win32", 0)])
def test_a_port_is_tried_as_a_server_would(system, shared, monkeypatch):
    """On Windows, SO_REUSEADDR lets two processes listen, so a taken port would seem free."""
    seen = []

    class Probe(socket.socket):
        def bind(self, address):
            seen.append(bool(self.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)))

    monkeypatch.setattr("socket.socket", Probe)
    monkeypatch.setattr("sys.platform", system)
    addresses.refuse_taken("127.0.0.1:2222")
    assert seen == [shared]
